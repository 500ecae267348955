// Few rows and a block of keys: features lie in lanes, and four keys share the loads of a query.
// Keys and values are read where they lie, and widened in registers.
#pragma once
#include <algorithm>
#include <cmath>

#include "functions.h"
#include "stored.h"

namespace jaxmha {
namespace JAXMHA_ISA {

constexpr long KEYS = 64;       // of a block
constexpr int SCORE_ROWS = NR;  // with 4 keys, as many sums as registers hold

// Scores of M rows `M H` and 4 keys, which lie `bytes` apart, in rows of KEYS.
template <Stored type, int M>
inline __attribute__((always_inline)) void score_tile(const float* rows, long H, const char* keys,
                                                      long bytes, float* scores) {
  Vector c[M][4];
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) c[i][j] = set1(0.f);
  for (long x = 0; x < H; x += W) {
    Vector k[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) k[j] = widened<type>(keys + j * bytes, x);
#pragma GCC unroll 4
    for (int i = 0; i < M; i++) {
      const Vector q = load(rows + i * H + x);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) c[i][j] = fma(q, k[j], c[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
    store_sums(scores + i * KEYS, c[i][0], c[i][1], c[i][2], c[i][3]);
}

// The same of R rows.
template <Stored type>
inline void score_four(const float* rows, long R, long H, const char* keys, long bytes,
                       float* scores) {
  long row = 0;
  for (; row + SCORE_ROWS <= R; row += SCORE_ROWS)
    score_tile<type, SCORE_ROWS>(rows + row * H, H, keys, bytes, scores + row * KEYS);
  for (; row < R; row++) score_tile<type, 1>(rows + row * H, H, keys, bytes, scores + row * KEYS);
}

// The same of one key.
template <Stored type>
inline void score_one(const float* rows, long R, long H, const char* key, float* scores) {
  for (long row = 0; row < R; row++) {
    Vector total = set1(0.f);
    for (long x = 0; x < H; x += W)
      total = fma(load(rows + row * H + x), widened<type>(key, x), total);
    scores[row * KEYS] = sum(total);
  }
}

// `count` scores of a row become exponentials below its new row max, with zeros up to a whole
// vector; the factor of what the row summed before.
inline float exponentials(long count, const Exponent& exponent, float* scores, float* row_max,
                          float* row_sum) {
  const long end = padded(count);
  std::fill(scores + count, scores + end, -INFINITY);
  const float before = *row_max;
  Vector largest = set1(before);
  for (long x = 0; x < end; x += W) largest = max(largest, load(scores + x));
  float lanes[W], m = before;
  store(lanes, largest);
  for (int i = 0; i < W; i++) m = lanes[i] > m ? lanes[i] : m;  // no NaN
  float factor[W];
  store(factor, exp(set1(before - m), exponent));
  Vector total = set1(0.f);
  for (long x = 0; x < end; x += W) {
    const Vector e = exp(sub(load(scores + x), set1(m)), exponent);
    store(scores + x, e);
    total = add(total, e);
  }
  *row_max = m;
  *row_sum = *row_sum * factor[0] + sum(total);
  return factor[0];
}

// out = alpha out + weights values, of M rows and N vectors of features.
template <Stored type, int M, int N>
inline __attribute__((always_inline)) void value_tile(const float* weights, long count,
                                                      const char* values, long x, long bytes,
                                                      const float* alpha, float* out, long h) {
  Vector c[M][N];
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) c[i][j] = set1(0.f);
  for (long key = 0; key < count; key++) {
    Vector v[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) v[j] = widened<type>(values + key * bytes, x + j * W);
#pragma GCC unroll 4
    for (int i = 0; i < M; i++) {
      const Vector weight = set1(weights[i * KEYS + key]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) c[i][j] = fma(weight, v[j], c[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      float* const to = out + i * h + x + j * W;
      store(to, fma(set1(alpha[i]), load(to), c[i][j]));
    }
}

template <Stored type, int M>
inline void value_strip(const float* weights, long count, const char* values, long bytes,
                        const float* alpha, float* out, long h) {
  long x = 0;
  for (; x + NR * W <= h; x += NR * W)
    value_tile<type, M, NR>(weights, count, values, x, bytes, alpha, out, h);
  for (; x < h; x += W) value_tile<type, M, 1>(weights, count, values, x, bytes, alpha, out, h);
}

// out = alpha out + weights values, of R rows `R h`; values lie `bytes` apart.
template <Stored type>
inline void add_values(const float* weights, long R, long count, const char* values, long bytes,
                       const float* alpha, float* out, long h) {
  long row = 0;
  for (; row + 4 <= R; row += 4)
    value_strip<type, 4>(weights + row * KEYS, count, values, bytes, alpha + row, out + row * h, h);
  for (; row < R; row++)
    value_strip<type, 1>(weights + row * KEYS, count, values, bytes, alpha + row, out + row * h, h);
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
