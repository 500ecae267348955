// Tiles of transposed scores, `keys ROWS`: keys lie in rows, so that they need no packing, queries
// in lanes, so that the softmax needs no sum over lanes.
#pragma once
#include "conditions.h"
#include "functions.h"
#include "product.h"

namespace jaxmha {
namespace JAXMHA_ISA {

constexpr float LOWEST = -3.40282347e38f;

// What lies around a tile of scores.
struct TileOfScores {
  long keys, lanes;            // rows in use, and vectors of each
  float* scores;               // keys ROWS
  const uint8_t* allowed;      // keys ROWS, where the tile is mixed
  const float* bias;           // keys ROWS, or null
  float soft_cap;              // 0: none
  float* slope = nullptr;      // keys ROWS: derivative of the soft cap, where it is asked for
};

template <int M, int N>
struct StoreAndMax {
  float *__restrict scores, *__restrict row_max;
  inline __attribute__((always_inline)) void operator()(Vector (&x)[M][N]) const {
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      Vector m = load(row_max + j * W);
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) {
        m = max(m, x[i][j]);
        store(scores + i * ROWS + j * W, x[i][j]);
      }
      store(row_max + j * W, m);
    }
  }
};

// Scores of a strip of N vectors of rows, and their row max.
template <int N>
void score_strip(long keys, const float* key, long ldk, const float* query, long H, float* scores,
                 float* row_max) {
  long i = 0;
  for (; i + MR <= keys; i += MR) {
    for (long r = i + MR; r < i + 2 * MR; r++)
      for (long x = 0; x < H; x += 16) __builtin_prefetch(key + r * ldk + x);
    tile<MR, N, true>({key + i * ldk, ldk, 1}, query, ROWS, H,
                      StoreAndMax<MR, N>{scores + i * ROWS, row_max});
  }
  for (; i < keys; i++)
    tile<1, N, true>({key + i * ldk, ldk, 1}, query, ROWS, H,
                     StoreAndMax<1, N>{scores + i * ROWS, row_max});
}

// Scores where all pairs are allowed, and their row max.
void clear_scores(long keys, long lanes, const float* key, long ldk, const float* query, long H,
                  float* scores, float* row_max);

// Applies soft cap, bias and conditions: masked scores become -inf, whatever they were.
void apply_conditions(const TileOfScores& tile);

// The row max of a tile and of what came before.
void update_row_max(const TileOfScores& tile, float* row_max);

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
