#include "scores.h"

#include <cmath>

namespace jaxmha {
namespace JAXMHA_ISA {

void clear_scores(long keys, long lanes, const float* key, long ldk, const float* query, long H,
                  long terms, float* scores, float* row_max) {
  for (long j = 0; j < lanes; j += NR, query += NR * W, scores += NR * W, row_max += NR * W)
    switch (std::min<long>(NR, lanes - j)) {
      case 1: score_strip<1>(keys, key, ldk, query, H, terms, scores, row_max); break;
      case 2: score_strip<2>(keys, key, ldk, query, H, terms, scores, row_max); break;
#if defined(__AVX512F__)
      case 3: score_strip<3>(keys, key, ldk, query, H, terms, scores, row_max); break;
      case 4: score_strip<4>(keys, key, ldk, query, H, terms, scores, row_max); break;
#endif
    }
}

// Sums of float64 of the same.
static void exact_products(long count, long depth, const float* rows, long stride,
                           const float* columns, float* to) {
  for (long i = 0; i < count; i++) {
    double sums[ROWS] = {};
    for (long p = 0; p < depth; p++) {
      const double x = rows[i * stride + p];
      for (long r = 0; r < ROWS; r++) sums[r] += x * columns[p * ROWS + r];
    }
    for (long r = 0; r < ROWS; r++) to[i * ROWS + r] = static_cast<float>(sums[r]);
  }
}

void short_products(long count, long lanes, long depth, long terms, const float* rows,
                    long stride, const float* columns, float* to) {
  if (terms == 0) return exact_products(count, depth, rows, stride, columns, to);
  const auto part = [&](auto into, long p) {
    product<into()>(count, lanes, std::min(terms, depth - p), {rows + p, stride, 1},
                    columns + p * ROWS, ROWS, to, ROWS);
  };
  part(std::integral_constant<Into, Into::replaced>(), 0);
  for (long p = terms; p < depth; p += terms)
    part(std::integral_constant<Into, Into::added>(), p);
}

void apply_conditions(const TileOfScores& t) {
  const Vector masked = set1(-INFINITY), one = set1(1.f), cap = set1(t.soft_cap);
  const Vector rest = set1(t.rest);
  for (long key = 0; key < t.keys; key++)
    for (long j = 0; j < t.lanes; j++) {
      const long at = key * ROWS + j * W;
      Vector x = mul(load(t.scores + at), rest);
      if (t.soft_cap != 0.f) {
        const Vector bent = tanh(div(x, cap));
        if (t.cap_gradient) store(t.cap_gradient + at, fma(sub(set1(0.f), bent), bent, one));
        x = mul(cap, bent);
      }
      if (t.bias) x = add(x, load(t.bias + at));
      store(t.scores + at, select(nonzero(t.allowed + at), x, masked));
    }
}

void update_row_max(const TileOfScores& t, float* row_max) {
  for (long j = 0; j < t.lanes; j++) {
    Vector m = load(row_max + j * W);
    for (long key = 0; key < t.keys; key++) m = max(m, load(t.scores + key * ROWS + j * W));
    store(row_max + j * W, m);
  }
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
