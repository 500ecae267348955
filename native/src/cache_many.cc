// Many rows over a cache: scores are transposed, as in forward.cc, and a block of keys is read from
// cache by every panel of rows. Values of the block are fetched from memory during the product with
// keys, and keys of the next block during the product with values.
#include <algorithm>

#include "cache_item.h"
#include "scores.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr long TERMS = 32;            // of a partial sum of a score
constexpr int WIDE = 2;               // vectors of rows of a tile
constexpr int TALL = MR * NR / WIDE;  // its keys: as many sums as registers hold

// Rows of a panel, transposed: `H width`; and a block of keys.
struct Panel {
  const float *rows, *keys;
  long width, H, stride, count;
};

// Tiles that score_strip makes of so many keys.
long tiles_of(long count) { return count / TALL + count % TALL / 4 + count % TALL % 4; }

// Scores of all keys and N vectors of rows, and their row max.
template <int N>
void score_strip(const Panel& p, long row, float* scores, float* row_max, Ahead& ahead) {
  const float* const rows = p.rows + row;
  const auto piece = [&](auto keys, long key) {
    score_piece<keys, N>(p.keys + key * p.stride, p.stride, rows, p.width, p.H, TERMS,
                         scores + key * ROWS + row, row_max + row, ahead);
  };
  long key = 0;
  for (; key + TALL <= p.count; key += TALL) piece(std::integral_constant<int, TALL>(), key);
  for (; key + 4 <= p.count; key += 4) piece(std::integral_constant<int, 4>(), key);
  for (; key < p.count; key++) piece(std::integral_constant<int, 1>(), key);
}

void score_panel(const Panel& p, float* scores, float* row_max, Ahead& ahead) {
  long row = 0;
  for (; row + WIDE * W <= p.width; row += WIDE * W)
    score_strip<WIDE>(p, row, scores, row_max, ahead);
  for (; row < p.width; row += W) score_strip<1>(p, row, scores, row_max, ahead);
}

// Scores or weights of each key times its factor.
void scale_keys(long count, long width, const float* factors, float* scores) {
  for (long key = 0; key < count; key++)
    for (long row = 0; row < width; row += W) {
      float* const at = scores + key * ROWS + row;
      store(at, mul(load(at), set1(factors[key])));
    }
}

// The conditions and the soft cap of a panel from row0 on.
void restrict_scores(Item& w, const Block& block, long row0, long here) {
  const long width = padded(here);
  for (long key = 0; key < block.count; key++)
    for (long r = 0; r < width; r++)
      w.allowed[key * ROWS + r] =
          block.clear || (r < here && w.pairs[(row0 + r) * KEYS + key]);
  apply_conditions({block.count, width / W, w.scores, w.allowed, nullptr, 1.f, w.s.soft_cap});
}

}  // namespace

template <Stored type>
void visit_many(Item& w, const Block& block) {
  const CacheStep& s = w.s;
  const auto* keys = reinterpret_cast<const float*>(block.keys);
  const auto* values = reinterpret_cast<const float*>(block.values);
  const long count = block.count, bytes = count * size_of(type);
  long stride = s.H;
  if (type != Stored::f32) {
    widen_rows<type>(block.keys, count, s.H, w.H, w.keys);
    keys = w.keys, stride = w.H;
  }
  const long of_keys = tiles_of(count) * s.H * ((padded(s.R) / W + WIDE - 1) / WIDE);
  const long of_values = (s.R + MR - 1) / MR * count * ((w.h / W + NR - 1) / NR);
  Ahead next_values(block.values, bytes * s.h, of_keys);
  Ahead next_keys(block.next_keys, bytes * s.H, of_values);
  for (long row0 = 0; row0 < s.R; row0 += ROWS) {
    const long here = std::min(ROWS, s.R - row0), width = padded(here), lanes = width / W;
    float* const row_max = w.state.row_max + row0;
    std::fill(w.now, w.now + ROWS, LOWEST);
    std::copy(row_max, row_max + here, w.now);
    float before[ROWS], row_sum[ROWS] = {}, unused[ROWS];
    std::copy(w.now, w.now + ROWS, before);
    std::copy(w.now, w.now + ROWS, unused);
    std::copy(w.state.row_sum + row0, w.state.row_sum + row0 + here, row_sum);
    const bool conditions = !block.clear || s.soft_cap != 0.f;
    const bool plain = !conditions && !block.key_scale;
    score_panel({w.rows + row0 * s.H, keys, width, s.H, stride, count}, w.scores,
                plain ? w.now : unused, next_values);
    if (block.key_scale) scale_keys(count, width, block.key_scale, w.scores);
    if (conditions) restrict_scores(w, block, row0, here);
    if (!plain) update_row_max(count, lanes, w.scores, w.now);
    exponentials(count, lanes, Exponent(), w.scores, before, w.now, w.alpha, row_sum);
    std::copy(w.now, w.now + here, row_max);
    std::copy(row_sum, row_sum + here, w.state.row_sum + row0);
    if (block.value_scale) {
      float factors[KEYS];
      for (long key = 0; key < count; key++)
        factors[key] = block.clear || w.attended[key] ? block.value_scale[key] : 0.f;
      scale_keys(count, width, factors, w.scores);
    }
    if (row0 == 0 && (type != Stored::f32 || s.h != w.h || block.unattended)) {
      widen_rows<type>(block.values, count, s.h, w.h, w.values);
      clear_unattended(w, block, w.values);
      values = w.values;
    }
    product<Into::rescaled>(here, w.h / W, count, {w.scores, 1, ROWS}, values, w.h,
                            w.state.out + row0 * w.h, w.h, w.alpha, next_keys);
  }
}

#define JAXMHA_INSTANTIATE(type) template void visit_many<Stored::type>(Item&, const Block&);
JAXMHA_EVERY_STORED(JAXMHA_INSTANTIATE)
#undef JAXMHA_INSTANTIATE

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
