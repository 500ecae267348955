// Many rows over a cache: scores are transposed, as in forward.cc, and a block of keys is read from
// cache by every panel of rows.
#include <algorithm>

#include "cache_item.h"
#include "scores.h"

namespace jaxmha {
namespace JAXMHA_ISA {

constexpr long TERMS = 32;  // of a partial sum of a score

template <Stored type>
void visit_many(Item& w, const Block& block) {
  const CacheStep& s = w.s;
  const auto* keys = reinterpret_cast<const float*>(block.keys);
  const auto* values = reinterpret_cast<const float*>(block.values);
  long stride = s.H;
  if (type != Stored::f32) {
    widen_rows<type>(block.keys, block.count, s.H, w.H, w.keys);
    keys = w.keys, stride = w.H;
  }
  if (type != Stored::f32 || s.h != w.h || block.unattended) {
    widen_rows<type>(block.values, block.count, s.h, w.h, w.values);
    clear_unattended(w, block, w.values);
    values = w.values;
  }
  for (long row0 = 0; row0 < s.R; row0 += ROWS) {
    const long here = std::min(ROWS, s.R - row0), lanes = (here + W - 1) / W;
    float* const row_max = w.state.row_max + row0;
    const bool plain = block.clear && !block.key_scale && s.soft_cap == 0.f;
    std::fill(w.now, w.now + ROWS, LOWEST);
    std::copy(row_max, row_max + here, w.now);
    float before[ROWS], row_sum[ROWS] = {};
    std::copy(w.now, w.now + ROWS, before);
    std::copy(w.state.row_sum + row0, w.state.row_sum + row0 + here, row_sum);
    short_products(block.count, lanes, s.H, TERMS, keys, stride, w.rows + row0 * s.H, w.scores,
                   plain ? w.now : nullptr);
    if (!plain) {
      if (block.key_scale)
        for (long key = 0; key < block.count; key++)
          for (long j = 0; j < lanes * W; j++) w.scores[key * ROWS + j] *= block.key_scale[key];
      for (long key = 0; key < block.count; key++)
        for (long r = 0; r < lanes * W; r++)
          w.allowed[key * ROWS + r] =
              block.clear || (r < here && w.pairs[(row0 + r) * KEYS + key]);
      apply_conditions({block.count, lanes, w.scores, w.allowed, nullptr, 1.f, s.soft_cap});
      update_row_max(block.count, lanes, w.scores, w.now);
    }
    exponentials(block.count, lanes, Exponent(), w.scores, before, w.now, w.alpha, row_sum);
    std::copy(w.now, w.now + here, row_max);
    std::copy(row_sum, row_sum + here, w.state.row_sum + row0);
    if (block.value_scale)
      for (long key = 0; key < block.count; key++) {
        const bool some = block.clear || w.attended[key];
        const float scale = some ? block.value_scale[key] : 0.f;
        for (long j = 0; j < lanes * W; j++) w.scores[key * ROWS + j] *= scale;
      }
    product<Into::rescaled>(here, w.h / W, block.count, {w.scores, 1, ROWS}, values, w.h,
                            w.state.out + row0 * w.h, w.h, w.alpha);
  }
}

#define JAXMHA_INSTANTIATE(type) template void visit_many<Stored::type>(Item&, const Block&);
JAXMHA_EVERY_STORED(JAXMHA_INSTANTIATE)
#undef JAXMHA_INSTANTIATE

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
