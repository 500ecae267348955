// Gradients of attention of bfloat16 on AMX. Queries, keys, values and cotangents are multiplied as they
// are, weights and gradients of logits as sums of two bfloat16. Delta is always the row sum of
// out * d_out.
//
// Keys pass in chunks, whose blocks and gradients stay in the second-level cache while the panels of
// query rows of an item pass.
#include <vector>

#include "amx_tiles.h"
#include "backward.h"
#include "keys.h"
#include "kernels.h"
#include "scores.h"

namespace jaxmha {
namespace amx {
namespace {

constexpr long KEYS = 128, CHUNK = 512;  // keys of a block, and of a chunk
constexpr long MOST_PANELS = 32;         // whose gradients are in memory at a time
constexpr long KEY_STEPS = KEYS / STEP, CHUNK_STEPS = CHUNK / STEP, CHUNK_BLOCKS = CHUNK / SIDE;
constexpr long ROW_STEPS = ROWS / STEP, ROW_BLOCKS = ROWS / SIDE;
static_assert(STEP == SIDE, "blocks of keys are steps of products over keys");
constexpr int PARTS = 2;  // of weights and of gradients of logits

// Query rows of one head, and what is known of them before keys are visited.
struct Panel {
  long n, r0, rows;
  float row_max[ROWS], inverse[ROWS];  // the latter of the row sum; 0 where a row attends nothing
  float delta[ROWS];                   // row sum of out * d_out, less the cotangent of the log-sum-exp
  float* d_query;                      // H' ROWS
};

// The memory of an item. Blocks of columns: query and d_out for products over features, query_rows and
// d_rows for those over query rows.
struct Item {
  const Backward& g;
  const Problem& p;
  const Sizes& sizes;
  const long b, kv, H, h;  // H, h: in whole blocks
  Range attended;
  Scratch memory;
  Word *keys, *values, *keys_over_keys, *query, *query_rows, *d_out, *d_rows, *rows, *columns;
  float *staging, *transposed, *weights, *d_logits, *cap_gradient, *d_queries;
  float *d_keys, *d_values;
  uint8_t* allowed;

  Item(const Backward& g, const Sizes& sizes, long head, long panels, float* sums);
};

size_t floats_of(const Problem& p, long H, long h, long panels) {
  const long chunk = CHUNK_BLOCKS * (2 * steps_of(H) + steps_of(h)) * PART_WORDS;
  const long panel = ROW_BLOCKS * (2 * steps_of(H) + 2 * steps_of(h)) * PART_WORDS;
  const long split = (ROW_STEPS + KEY_STEPS) * PARTS * PART_WORDS;
  return chunk + panel + split + CHUNK * (H + h) + ROWS * std::max(H, h) +
         3 * KEYS * ROWS + KEYS * ROWS / 4 + panels * H * ROWS + 16 * 16;
}

Item::Item(const Backward& g, const Sizes& s, long head, long panels, float* sums)
    : g(g), p(g.problem), sizes(s), b(head / p.K), kv(head % p.K), H(blocks_of(p.H) * SIDE),
      h(blocks_of(p.h) * SIDE), attended(keys_of_head(p, b, kv)),
      memory(floats_of(p, H, h, panels)), d_keys(sums), d_values(sums + p.S * s.H) {
  keys = take_words(memory, CHUNK_BLOCKS * steps_of(H) * PART_WORDS);
  values = take_words(memory, CHUNK_BLOCKS * steps_of(h) * PART_WORDS);
  keys_over_keys = take_words(memory, blocks_of(H) * CHUNK_STEPS * PART_WORDS);
  query = take_words(memory, ROW_BLOCKS * steps_of(H) * PART_WORDS);
  d_out = take_words(memory, ROW_BLOCKS * steps_of(h) * PART_WORDS);
  query_rows = take_words(memory, blocks_of(H) * ROW_STEPS * PART_WORDS);
  d_rows = take_words(memory, blocks_of(h) * ROW_STEPS * PART_WORDS);
  rows = take_words(memory, ROW_STEPS * PARTS * PART_WORDS);
  columns = take_words(memory, KEY_STEPS * PARTS * PART_WORDS);
  staging = memory.take(CHUNK * (H + h));
  transposed = memory.take(ROWS * std::max(H, h));
  weights = memory.take(KEYS * ROWS);
  d_logits = memory.take(KEYS * ROWS);
  cap_gradient = memory.take(KEYS * ROWS);
  allowed = reinterpret_cast<uint8_t*>(memory.take(KEYS * ROWS / 4));
  d_queries = memory.take(panels * H * ROWS);
  const auto [first, end] = attended;
  if (attended.empty()) return;
  std::fill(d_keys + first * s.H, d_keys + end * s.H, 0.f);
  std::fill(d_values + first * s.h, d_values + end * s.h, 0.f);
}

// Rows of a panel as floats `ROWS width`; of those that attend nothing, 0.
void read_rows(const Item& w, const Panel& panel, const Heads& from, long features, long width,
               float factor) {
  for (long r = 0; r < ROWS; r++) {
    float* const to = w.staging + r * width;
    if (panel.inverse[r] == 0.f) {
      std::fill(to, to + width, 0.f);
      continue;
    }
    pad_row(from.at(w.b, panel.r0 + r, panel.n), from.type, features, width, to);
    for (long x = 0; x < features; x++) to[x] *= factor;
  }
}

// Packs rows that were read: as columns of features, and as columns of rows.
void pack_panel(const Item& w, long width, Word* over_features, Word* over_rows) {
  transpose(w.staging, width, ROWS, width, w.transposed);
  for (long j = 0; j < ROW_BLOCKS; j++)
    pack_columns<1>(w.transposed + j * SIDE, ROWS, width,
                    over_features + j * steps_of(width) * PART_WORDS);
  for (long i = 0; i < blocks_of(width); i++)
    pack_columns<1>(w.staging + i * SIDE, width, ROWS, over_rows + i * ROW_STEPS * PART_WORDS);
}

void load_panel(const Item& w, const Panel& panel) {
  read_rows(w, panel, w.p.query, w.p.H, w.H, w.p.scale);
  pack_panel(w, w.H, w.query, w.query_rows);
  read_rows(w, panel, w.g.d_out, w.p.h, w.h, 1.f);
  pack_panel(w, w.h, w.d_out, w.d_rows);
}

// The statistics of a panel, and its gradient of queries, which is 0 so far.
void start_panel(const Item& w, Panel& panel) {
  const Problem& p = w.p;
  const View view(p, w.b, panel.n);
  for (long r = 0; r < ROWS; r++) {
    const long at = panel.n * p.T + panel.r0 + r;
    const bool alive = r < panel.rows && view.valid_row(panel.r0 + r) &&
                       w.g.row_sum.of(w.b)[at] != 0.f;
    panel.row_max[r] = alive ? w.g.row_max.of(w.b)[at] : -LOWEST;
    panel.inverse[r] = alive ? 1.f / w.g.row_sum.of(w.b)[at] : 0.f;
    panel.delta[r] = 0.f;
  }
  read_rows(w, panel, w.g.d_out, p.h, w.h, 1.f);
  for (long r = 0; r < panel.rows; r++) {
    if (panel.inverse[r] == 0.f) continue;
    const auto* out = reinterpret_cast<const float*>(w.g.out.at(w.b, panel.r0 + r, panel.n));
    double total = 0.;
    for (long x = 0; x < p.h; x++) total += static_cast<double>(out[x]) * w.staging[r * w.h + x];
    if (w.g.d_lse) total -= w.g.d_lse.of(w.b)[panel.n * p.T + panel.r0 + r];
    panel.delta[r] = static_cast<float>(total);
  }
  for (long r = 0; r < panel.rows; r++)  // for cotangents that are divided by the row sum
    w.g.delta[(w.b * p.N + panel.n) * p.T + panel.r0 + r] = panel.delta[r] * panel.inverse[r];
  std::fill(panel.d_query, panel.d_query + w.H * ROWS, 0.f);
}

// Copies keys [k0, end) of a chunk and their values; others are 0.
void copy_chunk(const Item& w, long k0, long end) {
  const long first = std::max(k0, w.attended.first);
  float *const keys = w.staging, *const values = keys + CHUNK * w.H;
  std::fill(keys, keys + CHUNK * (w.H + w.h), 0.f);
  copy_keys(w.p, w.b, w.kv, first, end - first, w.H, w.h, keys + (first - k0) * w.H,
            values + (first - k0) * w.h);
}

// True if all attended keys and their values are finite, as the forward pass asks.
bool all_finite(const Item& w) {
  const auto [first, end] = w.attended;
  if (finite_keys_of_bf16(w.p, w.b, w.kv, first, end - first)) return true;
  for (long k0 = first / CHUNK * CHUNK; k0 < end; k0 += CHUNK) {  // without keys that none attends
    copy_chunk(w, k0, std::min(k0 + CHUNK, end));
    if (!avx512::all_finite(w.staging, CHUNK * (w.H + w.h))) return false;
  }
  return true;
}

// Packs keys [k0, end) of a chunk and their values as rows, and the keys as rows of features, too.
void load_chunk(const Item& w, long k0, long end) {
  const long count = (end - k0 + ROWS - 1) / ROWS * ROWS;
  float *const keys = w.staging, *const values = keys + CHUNK * w.H;
  copy_chunk(w, k0, end);
  pack_rows<1>(keys, w.H, count, w.H, steps_of(w.H), w.keys);
  pack_rows<1>(values, w.h, count, w.h, steps_of(w.h), w.values);
  for (long key = 0; key < count; key += ROWS) {
    transpose(keys + key * w.H, w.H, ROWS, w.H, w.transposed);
    pack_rows<1>(w.transposed, ROWS, w.H, ROWS, CHUNK_STEPS,
                 w.keys_over_keys + key / STEP * PART_WORDS);
  }
}

// Some blocks of SIDE keys: the first of all keys, that of the chunk, and how many.
struct Keys {
  long k0, block, blocks;
};

// Logits, in the memory of weights, and cotangents of weights.
void multiply_features(const Item& w, const Keys& some) {
  const long H = steps_of(w.H) * PART_WORDS, h = steps_of(w.h) * PART_WORDS;
  for (long i = 0; i < some.blocks; i++)
    for (long j = 0; j < ROW_BLOCKS; j++) {
      const long at = i * SIDE * ROWS + j * SIDE;
      multiply<1, 1>(w.keys + (some.block + i) * H, w.query + j * H, steps_of(w.H),
                     w.weights + at, ROWS);
      multiply<1, 1>(w.values + (some.block + i) * h, w.d_out + j * h, steps_of(w.h),
                     w.d_logits + at, ROWS);
    }
}

// Weights of keys [first, end) from their logits, and gradients of logits from cotangents of weights. A
// weight of 0 has gradient 0, whatever its cotangent.
void differentiate(const Item& w, const Panel& panel, long first, long end, bool capped) {
  const Exponent exponent(w.p.exponent());
  const Vector zero = set1(0.f);
  for (long j = 0; j < ROWS; j += W) {
    const Vector m = load(panel.row_max + j), inverse = load(panel.inverse + j);
    const Vector delta = load(panel.delta + j);
    const Lanes dead = is_zero(inverse);
    for (long key = first; key < end; key++) {
      const long at = key * ROWS + j;
      const Vector x = mul(exp(sub(load(w.weights + at), m), exponent), inverse);
      Vector y = mul(x, sub(load(w.d_logits + at), delta));
      if (capped) y = mul(y, load(w.cap_gradient + at));
      store(w.weights + at, select(dead, zero, x));
      store(w.d_logits + at, select(dead, zero, select(is_zero(x), zero, y)));
    }
  }
}

// to[SIDE keys x width] += the products of some rows of weights and of columns over query rows.
void add_over_rows(const Item& w, const float* weights, const Word* columns, long width, long keys,
                   float* to) {
  pack_rows<PARTS>(weights, ROWS, SIDE, ROWS, ROW_STEPS, w.rows);
  for (long x = 0; x < width; x += SIDE, columns += ROW_STEPS * PART_WORDS) {
    alignas(64) float c[SIDE * SIDE];
    multiply<PARTS, 1>(w.rows, columns, ROW_STEPS, c, SIDE);
    for (long i = 0; i < keys; i++)
      for (long tile = 0; tile < std::min(SIDE, width - x); tile += W) {
        float* const at = to + i * width + x + tile;
        store(at, add(load(at), load(c + i * SIDE + tile)));
      }
  }
}

// The gradient of queries, transposed, += the products of keys and gradients of logits.
void add_over_keys(const Item& w, const Panel& panel, const Keys& some) {
  for (long j = 0; j < ROW_BLOCKS; j++) {
    pack_columns<PARTS>(w.d_logits + j * SIDE, ROWS, some.blocks * SIDE, w.columns);
    for (long x = 0; x < blocks_of(w.H); x++) {
      alignas(64) float c[SIDE * SIDE];
      multiply<1, PARTS>(w.keys_over_keys + (x * CHUNK_STEPS + some.block) * PART_WORDS, w.columns,
                         some.blocks, c, SIDE);
      float* const to = panel.d_query + x * SIDE * ROWS + j * SIDE;
      for (long i = 0; i < SIDE; i++)
        for (long tile = 0; tile < SIDE; tile += W)
          store(to + i * ROWS + tile,
                add(load(to + i * ROWS + tile), load(c + i * SIDE + tile)));
    }
  }
}

// One block of at most KEYS keys from k0 on, of a chunk that begins at `chunk`, seen by a panel, which is
// loaded first where no block before it was attended.
void visit_block(const Item& w, const Panel& panel, const View& view, long chunk, long k0, long end,
                 bool& loaded) {
  const Problem& p = w.p;
  const Range part = view.attended_part(panel.r0, panel.rows, k0, end - k0);
  if (part.empty()) return;
  const long skipped = (part.first - k0) / SIDE * SIDE;
  const Keys some{k0 + skipped, (k0 + skipped - chunk) / SIDE, blocks_of(part.end - k0 - skipped)};
  const long count = part.end - part.first, first = part.first - some.k0;
  const Tile kind = view.tile(panel.r0, panel.rows, part.first, count, w.allowed, nullptr);
  if (kind == Tile::masked) return;
  if (!loaded) load_panel(w, panel), loaded = true;
  multiply_features(w, some);
  const bool capped = p.soft_cap != 0.f;
  if (kind != Tile::clear)
    apply_conditions({count, ROWS / W, w.weights + first * ROWS, w.allowed, nullptr,
                      p.whole_logits() ? p.rest : 1.f, p.soft_cap,
                      capped ? w.cap_gradient + first * ROWS : nullptr});
  differentiate(w, panel, first, first + count, capped);
  for (float* const x : {w.weights, w.d_logits}) {  // other keys of these blocks have no weight
    std::fill(x, x + first * ROWS, 0.f);
    std::fill(x + (first + count) * ROWS, x + some.blocks * SIDE * ROWS, 0.f);
  }
  const Sizes& s = w.sizes;
  for (long i = 0; i < some.blocks; i++) {
    const long key = some.k0 + i * SIDE, keys = std::min(SIDE, p.S - key);
    add_over_rows(w, w.weights + i * SIDE * ROWS, w.d_rows, s.h, keys, w.d_values + key * s.h);
    add_over_rows(w, w.d_logits + i * SIDE * ROWS, w.query_rows, s.H, keys, w.d_keys + key * s.H);
  }
  add_over_keys(w, panel, some);
}

void write_queries(const Item& w, const Panel& panel) {
  const Problem& p = w.p;
  const float factor = p.scale * p.rest;
  for (long x = 0; x < w.H; x += ROWS)
    transpose(panel.d_query + x * ROWS, ROWS, std::min(ROWS, w.H - x), panel.rows, w.staging + x * ROWS);
  for (long r = 0; r < panel.rows; r++) {
    float* const row = w.transposed;
    for (long x = 0; x < p.H; x++)
      row[x] = w.staging[x / ROWS * ROWS * ROWS + r * ROWS + x % ROWS] * factor;
    write_row(row, w.g.d_query.type, p.H, w.g.d_query.at(w.b, panel.r0 + r, panel.n));
  }
}

void visit_panels(const Item& w, std::vector<Panel>& panels) {
  for (Panel& panel : panels) start_panel(w, panel);
  for (long chunk = w.attended.first / CHUNK * CHUNK; chunk < w.attended.end; chunk += CHUNK) {
    const long end = std::min(chunk + CHUNK, w.attended.end);
    bool packed = false;
    for (const Panel& panel : panels) {
      const View view(w.p, w.b, panel.n);
      const Range seen = view.keys_of(panel.r0, panel.rows);
      if (seen.end <= chunk || seen.first >= end) continue;
      if (!packed) load_chunk(w, chunk, end), packed = true;
      bool loaded = false;
      for (long k0 = chunk; k0 < end; k0 += KEYS)
        visit_block(w, panel, view, chunk, k0, std::min(k0 + KEYS, end), loaded);
    }
  }
  for (const Panel& panel : panels) write_queries(w, panel);
}

void visit_part(const Backward& g, const Sizes& s, long head, long part, float* sums) {
  const Problem& p = g.problem;
  const long own = (s.panels - part + s.parts - 1) / s.parts, each = s.panels / p.group();
  const long most = std::min(MOST_PANELS, own);
  Item w(g, s, head, most, sums);
  if (!all_finite(w)) return avx512::visit_part(g, s, head, part, sums);
  const Tiles tiles;
  std::vector<Panel> panels;
  for (long i = 0; i < own; i += most) {
    panels.clear();
    for (long j = i; j < std::min(i + most, own); j++) {
      const long panel = part + j * s.parts, r0 = panel % each * ROWS;
      panels.push_back({});
      panels.back().n = w.kv * p.group() + panel / each, panels.back().r0 = r0;
      panels.back().rows = std::min(ROWS, p.T - r0);
      panels.back().d_query = w.d_queries + (j - i) * w.H * ROWS;
    }
    visit_panels(w, panels);
  }
}

}  // namespace

void attend_backward(const Backward& g, Pool& pool) {
  const bool alike = suits(g.problem, true) && g.d_out.type == Float::bf16;
  avx512::attend_backward(g, pool, alike ? visit_part : avx512::visit_part);
}

}  // namespace amx
}  // namespace jaxmha
