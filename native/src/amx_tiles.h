// Products of blocks on AMX, whose tiles multiply bfloat16 and sum in float32.
//
// A float32 is the sum of three bfloat16: 24 bits are 3 times 8. Of the nine products of two such sums
// the three smallest are left out, each of at most 2^-25 of the whole where parts are rounded, and of
// 2^-22 where those of both are truncated. Source: Henry, Tang and
// Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
// Computations" (2019). An instruction sums 32 products before it adds them to the tile, so that fewer
// sums are rounded than where each product is added.
#pragma once
#include <immintrin.h>

#include "product.h"
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

// Parts in which attention on AMX multiplies queries, keys and values; 0 on AVX-512. Fewer rows, scores
// or features take longer to pack than AMX saves, as do many keys for few rows; a packed head has at
// most LARGEST words. Where a gradient follows, the kernels that compute its logits again have to round
// in the same way: that of a bias runs on AVX-512, and so do parts of a problem.
inline int parts_of(const Problem& p, bool gradient) {
  constexpr long LARGEST = 6l << 20, MANY_KEYS = 4096, MANY_ROWS = 128;
  constexpr long LEAST_SCORES = 8192;                                            // of one part
  constexpr long LEAST_SIDE = 128, LEAST_SCORES_3 = 90000, LEAST_FEATURES = 48;  // of three parts
  if (p.in_parts || (gradient && p.bias)) return 0;
  int parts = 1;
  for (const Heads* x : {&p.query, &p.key, &p.value})
    if (x->type != Float::bf16) parts = 3;
  const long words = parts * p.S * (blocks_of(p.H) + blocks_of(p.h)) * SIDE / 2;
  if (p.T < SIDE || p.T * p.S < LEAST_SCORES || words > LARGEST) return 0;
  if (p.S > MANY_KEYS && p.group() * p.T < MANY_ROWS) return 0;
  const bool few = std::min(p.T, p.S) < LEAST_SIDE || p.T * p.S < LEAST_SCORES_3;
  return parts == 3 && (few || p.H + p.h < LEAST_FEATURES) ? 0 : parts;
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

// True if keys or values can be multiplied as so many parts: one has to be finite, since weights of 0 are
// multiplied, too; three, also 0 or of a size whose lowest part is normal, since AMX takes others as 0,
// and whose products are finite.
template <int PARTS>
inline bool in_range(const float* x, long n) {
  if (PARTS == 1) return all_finite(x, n);
  constexpr uint32_t ONE = 127u << 23, LEAST = ONE - (90u << 23), MOST = ONE + (55u << 23);
  unsigned bad = 0;
  for (long i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    bad |= (bits != 0) & (bits - LEAST > MOST - LEAST);
  }
  return !bad;
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

// The words of the highest halves of two vectors.
inline __m512i high_words(Vector low, Vector high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(bits(low), 16), bits(high));
}

// Truncates each float32 to bfloat16, its 8 highest significand bits.
inline Vector high_part(Vector x) {
  return _mm512_castsi512_ps(_mm512_and_si512(bits(x), _mm512_set1_epi32(0xffff0000)));
}

// As `split`, but parts are truncated: it is faster, and NaN and large numbers keep their exponent,
// which rounding could change. Products of parts that are left out have the sign of the whole product
// if both numbers are truncated, and either sign if one is rounded.
template <int PARTS>
inline void split_truncated(Vector low, Vector high, Word* to) {
  for (int part = 0; part + 1 < PARTS; part++, to += PART_WORDS) {
    _mm512_storeu_si512(to, high_words(low, high));
    low = sub(low, high_part(low)), high = sub(high, high_part(high));
  }
  if (PARTS == 2) low = nearest(low), high = nearest(high);
  _mm512_storeu_si512(to, high_words(low, high));
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

// SIDE columns of `depth` rows become a block of columns, of truncated parts.
template <int PARTS>
inline void pack_columns(const float* from, long stride, long depth, Word* to) {
  const auto row = [&](long p, long tile) {
    return p < depth ? load(from + p * stride + tile * W) : set1(0.f);
  };
  for (long p = 0; p < depth; p += STEP, to += PARTS * PART_WORDS)
    for (long tile = 0; tile < 2; tile++)
      for (long j = 0; j < W; j++)
        split_truncated<PARTS>(row(p + j, tile), row(p + W + j, tile), to + tile * TILE_WORDS + j * W);
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

// Products of tiles per step, for operands of `a` and `b` parts.
constexpr long products_of(int a, int b) { return a == 3 && b == 3 ? 6 : a * b; }

// Pieces of work that are done between products, evenly: tiles leave the vectors idle.
template <class Work>
struct Between {
  Work& work;
  long pieces, products, due = 0, done = 0;
  Between(Work& work, long products) : work(work), pieces(work.pieces()), products(products) {}
  void operator()() {
    for (due += pieces; due >= products && done < pieces; due -= products) one();
  }
  void rest() {
    while (done < pieces) one();
  }
  void one() { work.next(), done++; }
};

// c[SIDE x SIDE], rows `ldc` apart, of a block of rows in A parts and one of columns in B parts, in an
// order of few loads, the largest product last. `each` is called after each of the products of a step.
template <int A, int B, class Each = Nothing>
inline void multiply(const Word* a, const Word* b, long steps, float* c, long ldc, Each&& each = {}) {
  static_assert(A == 1 || B == 1 || (A == 3 && B == 3), "no order of products for these parts");
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long s = 0; s < steps; s++, a += A * PART_WORDS, b += B * PART_WORDS) {
    if constexpr (A == 3 && B == 3) {
      JAXMHA_ROWS(0);
      JAXMHA_COLUMNS(2);
      JAXMHA_MULTIPLY; each();
      JAXMHA_COLUMNS(1);
      JAXMHA_MULTIPLY; each();
      JAXMHA_ROWS(1);
      JAXMHA_MULTIPLY; each();
      JAXMHA_COLUMNS(0);
      JAXMHA_MULTIPLY; each();
      JAXMHA_ROWS(2);
      JAXMHA_MULTIPLY; each();
      JAXMHA_ROWS(0);
      JAXMHA_MULTIPLY; each();
    } else if constexpr (A == 1) {
      JAXMHA_ROWS(0);
      for (int part = B - 1; part >= 0; part--) {
        JAXMHA_COLUMNS(part);
        JAXMHA_MULTIPLY; each();
      }
    } else {
      JAXMHA_COLUMNS(0);
      for (int part = A - 1; part >= 0; part--) {
        JAXMHA_ROWS(part);
        JAXMHA_MULTIPLY; each();
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
    asm volatile("" ::"m"(configuration));  // `_tile_loadconfig` declares a read of only a part of it
    _tile_loadconfig(&configuration);
  }
  ~Tiles() { _tile_release(); }
};

}  // namespace amx
}  // namespace jaxmha
