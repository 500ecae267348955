// Few rows over a cache: features lie in lanes, and four keys share the loads of a query.
#include <cmath>

#include "cache_item.h"
#include "scores.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr int SCORE_ROWS = NR;  // with 4 keys, as many sums as registers hold
constexpr long AHEAD = 8;       // keys fetched before they are read

// Scores of M rows and 4 keys.
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

template <Stored type>
void score_rows(const Item& w, const Block& block) {
  const char* const keys = block.keys;
  const long bytes = w.H * size_of(type), of_value = w.h * size_of(type), count = block.count;
  long key = 0;
  for (; key + 4 <= count; key += 4) {
    const bool next = key + AHEAD >= count && block.next_keys;
    fetch((next ? block.next_keys - count * bytes : keys) + (key + AHEAD) * bytes, 4 * bytes);
    fetch(block.values + key * of_value, 4 * of_value);
    long row = 0;
    for (; row + SCORE_ROWS <= w.s.R; row += SCORE_ROWS)
      score_tile<type, SCORE_ROWS>(w.rows + row * w.H, w.H, keys + key * bytes, bytes,
                                   w.scores + row * KEYS + key);
    for (; row < w.s.R; row++)
      score_tile<type, 1>(w.rows + row * w.H, w.H, keys + key * bytes, bytes,
                          w.scores + row * KEYS + key);
  }
  for (; key < count; key++)
    for (long row = 0; row < w.s.R; row++) {
      Vector total = set1(0.f);
      for (long x = 0; x < w.H; x += W)
        total = fma(load(w.rows + row * w.H + x), widened<type>(keys + key * bytes, x), total);
      w.scores[row * KEYS + key] = sum(total);
    }
}

// Scores of one row become weights of values; its state is rescaled by alpha later.
void weigh_row(Item& w, long row, const Block& block) {
  const CacheStep& s = w.s;
  float* const scores = w.scores + row * KEYS;
  const Exponent natural;
  const long count = block.count, vectors = (count + W - 1) / W;
  if (block.key_scale)
    for (long key = 0; key < count; key++) scores[key] *= block.key_scale[key];
  if (s.soft_cap != 0.f)
    for (long x = 0; x < vectors * W; x += W)
      store(scores + x, mul(set1(s.soft_cap), tanh(div(load(scores + x), set1(s.soft_cap)))));
  std::fill(scores + count, scores + vectors * W, -INFINITY);
  for (long key = 0; key < count && !block.clear; key++)
    if (!w.pairs[row * KEYS + key]) scores[key] = -INFINITY;
  Vector largest = set1(w.state.row_max[row]);
  for (long x = 0; x < vectors * W; x += W) largest = max(largest, load(scores + x));
  float lanes[W], m = w.state.row_max[row];
  store(lanes, largest);
  for (int i = 0; i < W; i++) m = lanes[i] > m ? lanes[i] : m;
  float factor[W];
  store(factor, exp(set1(w.state.row_max[row] - m), natural));
  Vector total = set1(0.f);
  for (long x = 0; x < vectors * W; x += W) {
    const Vector e = exp(sub(load(scores + x), set1(m)), natural);
    store(scores + x, e);
    total = add(total, e);
  }
  if (block.value_scale)
    for (long key = 0; key < count; key++)
      if (block.clear || w.attended[key]) scores[key] *= block.value_scale[key];
  w.state.row_max[row] = m;
  w.state.row_sum[row] = w.state.row_sum[row] * factor[0] + sum(total);
  w.alpha[row] = factor[0];
}

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
void add_values(const Item& w, long row, long count, const char* values) {
  const float* const weights = w.scores + row * KEYS;
  float* const out = w.state.out + row * w.h;
  const long bytes = w.h * size_of(type);
  long x = 0;
  for (; x + NR * W <= w.h; x += NR * W)
    value_tile<type, M, NR>(weights, count, values, x, bytes, w.alpha + row, out, w.h);
  for (; x < w.h; x += W)
    value_tile<type, M, 1>(weights, count, values, x, bytes, w.alpha + row, out, w.h);
}

}  // namespace

template <Stored type>
void visit_few(Item& w, const Block& block) {
  score_rows<type>(w, block);
  for (long row = 0; row < w.s.R; row++) weigh_row(w, row, block);
  long row = 0;
  for (; row + 4 <= w.s.R; row += 4) add_values<type, 4>(w, row, block.count, block.values);
  for (; row < w.s.R; row++) add_values<type, 1>(w, row, block.count, block.values);
}

#define JAXMHA_INSTANTIATE(type) template void visit_few<Stored::type>(Item&, const Block&);
JAXMHA_EVERY_STORED(JAXMHA_INSTANTIATE)
#undef JAXMHA_INSTANTIATE

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
