#include "scores.h"

#include <cmath>

namespace jaxmha {
namespace JAXMHA_ISA {

// `short_products` with sums of float64.
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
                    long stride, const float* columns, float* to, float* row_max) {
  if (terms == 0) {
    exact_products(count, depth, rows, stride, columns, to);
    if (row_max) update_row_max(count, lanes, to, row_max);
    return;
  }
  for (long j = 0; j < lanes; j += NR, columns += NR * W, to += NR * W) {
    float* const largest = row_max ? row_max + j * W : nullptr;
    switch (std::min<long>(NR, lanes - j)) {
      case 1: score_strip<1>(count, rows, stride, columns, depth, terms, to, largest); break;
      case 2: score_strip<2>(count, rows, stride, columns, depth, terms, to, largest); break;
      case 3:
        if constexpr (NR >= 3)
          score_strip<3>(count, rows, stride, columns, depth, terms, to, largest);
        break;
      case 4:
        if constexpr (NR >= 4)
          score_strip<4>(count, rows, stride, columns, depth, terms, to, largest);
        break;
    }
  }
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

void update_row_max(long count, long lanes, const float* scores, float* row_max) {
  for (long j = 0; j < lanes; j++) {
    Vector m = load(row_max + j * W);
    for (long key = 0; key < count; key++) m = max(m, load(scores + key * ROWS + j * W));
    store(row_max + j * W, m);
  }
}

void exponentials(long keys, long lanes, const Exponent& exponent, float* scores,
                  const float* before, const float* now, float* alpha, float* row_sum) {
  for (long j = 0; j < lanes; j++) {
    const Vector m = load(now + j * W), factor = exp(sub(load(before + j * W), m), exponent);
    Sum even, odd;  // two, since each waits for its last addition
    long key = 0;
    for (; key + 2 <= keys; key += 2) {
      float* const at = scores + key * ROWS + j * W;
      const Vector x = exp(sub(load(at), m), exponent);
      const Vector y = exp(sub(load(at + ROWS), m), exponent);
      store(at, x), store(at + ROWS, y);
      even.add_next(x), odd.add_next(y);
    }
    if (key < keys) {
      float* const at = scores + key * ROWS + j * W;
      const Vector x = exp(sub(load(at), m), exponent);
      store(at, x);
      even.add_next(x);
    }
    // A first 0 applies the pending correction: zeros of keys of other rows then change nothing.
    even.add_next(set1(0.f)), odd.add_next(set1(0.f));
    store(alpha + j * W, factor);
    store(row_sum + j * W, fma(load(row_sum + j * W), factor, even.with(odd)));
  }
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
