// The operands of gradients on AMX, as blocks: panels of query rows of a key head, and chunks of its
// keys, which stay in the L2 cache while the panels of an item pass.
#pragma once
#include <cmath>

#include "amx_tiles.h"
#include "backward.h"
#include "keys.h"
#include "scores.h"

namespace jaxmha {
namespace amx {

constexpr long CHUNK = 256;  // keys
constexpr long CHUNK_STEPS = CHUNK / STEP, CHUNK_BLOCKS = CHUNK / SIDE;
constexpr long ROW_STEPS = ROWS / STEP, ROW_BLOCKS = ROWS / SIDE;
static_assert(STEP == SIDE, "blocks of keys are steps of products over keys");

// Query rows of one head. Blocks of columns: query and d_out for products over features, query_rows and
// d_out_rows for those over query rows. All but `query`, whose logits have to be those of the forward
// pass, are divided by a power of two where they are far from 1: no part of an entry near the largest
// may be subnormal.
struct Panel {
  long n, r0, rows;
  float query_exponent, d_out_exponent;  // of these powers
  float row_max[ROWS], inverse[ROWS];  // the latter of the row sum; 0 where a row attends nothing
  float delta[ROWS];                   // row sum of out * d_out, less the cotangent of the log-sum-exp
  float* d_query;                      // H' ROWS
  Word *query, *query_rows, *d_out, *d_out_rows;
};

// Operands of IN parts each: of a key head, and the memory of a chunk of its keys. H and h are in whole
// blocks.
template <int IN>
struct Operands {
  static constexpr long STEP_WORDS = IN * PART_WORDS;
  const Backward& g;
  const Problem& p;
  const long b, kv, H, h;
  const Range attended;
  Scratch memory;
  Word *const keys, *const values, *const keys_over_keys;
  float *const staging, *const transposed;

  static size_t panel_floats(const Problem& p) {
    const long words = 2 * ROW_BLOCKS * (steps_of(p.H) + steps_of(p.h)) * STEP_WORDS;
    return words + blocks_of(p.H) * SIDE * ROWS;
  }
  static size_t floats(const Problem& p, long panels) {
    const long H = blocks_of(p.H), h = blocks_of(p.h);
    return panels * panel_floats(p) + CHUNK_BLOCKS * (2 * H + h) * STEP_WORDS +
           SIDE * (CHUNK * (H + h) + ROWS * std::max(H, h));
  }

  // `more`: floats that others take from the memory, besides those of panels.
  Operands(const Backward& g, long head, long panels, long more)
      : g(g), p(g.problem), b(head / p.K), kv(head % p.K), H(blocks_of(p.H) * SIDE),
        h(blocks_of(p.h) * SIDE), attended(keys_of_head(p, b, kv)), memory(floats(p, panels) + more),
        keys(take_words(memory, CHUNK_BLOCKS * steps_of(H) * STEP_WORDS)),
        values(take_words(memory, CHUNK_BLOCKS * steps_of(h) * STEP_WORDS)),
        keys_over_keys(take_words(memory, CHUNK_BLOCKS * steps_of(H) * STEP_WORDS)),
        staging(memory.take(CHUNK * (H + h))), transposed(memory.take(ROWS * std::max(H, h))) {}

  // Rows of a panel as floats `ROWS width`; of those that attend nothing, 0.
  void read_rows(const Panel& panel, const Heads& from, long features, long width, float factor) const {
    for (long r = 0; r < ROWS; r++) {
      float* const to = staging + r * width;
      if (panel.inverse[r] == 0.f) {
        std::fill(to, to + width, 0.f);
        continue;
      }
      pad_row(from.at(b, panel.r0 + r, panel.n), from.type, features, width, to);
      for (long x = 0; x < features; x++) to[x] *= factor;
    }
  }

  // Divides rows that were read by a power of two, if the larger of `least` and their largest finite
  // entry is far from 1, so that it lies in [1, 2). Returns the exponent, or 0 if
  // IN is 1: one part has no lower parts to lose.
  float divide(long width, float least = 0.f) const {
    constexpr int FAR_FROM_1 = 60;
    if (IN == 1) return 0.f;
    const __m512i infinite = bits(set1(INFINITY)), size = _mm512_set1_epi32(0x7fffffff);
    __m512i most = std::isfinite(least) ? bits(set1(least)) : bits(set1(0.f));
    for (long i = 0; i < ROWS * width; i += W) {
      const __m512i x = _mm512_and_si512(bits(load(staging + i)), size);
      most = _mm512_mask_max_epu32(most, _mm512_cmplt_epu32_mask(x, infinite), most, x);
    }
    const __m512 largest = _mm512_castsi512_ps(_mm512_set1_epi32(_mm512_reduce_max_epu32(most)));
    const int exponent = std::ilogb(_mm512_cvtss_f32(largest));  // of 0, the least int
    if (exponent < -149 || std::abs(exponent) < FAR_FROM_1) return 0.f;
    const Vector back = set1(static_cast<float>(-exponent));
    for (long i = 0; i < ROWS * width; i += W)
      store(staging + i, _mm512_scalef_ps(load(staging + i), back));
    return static_cast<float>(exponent);
  }

  // Packs rows that were read as columns of features.
  void pack_features(long width, Word* to) const {
    transpose(staging, width, ROWS, width, transposed);
    for (long j = 0; j < ROW_BLOCKS; j++)
      pack_columns<IN>(transposed + j * SIDE, ROWS, width, to + j * steps_of(width) * STEP_WORDS);
  }

  // Packs rows that were read as columns of rows.
  void pack_over_rows(long width, Word* to) const {
    for (long i = 0; i < blocks_of(width); i++)
      pack_columns<IN>(staging + i * SIDE, width, ROWS, to + i * ROW_STEPS * STEP_WORDS);
  }

  // The statistics of a panel.
  void read_statistics(Panel& panel) const {
    const View view(p, b, panel.n);
    for (long r = 0; r < ROWS; r++) {
      const long at = panel.n * p.T + panel.r0 + r;
      const bool alive = r < panel.rows && view.valid_row(panel.r0 + r) && g.row_sum.of(b)[at] != 0.f;
      panel.row_max[r] = alive ? g.row_max.of(b)[at] : -LOWEST;
      panel.inverse[r] = alive ? 1.f / g.row_sum.of(b)[at] : 0.f;
      if (!std::isnan(panel.inverse[r])) continue;
      // The row sum is NaN: keys are finite, so the query is not. Weights of masked pairs still have
      // to be 0.
      if (!(panel.row_max[r] >= LOWEST)) panel.row_max[r] = 0.f;
      panel.inverse[r] = 1.f;
    }
  }

  // Cotangents of the log-sum-exp, where there are some.
  float d_lse(const Panel& panel, long r) const {
    return g.d_lse ? g.d_lse.of(b)[panel.n * p.T + panel.r0 + r] : 0.f;
  }

  // Delta of a panel whose d_out was read.
  void write_delta(Panel& panel) const {
    const int exponent = static_cast<int>(panel.d_out_exponent);
    for (long r = 0; r < ROWS; r++) {
      panel.delta[r] = 0.f;
      if (panel.inverse[r] == 0.f) continue;
      const auto* out = reinterpret_cast<const float*>(g.out.at(b, panel.r0 + r, panel.n));
      double total = 0.;
      for (long x = 0; x < p.h; x++) total += static_cast<double>(out[x]) * staging[r * h + x];
      panel.delta[r] = static_cast<float>(total - std::ldexp(d_lse(panel, r), -exponent));
    }
    for (long r = 0; r < panel.rows; r++)  // for cotangents that are divided by the row sum
      g.delta[(b * p.N + panel.n) * p.T + panel.r0 + r] =
          std::ldexp(panel.delta[r] * panel.inverse[r], exponent);
  }

  // Takes memory for a panel.
  void take_panel(Panel& panel) {
    panel.query = take_words(memory, ROW_BLOCKS * steps_of(H) * STEP_WORDS);
    panel.query_rows = take_words(memory, ROW_BLOCKS * steps_of(H) * STEP_WORDS);
    panel.d_out = take_words(memory, ROW_BLOCKS * steps_of(h) * STEP_WORDS);
    panel.d_out_rows = take_words(memory, ROW_BLOCKS * steps_of(h) * STEP_WORDS);
    panel.d_query = memory.take(H * ROWS);
  }

  // Fills a panel with rows [r0, r0 + rows) of head n.
  void load_panel(Panel& panel, long n, long r0, long rows) const {
    panel.n = n, panel.r0 = r0, panel.rows = rows;
    read_statistics(panel);
    std::fill(panel.d_query, panel.d_query + H * ROWS, 0.f);
    read_rows(panel, p.query, p.H, H, p.scale);
    pack_features(H, panel.query);
    panel.query_exponent = divide(H);
    pack_over_rows(H, panel.query_rows);
    read_rows(panel, g.d_out, p.h, h, 1.f);
    float least = 0.f;
    for (long r = 0; r < rows; r++)
      if (panel.inverse[r] != 0.f) least = std::max(least, std::fabs(d_lse(panel, r)));
    panel.d_out_exponent = divide(h, least);
    write_delta(panel);
    pack_features(h, panel.d_out);
    pack_over_rows(h, panel.d_out_rows);
  }

  // Copies keys [k0, end) of a chunk and their values; others are 0.
  void copy_chunk(long k0, long end) const {
    const long first = std::max(k0, attended.first);
    float* const copied = staging + CHUNK * H;
    std::fill(staging, staging + CHUNK * (H + h), 0.f);
    copy_keys(p, b, kv, first, end - first, H, h, staging + (first - k0) * H, copied + (first - k0) * h,
              in_range<IN>);
  }

  // True if all attended keys and their values are in range, as the forward pass asks.
  bool keys_in_range() const {
    const auto [first, end] = attended;
    if (IN == 1 && finite_keys(p, b, kv, first, end - first)) return true;
    for (long k0 = first / CHUNK * CHUNK; k0 < end; k0 += CHUNK) {  // without keys that none attends
      copy_chunk(k0, std::min(k0 + CHUNK, end));
      if (!in_range<IN>(staging, CHUNK * (H + h))) return false;
    }
    return true;
  }

  // Packs keys [k0, end) of a chunk and their values as rows, and the keys as rows of features, too.
  void load_chunk(long k0, long end) const {
    const long count = (end - k0 + ROWS - 1) / ROWS * ROWS;
    copy_chunk(k0, end);
    pack_rows<IN>(staging, H, count, H, steps_of(H), keys);
    pack_rows<IN>(staging + CHUNK * H, h, count, h, steps_of(h), values);
    for (long key = 0; key < count; key += ROWS) {
      transpose(staging + key * H, H, ROWS, H, transposed);
      pack_rows<IN>(transposed, ROWS, H, ROWS, CHUNK_STEPS, keys_over_keys + key / STEP * STEP_WORDS);
    }
  }
};

}  // namespace amx
}  // namespace jaxmha
