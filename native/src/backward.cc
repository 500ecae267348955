// Gradients of query, key and value. An item is a key head, or some panels of its query rows where
// there are fewer heads than threads; then gradients of keys are sums over the items of a head.
//
// Where the tiles of all keys of a panel fit in the L2 cache, delta is the sum of the
// same products that it is subtracted from, so that gradients of a row's logits cancel exactly.
// Else it is the row sum of out * d_out, and they cancel up to the rounding of both.
#include "backward.h"

#include "gradient.h"
#include "keys.h"
#include "kernels.h"

namespace jaxmha {
namespace JAXMHA_ISA {

Sizes::Sizes(const Problem& p, long threads) : H(padded(p.H)), h(padded(p.h)) {
  constexpr size_t MOST_PARTIAL = size_t{256} << 20;  // bytes of gradients before the final sum
  panels = p.group() * ((p.T + ROWS - 1) / ROWS);
  parts = parts_of_backward(p, threads, ROWS, MOST_PARTIAL / sizeof(float) / (H + h));
}

namespace {

constexpr long KEYS = 96;        // of a block
constexpr long ALL_KEYS = 1536;  // most keys whose tiles are kept
constexpr long CHUNK = 256;      // keys of an item of the final sum

bool keeps_all(const Problem& p) { return p.S <= ALL_KEYS; }
long kept_keys(const Problem& p) { return keeps_all(p) ? (p.S + KEYS - 1) / KEYS * KEYS : KEYS; }

// The state of one item.
struct Item {
  const Backward& g;
  const Problem& p;
  const Sizes& sizes;
  long b, kv;
  Range attended;  // keys outside which no query attends
  Scratch memory;
  Panel panel;
  float *keys, *values, *d_keys, *d_values, *d_query, *exps, *d_exps, *cap_gradient;
  float *first, *delta;  // ROWS: what gradients of logits subtract, one after the other
  TileMemory tile;

  Item(const Backward& g, const Sizes& sizes, long b, long kv, float* sums);
};

size_t floats_of(const Problem& p, const Sizes& s) {
  const long tiles = p.soft_cap != 0.f ? 3 : 2;
  return Panel::floats(p) + s.floats_of_head(p) + ROWS * s.H + 2 * ROWS +
         tiles * kept_keys(p) * ROWS + KEYS * ROWS / 4 + KEYS * ROWS + 13 * 16;
}

Item::Item(const Backward& g, const Sizes& s, long b, long kv, float* sums)
    : g(g), p(g.problem), sizes(s), b(b), kv(kv), attended(keys_of_head(p, b, kv)),
      memory(floats_of(p, s)), panel(p, memory) {
  keys = memory.take(p.S * s.H);
  values = memory.take(p.S * s.h);
  d_query = memory.take(ROWS * s.H);
  first = memory.take(ROWS);
  delta = memory.take(ROWS);
  exps = memory.take(kept_keys(p) * ROWS);
  d_exps = memory.take(kept_keys(p) * ROWS);
  cap_gradient = p.soft_cap != 0.f ? memory.take(kept_keys(p) * ROWS) : nullptr;
  tile.allowed = reinterpret_cast<uint8_t*>(memory.take(KEYS * ROWS / 4));
  tile.bias = memory.take(KEYS * ROWS);
  d_keys = sums, d_values = sums + p.S * s.H;
  const auto [first, end] = attended;
  if (attended.empty()) return;
  std::fill(d_keys + first * s.H, d_keys + end * s.H, 0.f);
  std::fill(d_values + first * s.h, d_values + end * s.h, 0.f);
  copy_keys(p, b, kv, first, end - first, s.H, s.h, keys + first * s.H, values + first * s.h);
}

// delta += exps * d_exps, over keys; an exponential of 0 counts nothing, whatever its cotangent.
void add_products(long count, const float* exps, const float* d_exps, float* delta) {
  const Vector zero = set1(0.f);
  for (long j = 0; j < ROWS / W; j++) {
    Vector sums[2] = {zero, zero};
    for (long key = 0; key < count; key++) {
      const Vector x = load(exps + key * ROWS + j * W), y = load(d_exps + key * ROWS + j * W);
      sums[key % 2] = add(sums[key % 2], select(is_zero(x), zero, mul(x, y)));
    }
    store(delta + j * W, add(load(delta + j * W), add(sums[0], sums[1])));
  }
}

// The same of d_exps - first: what rounding left of `first`.
void add_remainders(long count, const float* exps, const float* d_exps, const float* first,
                    float* delta) {
  const Vector zero = set1(0.f);
  for (long j = 0; j < ROWS / W; j++) {
    const Vector d = load(first + j * W);
    Sum sums[2];
    for (long key = 0; key < count; key++) {
      const Vector x = load(exps + key * ROWS + j * W), y = load(d_exps + key * ROWS + j * W);
      sums[key % 2].add_next(select(is_zero(x), zero, mul(x, sub(y, d))));
    }
    store(delta + j * W, add(load(delta + j * W), sums[0].with(sums[1])));
  }
}

// d_exps becomes the gradient of the logits.
void subtract(long count, const float* exps, float* d_exps, const float* cap_gradient,
              const float* first, const float* delta) {
  const Vector zero = set1(0.f);
  for (long j = 0; j < ROWS / W; j++) {
    const Vector d = load(first + j * W), rest = load(delta + j * W);
    for (long key = 0; key < count; key++) {
      const long at = key * ROWS + j * W;
      const Vector x = load(exps + at);
      Vector y = mul(x, sub(sub(load(d_exps + at), d), rest));
      if (cap_gradient) y = mul(y, load(cap_gradient + at));
      store(d_exps + at, select(is_zero(x), zero, y));
    }
  }
}

struct Block {
  long k0, count;
  float *exps, *d_exps, *cap_gradient;
};

void add_values(Item& w, const Block& t) {
  const Sizes& s = w.sizes;
  product<Into::added>(t.count, s.h / W, ROWS, {t.exps, ROWS, 1}, w.panel.d_out_rows, s.h,
                       w.d_values + t.k0 * s.h, s.h);
  cotangents(w.p, w.panel, t.count, w.values + t.k0 * s.h, s.h, t.d_exps);
}

void add_keys_and_queries(Item& w, const Block& t) {
  const Sizes& s = w.sizes;
  subtract(t.count, t.exps, t.d_exps, t.cap_gradient, w.first, w.delta);
  product<Into::added>(t.count, s.H / W, ROWS, {t.d_exps, ROWS, 1}, w.panel.query_rows, s.H,
                       w.d_keys + t.k0 * s.H, s.H);
  product<Into::added>(ROWS, s.H / W, t.count, {t.d_exps, 1, ROWS}, w.keys + t.k0 * s.H, s.H,
                       w.d_query, s.H);
}

// Delta from the tiles of all keys, in two parts: the second is what rounding has left of the
// first, and would be a large part of gradients of rows whose cotangents are nearly alike.
void sum_delta(Item& w, const Block* kept, long blocks) {
  for (long i = 0; i < blocks; i++)
    add_products(kept[i].count, kept[i].exps, kept[i].d_exps, w.first);
  for (long r = 0; r < ROWS; r++) w.first[r] /= w.panel.row_sum[r];
  for (long i = 0; i < blocks; i++)
    add_remainders(kept[i].count, kept[i].exps, kept[i].d_exps, w.first, w.delta);
  for (long r = 0; r < ROWS; r++) w.delta[r] /= w.panel.row_sum[r];
}

// The part of delta that is known before the keys are visited.
void start_delta(Item& w, long n) {
  const long h = w.p.h;
  for (long r = 0; r < ROWS; r++) {
    w.first[r] = w.delta[r] = 0.f;
    if (w.panel.alive[r] == 0.f || keeps_all(w.p)) continue;
    const auto* out = reinterpret_cast<const float*>(w.g.out.at(w.b, w.panel.r0 + r, n));
    const float* const d_out = w.panel.d_out_rows + r * w.sizes.h;
    double total = 0.;
    for (long x = 0; x < h; x++) total += static_cast<double>(out[x]) * d_out[x];
    w.delta[r] = static_cast<float>(total);
  }
}

void add_lse(Item& w, long n) {
  if (!w.g.d_lse) return;
  for (long r = 0; r < ROWS; r++)
    if (w.panel.alive[r] != 0.f)
      w.delta[r] -= w.g.d_lse.of(w.b)[n * w.p.T + w.panel.r0 + r] / w.panel.row_sum[r];
}

void write_rows(Item& w, long n) {
  const Problem& p = w.p;
  for (long r = 0; r < w.panel.rows; r++) {
    float* const row = w.d_query + r * w.sizes.H;
    // A row that attends nothing has gradient 0: its weights of 0 would not keep NaN out of it.
    if (w.panel.alive[r] == 0.f) std::fill(row, row + p.H, 0.f);
    for (long x = 0; x < p.H; x++) row[x] *= p.scale * p.rest;
    write_row(row, w.g.d_query.type, p.H, w.g.d_query.at(w.b, w.panel.r0 + r, n));
    w.g.delta[(w.b * p.N + n) * p.T + w.panel.r0 + r] = w.first[r] + w.delta[r];
  }
}

void visit_panel(Item& w, long n, long r0) {
  const Problem& p = w.p;
  const View view(p, w.b, n);
  w.panel.load_rows(w.g, view, w.b, n, r0, std::min(ROWS, p.T - r0));
  std::fill(w.d_query, w.d_query + ROWS * w.sizes.H, 0.f);
  start_delta(w, n);
  const bool all_keys = keeps_all(p);
  if (!all_keys) add_lse(w, n);
  const Range seen = view.keys_of(r0, w.panel.rows);
  constexpr long MOST = ALL_KEYS / KEYS + 1;
  Block kept[MOST];
  long blocks = 0;
  const auto next = [&](long k) { return view.next_key(r0, w.panel.rows, k, seen.end); };
  for (long k0 = next(seen.first), count; k0 < seen.end; k0 = next(k0 + count)) {
    const Range part = view.attended_part(r0, w.panel.rows, k0, KEYS);
    count = part.end - part.first;
    const long at = all_keys ? (k0 - seen.first) * ROWS : 0;
    const Block t{k0, count, w.exps + at, w.d_exps + at,
                  w.cap_gradient ? w.cap_gradient + at : nullptr};
    if (!exponentials(p, view, w.panel, k0, t.count, w.keys + k0 * w.sizes.H, w.sizes.H, w.tile,
                      t.exps, t.cap_gradient))
      continue;
    add_values(w, t);
    if (all_keys) {
      kept[blocks++] = t;
    } else {
      add_keys_and_queries(w, t);
    }
  }
  if (all_keys) {
    sum_delta(w, kept, blocks);
    add_lse(w, n);
    for (long i = 0; i < blocks; i++) add_keys_and_queries(w, kept[i]);
  }
  write_rows(w, n);
}

// Writes keys [k0, k0 + count) of a head, summed over its parts in their order.
void write_keys(const Backward& g, const Sizes& s, long head, long k0, long count, float* parts) {
  const Problem& p = g.problem;
  const size_t step = s.floats_of_head(p);
  const Range attended = keys_of_head(p, head / p.K, head % p.K);
  for (long j = k0; j < k0 + count; j++) {
    if (j < attended.first || j >= attended.end) {
      char* const to_key = g.d_key.at(head / p.K, j, head % p.K);
      char* const to_value = g.d_value.at(head / p.K, j, head % p.K);
      std::memset(to_key, 0, p.H * size_of(g.d_key.type));
      std::memset(to_value, 0, p.h * size_of(g.d_value.type));
      continue;
    }
    float *const key = parts + j * s.H, *const value = parts + p.S * s.H + j * s.h;
    for (long part = 1; part < s.parts; part++) {
      for (long x = 0; x < p.H; x++) key[x] += key[part * step + x];
      for (long x = 0; x < p.h; x++) value[x] += value[part * step + x];
    }
    // The same of a key that no query attends.
    const bool finite = all_finite(key, p.H) && all_finite(value, p.h);
    if (!finite && !attended_by_group(p, head / p.K, head % p.K, j))
      std::fill(key, key + p.H, 0.f), std::fill(value, value + p.h, 0.f);
    for (long x = 0; x < p.H; x++) key[x] *= p.rest;
    write_row(key, g.d_key.type, p.H, g.d_key.at(head / p.K, j, head % p.K));
    write_row(value, g.d_value.type, p.h, g.d_value.at(head / p.K, j, head % p.K));
  }
}

}  // namespace

void visit_part(const Backward& g, const Sizes& s, long head, long part, float* sums) {
  const Problem& p = g.problem;
  Item w(g, s, head / p.K, head % p.K, sums);
  const long each = s.panels / p.group();
  // Later rows attend more keys under a causal mask: parts take turns.
  for (long i = part; i < s.panels; i += s.parts)
    visit_panel(w, w.kv * p.group() + i / each, i % each * ROWS);
}

void attend_backward(const Backward& g, Pool& pool) { attend_backward(g, pool, visit_part); }

void attend_backward(const Backward& g, Pool& pool, VisitPart visit) {
  const Problem& p = g.problem;
  const Sizes s(p, pool.threads());
  const long heads = p.B * p.K;
  const size_t step = s.floats_of_head(p);
  if (s.parts == 1)
    return parallel(pool, heads, [&](long head) {
      Scratch sums(step);
      float* const own = sums.take(step);
      visit(g, s, head, 0, own);
      write_keys(g, s, head, 0, p.S, own);
    });
  Scratch memory(heads * s.parts * step);
  float* const sums = memory.take(heads * s.parts * step);
  parallel(pool, heads * s.parts,
           [&](long i) { visit(g, s, i / s.parts, i % s.parts, sums + i * step); });
  const long chunks = (p.S + CHUNK - 1) / CHUNK;
  parallel(pool, heads * chunks, [&](long i) {
    const long head = i / chunks, k0 = i % chunks * CHUNK;
    write_keys(g, s, head, k0, std::min(CHUNK, p.S - k0), sums + head * s.parts * step);
  });
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
