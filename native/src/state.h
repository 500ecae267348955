// The state of rows after some keys, and the join of those of several ranges of keys.
#pragma once
#include "scores.h"
#include "scratch.h"

namespace jaxmha {
namespace JAXMHA_ISA {

// Out `rows width`, row max, row sum.
struct State {
  float *out, *row_max, *row_sum;
  State(float* memory, long rows, long width)
      : out(memory), row_max(memory + rows * width), row_sum(memory + rows * (width + 1)) {}
  static size_t floats(long rows, long width) { return Scratch::rounded(rows * (width + 2)); }
  void clear(long rows, long width) const {
    std::fill(out, out + rows * width, 0.f);
    std::fill(row_max, row_max + rows, LOWEST);
    std::fill(row_sum, row_sum + rows, 0.f);
  }
};

// States of ranges of keys, one after another.
struct States {
  float* memory;
  long ranges, rows, width;
  State of(long range) const {
    return State(memory + range * State::floats(rows, width), rows, width);
  }
};

struct Statistics {
  float row_max, row_sum;
};

// Joins the states of a row in the order of their ranges; `features` of out are written, which may be
// those of the first state.
inline Statistics join_row(const States& states, long row, long features,
                           const Exponent& exponent, float* out) {
  Statistics all{LOWEST, 0.f};
  for (long i = 0; i < states.ranges; i++) {
    const float m = states.of(i).row_max[row];
    all.row_max = m > all.row_max ? m : all.row_max;  // no NaN
  }
  for (long i = 0; i < states.ranges; i++) {
    const State one = states.of(i);
    float factor[W];
    store(factor, exp(set1(one.row_max[row] - all.row_max), exponent));
    all.row_sum += one.row_sum[row] * factor[0];
    for (long x = 0; x < features; x++)
      out[x] = (i ? out[x] : 0.f) + one.out[row * states.width + x] * factor[0];
  }
  return all;
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
