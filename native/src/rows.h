// Copies of rows of heads: converted to float32, padded, transposed; and back.
#pragma once
#include <algorithm>
#include <cstring>

#include "problem.h"
#include "simd.h"

namespace jaxmha {
namespace JAXMHA_ISA {

constexpr long ROWS = 64;  // rows of a panel: one tile of transposed scores is `keys ROWS`

inline long padded(long features) { return (features + W - 1) / W * W; }

inline float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

// Rounds to the nearest, ties to even; a NaN stays one.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40 : rounded);
}

// to[0..n) = a row of any type.
inline void read_row(const char* from, Float type, long n, float* to) {
  const auto* half = reinterpret_cast<const uint16_t*>(from);
  long i = 0;
  switch (type) {
    case Float::f32:
      std::memcpy(to, from, n * sizeof(float));
      return;
    case Float::bf16:
      for (; i < n; i++) to[i] = from_bf16(half[i]);
      return;
    case Float::f16:
      for (; i + 8 <= n; i += 8) from_f16x8(half + i, to + i);
      for (; i < n; i++) to[i] = from_f16(half[i]);
  }
}

inline void write_row(const float* from, Float type, long n, char* to) {
  auto* half = reinterpret_cast<uint16_t*>(to);
  long i = 0;
  switch (type) {
    case Float::f32:
      std::memcpy(to, from, n * sizeof(float));
      return;
    case Float::bf16:
      for (; i < n; i++) half[i] = to_bf16(from[i]);
      return;
    case Float::f16:
      for (; i + 8 <= n; i += 8) to_f16x8(from + i, half + i);
      for (; i < n; i++) half[i] = to_f16(from[i]);
  }
}

// A row in `width` columns; those beyond n are 0.
inline void pad_row(const char* from, Float type, long n, long width, float* to) {
  read_row(from, type, n, to);
  std::fill(to + n, to + width, 0.f);
}

// Asks for the cache lines of a row before it is read.
inline void fetch(const void* row, long bytes) {
  for (long i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

inline bool all_finite(const float* x, long n) {
  unsigned bad = 0;
  for (long i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bad |= (bits & 0x7f800000u) == 0x7f800000u;
  }
  return !bad;
}

// to[c][r] = from[r][c], of `columns ROWS`; rows beyond are 0.
inline __attribute__((noinline)) void transpose(const float* from, long ld, long rows,
                                                long columns, float* to) {
  long r = 0;
  for (; r + 8 <= rows; r += 8) {
    long c = 0;
    for (; c + 8 <= columns; c += 8) transpose8(from + r * ld + c, ld, to + c * ROWS + r, ROWS);
    for (; c < columns; c++)
      for (long i = r; i < r + 8; i++) to[c * ROWS + i] = from[i * ld + c];
  }
  for (long i = 0; i < rows % 8; i++)
    for (long c = 0; c < columns; c++) to[c * ROWS + r + i] = from[(r + i) * ld + c];
  if (rows < ROWS)
    for (long c = 0; c < columns; c++) std::fill(to + c * ROWS + rows, to + (c + 1) * ROWS, 0.f);
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
