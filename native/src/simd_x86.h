// Vectors of 16 and 32 bytes, alike for AVX-512 and AVX2.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace jaxmha {
namespace JAXMHA_ISA {

// Numbers of float16 in float32, and back: rounded to the nearest, ties to even.
inline float from_f16(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
inline void from_f16x8(const uint16_t* from, float* to) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline void to_f16x8(const float* from, uint16_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}

// Eight rows of eight floats, transposed.
inline void transpose8(const float* from, long ld, float* to, long ldt) {
  __m256 x[8], y[8];
  for (int i = 0; i < 8; i++) x[i] = _mm256_loadu_ps(from + i * ld);
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xEE);
    x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * ldt, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * ldt, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  }
}

// to &= eight rows of eight bytes, transposed.
inline void and_transposed8(const uint8_t* from, long ld, uint8_t* to, long ldt) {
  __m128i x[8];
  for (int i = 0; i < 8; i++)
    x[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * ld));
  __m128i y[4];
  for (int i = 0; i < 4; i++) y[i] = _mm_unpacklo_epi8(x[2 * i], x[2 * i + 1]);
  const __m128i a = _mm_unpacklo_epi16(y[0], y[1]), b = _mm_unpackhi_epi16(y[0], y[1]);
  const __m128i c = _mm_unpacklo_epi16(y[2], y[3]), d = _mm_unpackhi_epi16(y[2], y[3]);
  const __m128i found[4] = {_mm_unpacklo_epi32(a, c), _mm_unpackhi_epi32(a, c),
                            _mm_unpacklo_epi32(b, d), _mm_unpackhi_epi32(b, d)};
  for (int i = 0; i < 4; i++) {
    auto* low = reinterpret_cast<__m128i*>(to + 2 * i * ldt);
    auto* high = reinterpret_cast<__m128i*>(to + (2 * i + 1) * ldt);
    _mm_storel_epi64(low, _mm_and_si128(_mm_loadl_epi64(low), found[i]));
    const __m128i upper = _mm_unpackhi_epi64(found[i], found[i]);
    _mm_storel_epi64(high, _mm_and_si128(_mm_loadl_epi64(high), upper));
  }
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
