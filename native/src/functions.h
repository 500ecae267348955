// exp and tanh of vectors.
#pragma once
#include "simd.h"

namespace jaxmha {
namespace JAXMHA_ISA {

// A compensated sum: the rounding error of each addition is subtracted from the next term. Source:
// Kahan, "Further remarks on reducing truncation errors" (1965).
struct Sum {
  Vector total = set1(0.f), error = set1(0.f);
  inline __attribute__((always_inline)) void add_next(Vector x) {
    const Vector y = sub(x, error), next = add(total, y);
    error = sub(sub(next, total), y);
    total = next;
  }
  // The sum of both.
  Vector with(const Sum& other) const {
    Sum both = *this;
    both.add_next(other.total);
    return sub(both.total, add(both.error, other.error));
  }
};

// factor * log2(e), in two parts: the product of a large x and one part would lose digits.
struct Exponent {
  Vector high, low;
  explicit Exponent(float factor = 1.f) {
    const double wanted = factor * 1.4426950408889634;
    const auto part = static_cast<float>(wanted);
    high = set1(part), low = set1(static_cast<float>(wanted - part));
  }
};

// exp(factor * x) for x <= 0 and a factor of at least 1, within 1.2e-7 of the result; NaN stays
// NaN, and -inf gives 0.
inline Vector exp(Vector x, const Exponent& exponent) {
  x = max(set1(-200.f), x);  // in this order, max returns a NaN
  const Vector n = round(mul(x, exponent.high));
  const Vector r = fma(x, exponent.low, fma(x, exponent.high, sub(set1(0.f), n)));
  Vector p = set1(1.534580952e-04f);  // 2 ** r - 1, in the form r * q(r)
  p = fma(p, r, set1(1.339993090e-03f));
  p = fma(p, r, set1(9.618489072e-03f));
  p = fma(p, r, set1(5.550328642e-02f));
  p = fma(p, r, set1(2.402264625e-01f));
  p = fma(p, r, set1(6.931471825e-01f));
  p = fma(p, r, set1(1.f));
  return scale_down(p, n);
}

// tanh(x): an odd polynomial near 0, where the other form would cancel. Source: Moshier, Cephes.
inline Vector tanh(Vector x) {
  const Vector zero = set1(0.f), size = max(sub(zero, x), x), square = mul(x, x);
  Vector p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  p = fma(mul(p, square), x, x);
  const Vector e = exp(mul(set1(-2.f), size), Exponent()), one = set1(1.f);
  const Vector far = div(sub(one, e), add(one, e));
  const Vector with_sign = select(less(x, zero), sub(zero, far), far);
  return select(less(size, set1(0.625f)), p, with_sign);
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
