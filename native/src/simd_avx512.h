// AVX-512: 32 registers of 16 floats.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace jaxmha {
namespace avx512 {

using Vector = __m512;
using Lanes = __mmask16;
constexpr int W = 16;           // floats of a vector
constexpr int MR = 6, NR = 4;   // rows and vectors of a register tile

inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
inline Vector set1(float x) { return _mm512_set1_ps(x); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector div(Vector a, Vector b) { return _mm512_div_ps(a, b); }
inline Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline Vector round(Vector x) { return _mm512_roundscale_ps(x, 8); }
inline Lanes is_zero(Vector x) { return _mm512_cmp_ps_mask(x, set1(0.f), _CMP_EQ_OQ); }
inline Lanes less(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Vector select(Lanes m, Vector yes, Vector no) { return _mm512_mask_mov_ps(no, m, yes); }
// p * 2 ** n for n of at most 0; 0 where n is below -126.
inline Vector scale_down(Vector p, Vector n) { return _mm512_scalef_ps(p, n); }
inline float sum(Vector x) { return _mm512_reduce_add_ps(x); }
// Lanes whose byte is not 0.
inline Lanes nonzero(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm_test_epi8_mask(bytes, bytes);
}

// Stores the sums of the lanes of four vectors.
inline void store_sums(float* to, Vector a, Vector b, Vector c, Vector d) {
  const Vector ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vector cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Vector x = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}

// W 16-bit numbers, and their conversions to float32.
using Halves = __m256i;
inline Halves load_halves(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline Halves bytes_to_halves(const void* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline Vector f16_to_f32(Halves x) { return _mm512_cvtph_ps(x); }
inline Vector bf16_to_f32(Halves x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline Vector s8_to_f32(const void* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline Halves e5m2_to_f16(Halves x) { return _mm256_slli_epi16(x, 8); }
// Of bias 15 in place of 7, so 2 ** 8 times too small; NaN becomes NaN.
inline Halves e4m3_to_f16(Halves x) {
  const Halves size = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
  const Halves sign = _mm256_slli_epi16(_mm256_andnot_si256(_mm256_set1_epi16(0x7f), x), 8);
  const Halves nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f));
  return _mm256_or_si256(_mm256_or_si256(sign, nan), _mm256_slli_epi16(size, 7));
}

}  // namespace avx512
}  // namespace jaxmha
