// Numbers of a cache, as they are stored, and vectors of them in float32.
#pragma once
#include <algorithm>
#include <cstring>

#include "cache_step.h"
#include "rows.h"

namespace jaxmha {
namespace JAXMHA_ISA {

// W half-precision numbers in float32.
#if defined(__AVX512F__)
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
#else
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
#endif

// W numbers from the i-th of a row on.
template <Stored type>
inline Vector widened(const char* row, long i) {
  if constexpr (type == Stored::f32) return load(reinterpret_cast<const float*>(row) + i);
  if constexpr (type == Stored::bf16) return bf16_to_f32(load_halves(row + 2 * i));
  if constexpr (type == Stored::f16) return f16_to_f32(load_halves(row + 2 * i));
  if constexpr (type == Stored::s8) return s8_to_f32(row + i);
  if constexpr (type == Stored::e5m2)
    return f16_to_f32(e5m2_to_f16(bytes_to_halves(row + i)));
  return mul(f16_to_f32(e4m3_to_f16(bytes_to_halves(row + i))), set1(256.f));
}

// `count` rows of n numbers become rows of `width` floats, of which the last are 0.
template <Stored type>
void widen_rows(const char* from, long count, long n, long width, float* to) {
  constexpr long bytes = size_of(type);
  for (long row = 0; row < count; row++, from += n * bytes, to += width) {
    long x = 0;
    for (; x + W <= n; x += W) store(to + x, widened<type>(from, x));
    if (x == n) continue;
    char rest[W * 4] = {};
    std::memcpy(rest, from + x * bytes, (n - x) * bytes);
    store(to + x, widened<type>(rest, 0));
    std::fill(to + n, to + width, 0.f);
  }
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
