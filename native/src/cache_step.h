// One step over a cache of keys and values, as its handler gives it to the kernels. Sizes by the
// dimension key of the project; R counts the rows of a key head: those of its query heads and
// tokens, of which the tokens come last.
#pragma once
#include <cstdint>

namespace jaxmha {

enum class Stored : uint8_t { f32, bf16, f16, s8, e4m3, e5m2 };
// Repeats a macro for every stored type.
#define JAXMHA_EVERY_STORED(of) of(f32) of(bf16) of(f16) of(s8) of(e4m3) of(e5m2)

constexpr long size_of(Stored type) {
  return type == Stored::f32 ? 4 : type == Stored::bf16 || type == Stored::f16 ? 2 : 1;
}

// Keys or values `P K page features`.
struct Pages {
  const char* data;
  const float* scale;  // P K page; null: numbers are stored as they are
  Stored type;
  long features;
};

// Slot s of batch row b lies in page table[b, s / page]. A dense cache has one page per batch row,
// and no table. Slot s holds the latest token whose position is s modulo the number of slots.
struct CacheStep {
  long B, K, R, T, H, h, P, page, M;
  long left;       // i - left <= j, or FAR
  float soft_cap;  // 0: none
  const float* rows;  // B K R H, scaled
  Pages key, value;
  const int32_t* table;    // B M, or null
  const int32_t* lengths;  // B: tokens, with those of the rows
  const int32_t* first;    // B: position of the first token of the rows
  const uint8_t* allowed;  // b n t s, or null
  long allowed_b, allowed_n, allowed_t, allowed_s;  // steps, 0 where the axis has size 1
  float *out, *row_max, *row_sum;  // B K R h, B K R, B K R: the sums before the division

  long slots() const { return M * page; }
};

}  // namespace jaxmha
