// Attention by online softmax over blocks of keys. Source: Dao et al., "FlashAttention" (2022).
#include "forward.h"

#include <cmath>

#include "few_rows.h"
#include "keys.h"
#include "kernels.h"
#include "scores.h"
#include "scratch.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr long KEYS = 96;   // of a block
constexpr long CHUNK = 256;  // keys of an item of packing

// The part of a block that a panel reads begins at a multiple of so many keys: sums of a row must not
// depend on the other rows of its panel, which follow from the number of threads.
constexpr long BEGIN = 16;

// Copies of keys `S H` and values `S h'` of the heads from `first` on; null: every item copies the
// blocks that it reads.
struct Packed {
  float *keys = nullptr, *values = nullptr;
  long first = 0;
};

// The memory of an item: query H ROWS, out ROWS h', row max, row sum of every panel, and a tile.
struct Item {
  const Forward& f;
  const Problem& p;
  long b, n, row0, rows, panels, width;
  View view;
  Scratch memory;
  float *query, *out, *row_max, *row_sum, *now, *alpha, *scores, *bias, *keys, *values, *staging;
  uint8_t* allowed;

  Item(const Forward& forward, long b, long n, long row0, long rows);
  long rows_of(long panel) const { return std::min(rows - panel * ROWS, ROWS); }
};

size_t floats_of(const Problem& p, long panels, long width) {
  return panels * (p.H * ROWS + ROWS * width + 2 * ROWS) + 2 * ROWS + 2 * KEYS * ROWS +
         KEYS * (p.H + width + 32) + ROWS * std::max(p.H, p.h) + KEYS * ROWS / 4 + 16 * 16;
}

Item::Item(const Forward& forward, long b, long n, long row0, long rows)
    : f(forward), p(f.problem), b(b), n(n), row0(row0), rows(rows),
      panels((rows + ROWS - 1) / ROWS), width(padded(p.h)), view(p, b, n),
      memory(floats_of(p, panels, width)) {
  query = memory.take(panels * p.H * ROWS);
  out = memory.take(panels * ROWS * width);
  row_max = memory.take(panels * ROWS);
  row_sum = memory.take(panels * ROWS);
  now = memory.take(ROWS);
  alpha = memory.take(ROWS);
  scores = memory.take(KEYS * ROWS);
  bias = memory.take(KEYS * ROWS);
  keys = memory.take(KEYS * p.H);
  values = memory.take(KEYS * width);
  staging = memory.take(ROWS * std::max(p.H, p.h));
  allowed = reinterpret_cast<uint8_t*>(memory.take(KEYS * ROWS / 4));
  std::fill(out, out + panels * ROWS * width, 0.f);
  std::fill(row_max, row_max + panels * ROWS, LOWEST);
  std::fill(row_sum, row_sum + panels * ROWS, 0.f);
  for (long panel = 0; panel < panels; panel++) {
    read_queries(p, b, n, row0 + panel * ROWS, rows_of(panel), staging);
    transpose(staging, p.H, rows_of(panel), p.H, query + panel * p.H * ROWS);
  }
}

// One block of keys, seen by one panel of rows.
void visit(Item& w, long panel, long k0, long count, const float* keys, const float* values) {
  const Problem& p = w.p;
  const long r0 = w.row0 + panel * ROWS, here = w.rows_of(panel), lanes = (here + W - 1) / W;
  const Range part = w.view.attended_part(r0, here, k0, count);
  if (part.empty()) return;
  const long skipped = (part.first - k0) / BEGIN * BEGIN;
  k0 += skipped, count = part.end - k0;
  keys += skipped * p.H, values += skipped * w.width;
  const Tile kind = w.view.tile(r0, here, k0, count, w.allowed, w.bias);
  if (kind == Tile::masked) return;
  const float* const query = w.query + panel * p.H * ROWS;
  float* const row_max = w.row_max + panel * ROWS;
  std::copy(row_max, row_max + ROWS, w.now);
  const bool clear = kind == Tile::clear;
  short_products(count, lanes, p.H, p.terms(), keys, p.H, query, w.scores,
                 clear ? w.now : nullptr);
  if (!clear) {
    const float* const bias = w.view.has_bias() ? w.bias : nullptr;
    const float rest = p.whole_logits() ? p.rest : 1.f;
    apply_conditions({count, lanes, w.scores, w.allowed, bias, rest, p.soft_cap});
    update_row_max(count, lanes, w.scores, w.now);
  }
  exponentials(count, lanes, Exponent(p.exponent()), w.scores, row_max, w.now, w.alpha,
               w.row_sum + panel * ROWS);
  std::copy(w.now, w.now + ROWS, row_max);
  // The sum of a block first, then that of blocks: rounding grows with the length of a chain.
  const long terms = p.exact() ? 4 : p.few_scores() ? 16 : KEYS;
  float* const out = w.out + panel * ROWS * w.width;
  product<Into::rescaled>(here, w.width / W, std::min(terms, count), {w.scores, 1, ROWS}, values,
                          w.width, out, w.width, w.alpha);
  for (long k = terms; k < count; k += terms)
    product<Into::added>(here, w.width / W, std::min(terms, count - k),
                         {w.scores + k * ROWS, 1, ROWS}, values + k * w.width, w.width, out,
                         w.width);
}

void finish(Item& w) {
  for (long r = 0; r < w.rows; r++)
    write_attended(w.f, w.view, w.b, w.n, w.row0 + r, w.row_max[r], w.row_sum[r],
                   w.out + r * w.width);
}

void attend_rows(const Forward& f, const Packed& packed, long b, long n, long row0, long rows) {
  Item w(f, b, n, row0, rows);
  const Problem& p = w.p;
  const long kv = n / p.group(), head = b * p.K + kv - packed.first;
  const Range all = w.view.keys_of(row0, rows);
  const auto next = [&](long k) { return w.view.next_key(row0, rows, k, all.end); };
  for (long k = next(all.first); k < all.end;) {
    const long k0 = k / KEYS * KEYS, count = std::min(KEYS, all.end - k0);
    k = next(k0 + count);
    const float *keys = w.keys, *values = w.values;
    if (packed.keys) {
      keys = packed.keys + (head * p.S + k0) * p.H;
      values = packed.values + (head * p.S + k0) * w.width;
    } else {
      copy_keys(p, b, kv, k0, count, p.H, w.width, w.keys, w.values);
    }
    for (long panel = 0; panel < w.panels; panel++) visit(w, panel, k0, count, keys, values);
  }
  finish(w);
}

// Key heads from the first packed one to `end`.
void attend_heads(const Forward& f, const Packed& packed, long end, long size, Pool& pool) {
  for_rows(f.problem, packed.first, end, size, pool, [&](long b, long n, long row0, long rows) {
    attend_rows(f, packed, b, n, row0, rows);
  });
}

}  // namespace

void attend_rows(const Forward& f, long b, long n, long row0, long rows) {
  attend_rows(f, {}, b, n, row0, rows);
}

void read_queries(const Problem& p, long b, long n, long row0, long rows, float* to) {
  for (long r = 0; r < rows; r++, to += p.H) {
    read_row(p.query.at(b, row0 + r, n), p.query.type, p.H, to);
    for (long x = 0; x < p.H; x++) to[x] *= p.scale;
  }
}

void for_rows(const Problem& p, long first, long end, long size, Pool& pool,
              const std::function<void(long, long, long, long)>& body) {
  const long blocks = (p.T + size - 1) / size, heads = (end - first) * p.group();
  // Later rows attend more keys under a causal mask: the longest items first.
  const bool by_block = p.conditions.above < FAR || p.conditions.offset;
  parallel(pool, heads * blocks, [&](long i) {
    const long block = by_block ? blocks - 1 - i / heads : i % blocks;
    const long bn = first * p.group() + (by_block ? i % heads : i / blocks);
    const long row0 = block * size;
    body(bn / p.N, bn % p.N, row0, std::min(size, p.T - row0));
  });
}

void write_attended(const Forward& f, const View& view, long b, long n, long row, float row_max,
                    float row_sum, float* weighted) {
  const Problem& p = f.problem;
  const bool valid = view.valid_row(row);
  const float total = valid ? row_sum : 0.f, divisor = total == 0.f ? 1.f : total;
  for (long x = 0; x < p.h; x++) weighted[x] = valid ? weighted[x] / divisor : 0.f;
  write_row(weighted, f.out.type, p.h, f.out.at(b, row, n));
  const long at = (b * p.N + n) * p.T + row;
  f.row_max[at] = total == 0.f ? LOWEST : row_max;
  f.row_sum[at] = total;
}

long heads_at_once(const Problem& p, long floats_of_head, long size, long threads) {
  const long items = p.group() * ((p.T + size - 1) / size);
  const long fit = MOST_PACKED / floats_of_head;
  const long wanted = std::max(fit, std::min(4 * fit, threads / items));
  return std::max(1l, std::min(p.B * p.K, wanted));
}

void attend(const Forward& f, Pool& pool) {
  const Problem& p = f.problem;
  if (are_few_rows(f)) return attend_few_rows(f, pool);
  const long size = rows_of_item(p, pool.threads()), width = padded(p.h), heads = p.B * p.K;
  const long of_head = p.S * (p.H + width) + 32;
  const bool read_once = p.group() * ((p.T + size - 1) / size) == 1;
  if (read_once || of_head > MOST_PACKED) return attend_heads(f, {}, heads, size, pool);
  const long most = heads_at_once(p, of_head, size, pool.threads());
  Scratch memory(most * of_head);
  Packed packed{memory.take(most * p.S * p.H), memory.take(most * p.S * width), 0};
  const long chunks = (p.S + CHUNK - 1) / CHUNK;
  for (; packed.first < heads; packed.first += most) {
    const long end = std::min(heads, packed.first + most);
    parallel(pool, (end - packed.first) * chunks, [&](long i) {
      const long head = i / chunks, bk = packed.first + head;
      const Range seen = keys_of_head(p, bk / p.K, bk % p.K);
      const long k0 = std::max(seen.first / BEGIN * BEGIN, i % chunks * CHUNK);
      copy_keys(p, bk / p.K, bk % p.K, k0, std::min(seen.end, (i % chunks + 1) * CHUNK) - k0, p.H,
                width, packed.keys + (head * p.S + k0) * p.H,
                packed.values + (head * p.S + k0) * width);
    });
    attend_heads(f, packed, end, size, pool);
  }
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
