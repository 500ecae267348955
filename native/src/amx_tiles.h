// Products of blocks on AMX, whose tiles multiply bfloat16 and sum in float32.
//
// A float32 is the sum of three bfloat16: 24 bits are 3 times 8. Of the nine products of two such sums
// the three smallest, each of at most 2^-25 of the whole, are left out. Source: Henry, Tang and
// Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
// Computations" (2019). An instruction sums 32 products before it adds them to the tile, so that fewer
// sums are rounded than where each product is added.
#pragma once
#include <immintrin.h>

#include "rows.h"
#include "scratch.h"

namespace jaxmha {
namespace amx {

using namespace avx512;

constexpr long SIDE = 32;  // rows or columns of a block: two tiles
constexpr long STEP = 32;  // depth of a tile
// Words are pairs of bfloat16. Blocks of rows and of columns have, step after step, both tiles of the
// highest part, then those of the parts below.
constexpr long TILE_WORDS = 16 * 16, PART_WORDS = 2 * TILE_WORDS;

using Word = uint32_t;

inline long steps_of(long depth) { return (depth + STEP - 1) / STEP; }
inline long blocks_of(long count) { return (count + SIDE - 1) / SIDE; }

inline Word* take_words(Scratch& memory, size_t count) {
  return reinterpret_cast<Word*>(memory.take(count));
}

// True for attention on AMX. Fewer rows or scores take longer to pack than AMX saves, as do many keys for
// few rows; a packed head has at most LARGEST numbers. Where a gradient follows, the kernels that compute
// its logits again have to round in the same way, and that of a bias runs in float32.
inline bool suits(const Problem& p, bool gradient) {
  constexpr long LEAST_SCORES = 8192, MANY_KEYS = 4096, MANY_ROWS = 128, LARGEST = 12l << 20;
  for (const Heads* x : {&p.query, &p.key, &p.value})
    if (x->type != Float::bf16) return false;
  if (gradient && p.bias) return false;
  return p.T >= SIDE && p.T * p.S >= LEAST_SCORES && p.S * (p.H + p.h) <= LARGEST &&
         (p.S <= MANY_KEYS || p.group() * p.T >= MANY_ROWS);
}

inline __m512i bits(Vector x) { return _mm512_castps_si512(x); }

// The first n entries, of at most 16; 0 beyond.
inline Vector load_some(const float* p, long n) {
  if (n >= W) return load(p);
  return n <= 0 ? set1(0.f) : _mm512_maskz_loadu_ps((1u << n) - 1, p);
}

// The nearest bfloat16.
inline Vector nearest(Vector x) {
  const __m512i up = _mm512_add_epi32(bits(x), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(0xffff0000)));
}

// The parts of two vectors, which share words. A tile of rows has depths j and 16 + j in word j of every
// row; one of columns has them in row j.
template <int PARTS>
inline void split(Vector low, Vector high, Word* to) {
  for (int part = 0; part < PARTS; part++, to += PART_WORDS) {
    const Vector a = nearest(low), b = nearest(high);
    _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(bits(a), 16), bits(b)));
    low = sub(low, a), high = sub(high, b);
  }
}

// `count` rows of `depth` become blocks of rows, which are `steps` long.
template <int PARTS>
inline void pack_rows(const float* rows, long stride, long count, long depth, long steps, Word* to) {
  constexpr long STEP_WORDS = PARTS * PART_WORDS;
  for (long i = 0; i < count; i++, rows += stride) {
    Word* word = to + i / SIDE * steps * STEP_WORDS + i % SIDE / W * TILE_WORDS + i % W * W;
    for (long p = 0; p < depth; p += STEP, word += STEP_WORDS)
      split<PARTS>(load_some(rows + p, depth - p), load_some(rows + p + W, depth - p - W), word);
  }
}

// SIDE columns of `depth` rows become a block of columns.
template <int PARTS>
inline void pack_columns(const float* from, long stride, long depth, Word* to) {
  const auto row = [&](long p, long tile) {
    return p < depth ? load(from + p * stride + tile * W) : set1(0.f);
  };
  for (long p = 0; p < depth; p += STEP, to += PARTS * PART_WORDS)
    for (long tile = 0; tile < 2; tile++)
      for (long j = 0; j < W; j++)
        split<PARTS>(row(p + j, tile), row(p + W + j, tile), to + tile * TILE_WORDS + j * W);
}

// Loads tiles 4 and 5, of rows; 6 and 7, of columns; multiplies each with each. The intrinsics are
// statements, and take numerals.
#define JAXMHA_ROWS(part)                         \
  _tile_loadd(4, a + (part) * PART_WORDS, 64);    \
  _tile_loadd(5, a + (part) * PART_WORDS + TILE_WORDS, 64)
#define JAXMHA_COLUMNS(part)                      \
  _tile_loadd(6, b + (part) * PART_WORDS, 64);    \
  _tile_loadd(7, b + (part) * PART_WORDS + TILE_WORDS, 64)
#define JAXMHA_MULTIPLY    \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(1, 4, 7); \
  _tile_dpbf16ps(2, 5, 6); \
  _tile_dpbf16ps(3, 5, 7)

// c[SIDE x SIDE], rows `ldc` apart, of a block of rows in A parts and one of columns in B parts, small
// products first. `lines` cache lines from `next` on are fetched before each step.
template <int A, int B>
inline void multiply(const Word* a, const Word* b, long steps, float* c, long ldc,
                     const Word* next = nullptr, long lines = 0) {
  static_assert(A == 1 || B == 1 || (A == 3 && B == 3), "no order of products for these parts");
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long s = 0; s < steps; s++, a += A * PART_WORDS, b += B * PART_WORDS) {
    for (long i = 0; i < lines; i++, next += W) __builtin_prefetch(next, 0, 2);
    if constexpr (A == 3 && B == 3) {
      JAXMHA_ROWS(0);
      JAXMHA_COLUMNS(2);
      JAXMHA_MULTIPLY;
      JAXMHA_COLUMNS(1);
      JAXMHA_MULTIPLY;
      JAXMHA_ROWS(1);
      JAXMHA_MULTIPLY;
      JAXMHA_COLUMNS(0);
      JAXMHA_MULTIPLY;
      JAXMHA_ROWS(2);
      JAXMHA_MULTIPLY;
      JAXMHA_ROWS(0);
      JAXMHA_MULTIPLY;
    } else if constexpr (A == 1) {
      JAXMHA_ROWS(0);
      for (int part = B - 1; part >= 0; part--) {
        JAXMHA_COLUMNS(part);
        JAXMHA_MULTIPLY;
      }
    } else {
      JAXMHA_COLUMNS(0);
      for (int part = A - 1; part >= 0; part--) {
        JAXMHA_ROWS(part);
        JAXMHA_MULTIPLY;
      }
    }
  }
  _tile_stored(0, c, ldc * 4);
  _tile_stored(1, c + W, ldc * 4);
  _tile_stored(2, c + W * ldc, ldc * 4);
  _tile_stored(3, c + W * ldc + W, ldc * 4);
  asm volatile("" ::: "memory");
}
#undef JAXMHA_ROWS
#undef JAXMHA_COLUMNS
#undef JAXMHA_MULTIPLY

struct __attribute__((packed)) Configuration {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  Configuration() {
    for (int i = 0; i < 8; i++) bytes[i] = 64, rows[i] = 16;
  }
};

// Tiles are released at the end: a thread that holds some costs more to switch.
struct Tiles {
  Tiles() {
    const Configuration configuration;
    asm volatile("" ::"m"(configuration));  // the intrinsic says that it reads a part
    _tile_loadconfig(&configuration);
  }
  ~Tiles() { _tile_release(); }
};

}  // namespace amx
}  // namespace jaxmha
