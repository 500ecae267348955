#include "gradient.h"

namespace jaxmha {
namespace JAXMHA_ISA {

size_t Panel::floats(const Problem& p) {
  const long H = padded(p.H), h = padded(p.h);
  return ROWS * (p.H + H + p.h + h + std::max(H, h) + 3) + 8 * 16;
}

Panel::Panel(const Problem& p, Scratch& memory) : r0(0), rows(0) {
  const long H = padded(p.H), h = padded(p.h);
  query = memory.take(p.H * ROWS);
  query_rows = memory.take(ROWS * H);
  d_out = memory.take(p.h * ROWS);
  d_out_rows = memory.take(ROWS * h);
  row_max = memory.take(ROWS);
  row_sum = memory.take(ROWS);
  alive = memory.take(ROWS);
  staging = memory.take(ROWS * std::max(H, h));
}

void Panel::load_rows(const Cotangents& g, const View& view, long b, long n, long first,
                      long count) {
  const Problem& p = g.problem;
  const long H = padded(p.H), h = padded(p.h);
  r0 = first, rows = count;
  for (long r = 0; r < ROWS; r++) {
    float *const query_row = query_rows + r * H, *const d_row = d_out_rows + r * h;
    const long at = n * p.T + r0 + r;
    const bool valid = r < rows && view.valid_row(r0 + r) && g.row_sum.of(b)[at] != 0.f;
    alive[r] = valid;
    row_max[r] = valid ? g.row_max.of(b)[at] : -LOWEST;
    row_sum[r] = valid ? g.row_sum.of(b)[at] : 1.f;
    if (!valid) {  // whatever its query and cotangent hold
      std::fill(query_row, query_row + H, 0.f);
      std::fill(d_row, d_row + h, 0.f);
      continue;
    }
    pad_row(p.query.at(b, r0 + r, n), p.query.type, p.H, H, query_row);
    pad_row(g.d_out.at(b, r0 + r, n), g.d_out.type, p.h, h, d_row);
    for (long x = 0; x < p.H; x++) query_row[x] *= p.scale;
    for (long x = 0; x < p.h; x++) d_row[x] /= row_sum[r];
  }
  transpose(query_rows, H, ROWS, p.H, query);
  transpose(d_out_rows, h, ROWS, p.h, d_out);
}

// The row max of a row that attends a NaN may be NaN or -inf, and then exponentials of masked pairs are
// NaN: they become 0.
static void clear_masked(const Panel& panel, long count, const uint8_t* allowed, float* exps) {
  for (long r = 0; r < panel.rows; r++) {
    if (panel.row_sum[r] == panel.row_sum[r]) continue;
    for (long i = r; i < count * ROWS; i += ROWS)
      if (!allowed[i]) exps[i] = 0.f;
  }
}

bool exponentials(const Problem& p, const View& view, const Panel& panel, long k0, long count,
                  const float* keys, long key_width, const TileMemory& memory, float* exps,
                  float* cap_gradient) {
  const Tile kind = view.tile(panel.r0, panel.rows, k0, count, memory.allowed, memory.bias);
  if (kind == Tile::masked) return false;
  const long lanes = ROWS / W;
  short_products(count, lanes, p.H, p.terms(), keys, key_width, panel.query, exps);
  if (kind == Tile::mixed) {
    const float* const bias = view.has_bias() ? memory.bias : nullptr;
    const float rest = p.whole_logits() ? p.rest : 1.f;
    apply_conditions({count, lanes, exps, memory.allowed, bias, rest, p.soft_cap, cap_gradient});
  }
  const Exponent exponent(p.exponent());
  for (long j = 0; j < lanes; j++) {
    const Vector m = load(panel.row_max + j * W), zero = set1(0.f);
    const Lanes dead = is_zero(load(panel.alive + j * W));
    for (long key = 0; key < count; key++) {
      float* const at = exps + key * ROWS + j * W;
      store(at, select(dead, zero, exp(sub(load(at), m), exponent)));
    }
  }
  if (kind == Tile::mixed) clear_masked(panel, count, memory.allowed, exps);
  return true;
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
