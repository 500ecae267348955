// Numbers of a cache, as they are stored, and vectors of them in float32.
#pragma once
#include <algorithm>
#include <cstring>

#include "cache_step.h"
#include "rows.h"

namespace jaxmha {
namespace JAXMHA_ISA {

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
