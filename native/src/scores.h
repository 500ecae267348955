// Tiles of transposed scores, `keys ROWS`: keys lie in rows, so that they need no packing, queries
// in lanes, so that the softmax needs no sum over lanes.
#pragma once
#include "conditions.h"
#include "functions.h"
#include "product.h"

namespace jaxmha {
namespace JAXMHA_ISA {

constexpr float LOWEST = -3.40282347e38f;

// A tile of scores and its conditions.
struct TileOfScores {
  long keys, lanes;            // rows in use, and vectors of each
  float* scores;               // keys ROWS
  const uint8_t* allowed;      // keys ROWS, where the tile is mixed
  const float* bias;           // keys ROWS, or null
  float rest, soft_cap;        // factor of whole logits, else 1; soft_cap 0: none
  float* cap_gradient = nullptr;  // keys ROWS: derivative of the soft cap, for gradients
};

template <int M, int N>
struct StoreAndMax {
  float *__restrict scores, *__restrict row_max;  // row_max: or null
  bool plus;  // to what is there
  inline __attribute__((always_inline)) void operator()(Vector (&x)[M][N]) const {
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      Vector m = row_max ? load(row_max + j * W) : set1(0.f);
#pragma GCC unroll 16
      for (int i = 0; i < M; i++) {
        float* const to = scores + i * ROWS + j * W;
        if (plus) x[i][j] = add(load(to), x[i][j]);
        m = max(m, x[i][j]);
        store(to, x[i][j]);
      }
      if (row_max) store(row_max + j * W, m);
    }
  }
};

// Scores of M keys and N vectors of rows, and their row max.
template <int M, int N, class Each>
void score_piece(const float* key, long ldk, const float* query, long ldq, long H, long terms,
                 float* scores, float* row_max, Each& each) {
  long p = 0;
  for (; p + terms < H; p += terms) {
    const Left left{key + p, ldk, 1};
    if (p == 0)
      tile<M, N, true>(left, query, ldq, terms,
                       Store<Into::replaced, M, N>{scores, ROWS, nullptr}, each);
    else
      tile<M, N, true>(left, query + p * ldq, ldq, terms,
                       Store<Into::added, M, N>{scores, ROWS, nullptr}, each);
  }
  tile<M, N, true>({key + p, ldk, 1}, query + p * ldq, ldq, H - p,
                   StoreAndMax<M, N>{scores, row_max, p > 0}, each);
}

// The same of any number of keys.
template <int N>
void score_strip(long keys, const float* key, long ldk, const float* query, long H, long terms,
                 float* scores, float* row_max) {
  Nothing nothing;
  long i = 0;
  for (; i + MR <= keys; i += MR) {
    for (long r = i + MR; r < i + 2 * MR; r++)
      for (long x = 0; x < H; x += 16) __builtin_prefetch(key + r * ldk + x);
    score_piece<MR, N>(key + i * ldk, ldk, query, ROWS, H, terms, scores + i * ROWS, row_max,
                       nothing);
  }
  for (; i < keys; i++)
    score_piece<1, N>(key + i * ldk, ldk, query, ROWS, H, terms, scores + i * ROWS, row_max,
                      nothing);
}

// Products of rows `count depth` and of `depth ROWS`, such as scores: sums of parts of so many
// terms, or of float64 where that is 0. `row_max` becomes at least the largest, unless it is null.
void short_products(long count, long lanes, long depth, long terms, const float* rows,
                    long stride, const float* columns, float* to, float* row_max = nullptr);

// Applies soft cap, bias and conditions: masked scores become -inf, whatever they were.
void apply_conditions(const TileOfScores& tile);

// The row max of a tile and of what came before.
void update_row_max(long count, long lanes, const float* scores, float* row_max);

// Scores become exponentials below the new row max; alpha: what the row max leaves of earlier sums.
void exponentials(long keys, long lanes, const Exponent& exponent, float* scores,
                  const float* before, const float* now, float* alpha, float* row_sum);

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
