// The parts of both backward kernels: a panel of ROWS query rows of one head, with its cotangents
// and row statistics, and the tiles of exponentials and of their cotangents.
#pragma once
#include "conditions.h"
#include "scores.h"
#include "scratch.h"

namespace jaxmha {
namespace JAXMHA_ISA {

// Cotangents are divided by the row sum once, so that exponentials stand for weights.
struct Panel {
  long r0, rows;             // rows in use
  float *query, *query_rows;  // H ROWS and ROWS H', times scale
  float *d_out, *d_out_rows;  // h ROWS and ROWS h', divided by the row sum
  float *row_max;             // ROWS; the largest float32 where a row attends nothing
  float *row_sum;             // ROWS; 1 where a row attends nothing
  float *alive;               // ROWS; 0 where a row attends nothing, else 1
  float* staging;             // ROWS max(H', h')

  static size_t floats(const Problem& p);
  Panel(const Problem& p, Scratch& memory);
  void load_rows(const Cotangents& g, const View& view, long b, long n, long first, long count);
};

// A tile of exponentials (of their own logits, below the row max of all keys) `keys ROWS`.
// `cap_gradient`: the derivative of the soft cap is stored there, where there is one.
// Returns false where every pair is masked, and computes nothing.
struct TileMemory {
  uint8_t* allowed;  // keys ROWS
  float* bias;       // keys ROWS
};
bool exponentials(const Problem& p, const View& view, const Panel& panel, long k0, long count,
                  const float* keys, long key_width, const TileMemory& memory, float* exps,
                  float* cap_gradient);

// Cotangents of the exponentials, `keys ROWS`.
inline void cotangents(const Problem& p, const Panel& panel, long count, const float* values,
                       long value_width, float* to) {
  short_products(count, ROWS / W, p.h, p.cotangent_terms(), values, value_width, panel.d_out, to);
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
