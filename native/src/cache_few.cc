// Few rows over a cache: blocks of slots, whose keys and values lie side by side.
#include <cmath>

#include "cache_item.h"
#include "few.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr long AHEAD = 8;  // keys fetched before they are read

template <Stored type>
void score_rows(const Item& w, const Block& block) {
  const char* const keys = block.keys;
  const long bytes = w.H * size_of(type), of_value = w.h * size_of(type), count = block.count;
  long key = 0;
  for (; key + 4 <= count; key += 4) {
    const bool next = key + AHEAD >= count && block.next_keys;
    fetch((next ? block.next_keys - count * bytes : keys) + (key + AHEAD) * bytes, 4 * bytes);
    fetch(block.values + key * of_value, 4 * of_value);
    score_four<type>(w.rows, w.s.R, w.H, keys + key * bytes, bytes, w.scores + key);
  }
  for (; key < count; key++)
    score_one<type>(w.rows, w.s.R, w.H, keys + key * bytes, w.scores + key);
}

// Scores of one row become weights of values; alpha is the factor of its earlier sums.
void weigh_row(Item& w, long row, const Block& block) {
  const CacheStep& s = w.s;
  float* const scores = w.scores + row * KEYS;
  const long count = block.count, end = padded(count);
  if (block.key_scale)
    for (long key = 0; key < count; key++) scores[key] *= block.key_scale[key];
  if (s.soft_cap != 0.f)
    for (long x = 0; x < end; x += W)
      store(scores + x, mul(set1(s.soft_cap), tanh(div(load(scores + x), set1(s.soft_cap)))));
  for (long key = 0; key < count && !block.clear; key++)
    if (!w.pairs[row * KEYS + key]) scores[key] = -INFINITY;
  w.alpha[row] =
      exponentials(count, Exponent(), scores, w.state.row_max + row, w.state.row_sum + row);
  if (block.value_scale)
    for (long key = 0; key < count; key++)
      if (block.clear || w.attended[key]) scores[key] *= block.value_scale[key];
}

}  // namespace

template <Stored type>
void visit_few(Item& w, const Block& block) {
  score_rows<type>(w, block);
  for (long row = 0; row < w.s.R; row++) weigh_row(w, row, block);
  add_values<type>(w.scores, w.s.R, block.count, block.values, w.h * size_of(type), w.alpha,
                   w.state.out, w.h);
}

#define JAXMHA_INSTANTIATE(type) template void visit_few<Stored::type>(Item&, const Block&);
JAXMHA_EVERY_STORED(JAXMHA_INSTANTIATE)
#undef JAXMHA_INSTANTIATE

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
