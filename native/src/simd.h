// A thin layer over AVX-512 and AVX2 + FMA: all other code is written once and compiled per ISA.
//
// The objects of an ISA are linked after those of every narrower one (build_library.py), so that a
// function of the standard library that both contain is taken from the narrower.
#pragma once
#include <immintrin.h>

#include <cstdint>

#if defined(__AVX512F__)
#define JAXMHA_ISA avx512
#else
#define JAXMHA_ISA avx2
#endif

namespace jaxmha {
namespace JAXMHA_ISA {

#if defined(__AVX512F__)

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

#else

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

#endif

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
