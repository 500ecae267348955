// The gradient of the bias, whose axes may have size 1: then entries are sums over that axis. An
// item is a block of entries, and visits all tiles of scores that they are part of, in one order.
// The diagonals of a head are one item.
#include "gradient.h"
#include "keys.h"
#include "kernels.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr long KEYS = 96;

struct Item {
  const BiasGradient& g;
  const Problem& p;
  Scratch memory;
  Panel panel;
  float *keys, *values, *exps, *d_exps, *sums;  // sums: KEYS ROWS
  double* diagonals;  // of all tiles, which would round in float; null: the bias has none
  TileMemory tile;

  explicit Item(const BiasGradient& g);
};

size_t floats_of(const Problem& p) {
  return Panel::floats(p) + KEYS * (padded(p.H) + padded(p.h)) + 4 * KEYS * ROWS +
         KEYS * ROWS / 4 + 2 * (p.T + p.S) + 11 * 16;
}

Item::Item(const BiasGradient& g)
    : g(g), p(g.problem), memory(floats_of(p)), panel(p, memory) {
  keys = memory.take(KEYS * padded(p.H));
  values = memory.take(KEYS * padded(p.h));
  exps = memory.take(KEYS * ROWS);
  d_exps = memory.take(KEYS * ROWS);
  sums = memory.take(KEYS * ROWS);
  tile.bias = memory.take(KEYS * ROWS);
  tile.allowed = reinterpret_cast<uint8_t*>(memory.take(KEYS * ROWS / 4));
  std::fill(sums, sums + KEYS * ROWS, 0.f);
  diagonals = nullptr;
  if (p.bias.t >= 0) return;
  diagonals = reinterpret_cast<double*>(memory.take(2 * (p.T + p.S)));
  std::fill(diagonals, diagonals + p.T + p.S, 0.);
}

// Adds the gradients of the biased logits of a tile; over its keys where the bias has one for all.
void add_tile(Item& w, const View& view, long b, long n, long k0, long count) {
  const Problem& p = w.p;
  const long H = padded(p.H), h = padded(p.h);
  if (!exponentials(p, view, w.panel, k0, count, w.keys, H, w.tile, w.exps, nullptr)) return;
  cotangents(p, w.panel, count, w.values, h, w.d_exps);
  const float* const delta = w.g.delta.of(b) + n * p.T + w.panel.r0;
  const Vector zero = set1(0.f);
  float subtracted[ROWS] = {};
  std::copy(delta, delta + w.panel.rows, subtracted);
  for (long key = 0; key < count; key++)
    for (long j = 0; j < ROWS / W; j++) {
      const long at = key * ROWS + j * W;
      const Vector x = load(w.exps + at);
      const Vector y = mul(x, sub(load(w.d_exps + at), load(subtracted + j * W)));
      float* const to = w.sums + (w.g.s == 1 ? j * W : at);
      store(to, add(load(to), select(is_zero(x), zero, y)));
    }
}

// Adds the sums of a tile to its diagonals, and clears them.
void add_diagonals(Item& w, long k0, long count) {
  for (long key = 0; key < count; key++) {
    double* const to = w.diagonals + w.p.T - 1 + k0 + key - w.panel.r0;
    float* const from = w.sums + key * ROWS;
    for (long r = 0; r < w.panel.rows; r++) to[-r] += from[r];
    std::fill(from, from + ROWS, 0.f);
  }
}

// Entries of part `part` and head `n`, of rows and keys from r0 and k0 on; an axis of size 1 stands
// for all heads, rows or keys.
struct Entries {
  long part, n, r0, k0;
};

void visit_head(Item& w, const Entries& e, long b, long n) {
  const Problem& p = w.p;
  const View view(p, b, n);
  const Range rows{e.r0, w.g.t == 1 ? p.T : std::min(p.T, e.r0 + ROWS)};
  const bool all_keys = w.g.s == 1 || w.diagonals;
  const Range keys{e.k0, all_keys ? p.S : std::min(p.S, e.k0 + KEYS)};
  for (long k0 = keys.first; k0 < keys.end; k0 += KEYS) {
    const long count = std::min(KEYS, keys.end - k0);
    copy_keys(p, b, n / p.group(), k0, count, padded(p.H), padded(p.h), w.keys, w.values);
    for (long r0 = rows.first; r0 < rows.end; r0 += ROWS) {
      const Range seen = view.keys_of(r0, std::min(ROWS, rows.end - r0));
      if (seen.end <= k0 || seen.first >= k0 + count) continue;
      w.panel.load_rows(w.g, view, b, n, r0, std::min(ROWS, rows.end - r0));
      add_tile(w, view, b, n, k0, count);
      if (w.diagonals) add_diagonals(w, k0, count);
    }
  }
}

void write_entries(const Item& w, const Entries& e) {
  const BiasGradient& g = w.g;
  if (w.diagonals) {
    std::copy(w.diagonals, w.diagonals + g.s, g.d_bias + (e.part * g.n + e.n) * g.s);
    return;
  }
  const long rows = g.t == 1 ? 1 : std::min(ROWS, g.t - e.r0);
  const long keys = g.s == 1 ? 1 : std::min(KEYS, g.s - e.k0);
  for (long r = 0; r < rows; r++) {
    float* const to = g.d_bias + ((e.part * g.n + e.n) * g.t + e.r0 + r) * g.s + e.k0;
    for (long key = 0; key < keys; key++) {
      const float* const from = w.sums + key * ROWS;
      float total = from[r];
      for (long i = 1; g.t == 1 && i < ROWS; i++) total += from[i];
      to[key] = total;
    }
  }
}

}  // namespace

void bias_gradient(const BiasGradient& g, Pool& pool) {
  const Problem& p = g.problem;
  const long row_blocks = (g.t + ROWS - 1) / ROWS;
  const long key_blocks = p.bias.t < 0 ? 1 : (g.s + KEYS - 1) / KEYS;
  const long parts = g.batches.size();
  parallel(pool, parts * g.n * row_blocks * key_blocks, [&](long i) {
    const long block = i % key_blocks, rest = i / key_blocks, row_block = rest % row_blocks;
    const long n = rest / row_blocks % g.n;
    const Entries e{rest / row_blocks / g.n, n, row_block * ROWS, block * KEYS};
    Item w(g);
    for (const long b : g.batches[e.part]) {
      const Range heads{g.n == 1 ? 0 : n, g.n == 1 ? p.N : n + 1};
      for (long head = heads.first; head < heads.end; head++) visit_head(w, e, b, head);
    }
    write_entries(w, e);
  });
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
