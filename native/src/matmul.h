// One matmul of a layer, as its handler gives it to the kernel.
#pragma once
#include <algorithm>
#include <vector>

#include "problem.h"

namespace jaxmha {

// y[rows x columns] = a[rows x depth] b[depth x columns] + bias[columns], of every batch row. Where
// the first stored axis of a is not kept, it counts as 0, whatever is there: rows of a, or, if a is
// transposed, depths of both.
struct MatmulSizes {
  long batches, rows, depth, columns;
  bool a_transposed, b_transposed;         // stored as depth x rows, columns x depth
  Batched<const uint8_t> kept;             // may be absent; not if both are transposed
};

template <class E>
struct MatmulOf : MatmulSizes {
  Batched<const E> a, b, bias;             // bias may be absent
};

struct Matmul : MatmulOf<float> {
  float* y;
};

// Of bfloat16, whose products are exact in float32. Sums are of float32, and rounded at the end if y is
// of bfloat16.
struct Bf16Matmul : MatmulOf<uint16_t> {
  char* y;
  Float type;                              // of y: f32 or bf16
};

// The depths of a batch row that are multiplied: all, or those that are kept.
struct Depths {
  long count;
  std::vector<long> kept;
  Depths(const MatmulSizes& m, long batch) : count(m.depth) {
    if (!m.kept || !m.a_transposed) return;
    for (long p = 0; p < m.depth; p++)
      if (m.kept.of(batch)[p]) kept.push_back(p);
    count = kept.size();
    if (count == m.depth) kept.clear();
  }
  long operator[](long p) const { return kept.empty() ? p : kept[p]; }
};

// True if any of `count` rows from r0 on is kept.
inline bool any_kept(const MatmulSizes& m, long batch, long r0, long count) {
  if (!m.kept || m.a_transposed) return r0 < m.rows;
  const uint8_t* const kept = m.kept.of(batch);
  return std::any_of(kept + std::min(r0, m.rows), kept + std::min(r0 + count, m.rows),
                     [](uint8_t x) { return x; });
}

constexpr long PANEL = 64;  // columns
constexpr long BLOCK = 512;  // depth of the panels that are packed at a time

// Rows and panels of columns of an item of a matmul.
struct Items {
  long rows, panels;
};

// The panels of an item stay in the L2 cache while the items of other rows pass.
inline Items items_of(long rows, long columns, long depth, long threads) {
  constexpr long ROWS_OF_ITEM = 96, ITEMS_OF_THREAD = 16, MOST = (512l << 10) / sizeof(float);
  const long chunks = (rows + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM;
  const long panels = (columns + PANEL - 1) / PANEL;
  const long fewest = (panels * PANEL * std::min(depth, BLOCK) + MOST - 1) / MOST;
  const long wanted = std::max(fewest, (ITEMS_OF_THREAD * threads + chunks - 1) / chunks);
  const long groups = std::min(panels, wanted);
  return {std::min(rows, ROWS_OF_ITEM), (panels + groups - 1) / groups};
}

// Panels of an item of few rows, which packs them itself; 0: rows are many, or panels too few for
// every thread to have some.
inline long panels_of_few(long rows, long columns, long threads) {
  constexpr long FEW = 256, MOST = 16;
  const long panels = (columns + PANEL - 1) / PANEL;
  return rows > FEW || panels < 2 * threads ? 0 : std::min(MOST, panels / (2 * threads));
}

}  // namespace jaxmha
