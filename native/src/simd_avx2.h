// AVX2 with FMA and F16C: 16 registers of 8 floats.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace jaxmha {
namespace avx2 {

using Vector = __m256;
using Lanes = __m256;
constexpr int W = 8;
constexpr int MR = 6, NR = 2;

inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vector x) { _mm256_storeu_ps(p, x); }
inline Vector set1(float x) { return _mm256_set1_ps(x); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector div(Vector a, Vector b) { return _mm256_div_ps(a, b); }
inline Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector round(Vector x) { return _mm256_round_ps(x, 8); }
inline Lanes is_zero(Vector x) { return _mm256_cmp_ps(x, set1(0.f), _CMP_EQ_OQ); }
inline Lanes less(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Vector select(Lanes m, Vector yes, Vector no) { return _mm256_blendv_ps(no, yes, m); }
inline Vector scale_down(Vector p, Vector n) {
  const Vector kept = _mm256_cmp_ps(n, set1(-126.f), _CMP_NLT_UQ);  // NaN stays NaN
  const __m256i steps = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(p), steps);
  return _mm256_and_ps(kept, _mm256_castsi256_ps(bits));
}
inline float sum(Vector x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline Lanes nonzero(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(wide, _mm256_setzero_si256()));
}

// Stores the sums of the lanes of four vectors.
inline void store_sums(float* to, Vector a, Vector b, Vector c, Vector d) {
  const Vector ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vector cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const Vector y = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}

// W 16-bit numbers, and their conversions to float32.
using Halves = __m128i;
inline Halves load_halves(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Halves bytes_to_halves(const void* p) {
  return _mm_cvtepu8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
inline Vector f16_to_f32(Halves x) { return _mm256_cvtph_ps(x); }
inline Vector bf16_to_f32(Halves x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline Vector s8_to_f32(const void* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
inline Halves e5m2_to_f16(Halves x) { return _mm_slli_epi16(x, 8); }
inline Halves e4m3_to_f16(Halves x) {
  const Halves size = _mm_and_si128(x, _mm_set1_epi16(0x7f));
  const Halves sign = _mm_slli_epi16(_mm_andnot_si128(_mm_set1_epi16(0x7f), x), 8);
  const Halves nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f));
  return _mm_or_si128(_mm_or_si128(sign, nan), _mm_slli_epi16(size, 7));
}

}  // namespace avx2
}  // namespace jaxmha
