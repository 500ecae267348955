// Attention of bfloat16 on AMX: as in forward.cc, but products of blocks, and out is transposed,
// `h' ROWS`, since weights then need no transposition.
//
// Queries, keys and values are multiplied as they are. Exponentials are sums of two bfloat16, of 16
// digits: those of one would be rounded as coarsely as the output. The second may be 0, and 0 times an
// infinite value is NaN: heads with keys or values that are not finite are computed in float32.
#include <atomic>
#include <vector>

#include "amx_tiles.h"
#include "forward.h"
#include "keys.h"
#include "kernels.h"
#include "scores.h"
#include "scratch.h"

namespace jaxmha {
namespace amx {
namespace {

constexpr long KEYS = 128;  // of a block
constexpr long KEY_STEPS = KEYS / STEP, KEY_BLOCKS = KEYS / SIDE, ROW_BLOCKS = ROWS / SIDE;
// Parts of an exponential; before a gradient, whose delta is a difference of nearly equal sums, all.
constexpr int PARTS = 2, ALL_PARTS = 3;

// Words of a block of keys, and of their values.
size_t key_words(const Problem& p) { return KEY_BLOCKS * steps_of(p.H) * PART_WORDS; }
size_t value_words(const Problem& p) { return blocks_of(p.h) * KEY_STEPS * PART_WORDS; }

// Blocks of the keys and values of key heads, from the first head on.
struct Packed {
  Word *keys, *values;
  long first, blocks;  // blocks: of a head
};

// Packs a block of keys of a head; keys beyond the last are 0. Returns false if one is not finite.
bool pack(const Problem& p, const Packed& to, long head, long block) {
  const long bk = to.first + head, k0 = block * KEYS, h = p.h, width = blocks_of(h) * SIDE;
  const Range seen = keys_of_head(p, bk / p.K, bk % p.K);
  const long first = std::max(k0, seen.first), end = std::min(k0 + KEYS, seen.end);
  if (first >= end) return true;
  Scratch memory(KEYS * (p.H + h) + width * ROWS + 3 * W);
  float* const keys = memory.take(KEYS * p.H);
  float* const values = memory.take(KEYS * h);
  float* const transposed = memory.take(width * ROWS);
  std::fill(keys, keys + KEYS * p.H, 0.f);
  std::fill(values, values + KEYS * h, 0.f);
  std::fill(transposed, transposed + width * ROWS, 0.f);
  copy_keys(p, bk / p.K, bk % p.K, first, end - first, p.H, h, keys + (first - k0) * p.H,
            values + (first - k0) * h);
  const long at = head * to.blocks + block;
  pack_rows<1>(keys, p.H, KEYS, p.H, steps_of(p.H), to.keys + at * key_words(p));
  for (long key = 0; key < KEYS; key += ROWS) {
    transpose(values + key * h, h, ROWS, h, transposed);
    pack_rows<1>(transposed, ROWS, width, ROWS, KEY_STEPS,
              to.values + at * value_words(p) + key / STEP * PART_WORDS);
  }
  return all_finite(keys, KEYS * p.H) && all_finite(values, KEYS * h);
}

// The memory of an item: blocks of query rows, out h' ROWS, row max and row sum of every panel.
struct Item {
  const Forward& f;
  const Problem& p;
  long b, n, row0, rows, panels, steps, width;
  View view;
  Scratch memory;
  Word *query, *weights;  // weights: of SIDE rows
  float *out, *row_max, *row_sum, *now, *alpha, *scores, *bias, *staging, *transposed;
  uint8_t* allowed;

  Item(const Forward& forward, long b, long n, long row0, long rows);
  long rows_of(long panel) const { return std::min(rows - panel * ROWS, ROWS); }
  Word* query_of(long panel) const { return query + panel * ROW_BLOCKS * steps * PART_WORDS; }
  float* out_of(long panel) const { return out + panel * width * ROWS; }
};

size_t floats_of(const Problem& p, long panels) {
  const long width = blocks_of(p.h) * SIDE, most = std::max({p.H, p.h, ROWS});
  return panels * (ROW_BLOCKS * steps_of(p.H) * PART_WORDS + ROWS * width + 2 * ROWS) +
         KEY_STEPS * ALL_PARTS * PART_WORDS + 2 * ROWS + 2 * KEYS * ROWS + KEYS * ROWS / 4 +
         2 * ROWS * most + 10 * W;
}

Item::Item(const Forward& forward, long b, long n, long row0, long rows)
    : f(forward), p(f.problem), b(b), n(n), row0(row0), rows(rows),
      panels((rows + ROWS - 1) / ROWS), steps(steps_of(p.H)), width(blocks_of(p.h) * SIDE),
      view(p, b, n), memory(floats_of(p, panels)) {
  query = take_words(memory, panels * ROW_BLOCKS * steps * PART_WORDS);
  weights = take_words(memory, KEY_STEPS * ALL_PARTS * PART_WORDS);
  out = memory.take(panels * ROWS * width);
  row_max = memory.take(panels * ROWS);
  row_sum = memory.take(panels * ROWS);
  now = memory.take(ROWS);
  alpha = memory.take(ROWS);
  scores = memory.take(KEYS * ROWS);
  bias = memory.take(KEYS * ROWS);
  allowed = reinterpret_cast<uint8_t*>(memory.take(KEYS * ROWS / 4));
  const long most = std::max({p.H, p.h, ROWS});
  staging = memory.take(ROWS * most);
  transposed = memory.take(ROWS * most);
  std::fill(out, out + panels * ROWS * width, 0.f);
  std::fill(row_max, row_max + panels * ROWS, LOWEST);
  std::fill(row_sum, row_sum + panels * ROWS, 0.f);
  for (long panel = 0; panel < panels; panel++) {
    read_queries(p, b, n, row0 + panel * ROWS, rows_of(panel), staging);
    transpose(staging, p.H, rows_of(panel), p.H, transposed);
    for (long i = 0; i < ROW_BLOCKS; i++)
      pack_columns<1>(transposed + i * SIDE, ROWS, p.H, query_of(panel) + i * steps * PART_WORDS);
  }
}

// out = out * alpha + the products of values and exponentials of some steps of keys.
template <int PARTS>
void add_values(Item& w, long panel, long row_blocks, long step, long steps, const Word* values) {
  for (long j = 0; j < row_blocks; j++) {
    pack_columns<PARTS>(w.scores + step * STEP * ROWS + j * SIDE, ROWS, steps * STEP, w.weights);
    const Vector alpha[] = {load(w.alpha + j * SIDE), load(w.alpha + j * SIDE + W)};
    for (long i = 0; i < w.width / SIDE; i++) {
      alignas(64) float c[SIDE * SIDE];
      multiply<1, PARTS>(values + (i * KEY_STEPS + step) * PART_WORDS, w.weights, steps, c, SIDE);
      float* const out = w.out_of(panel) + i * SIDE * ROWS + j * SIDE;
      for (long x = 0; x < SIDE; x++)
        for (long tile = 0; tile < 2; tile++) {
          float* const to = out + x * ROWS + tile * W;
          store(to, fma(load(to), alpha[tile], load(c + x * SIDE + tile * W)));
        }
    }
  }
}

// One block of keys, seen by one panel of rows.
void visit(Item& w, long panel, long k0, long count, const Word* keys, const Word* values) {
  const Problem& p = w.p;
  const long r0 = w.row0 + panel * ROWS, here = w.rows_of(panel), lanes = (here + W - 1) / W;
  const Range part = w.view.attended_part(r0, here, k0, count);
  if (part.empty()) return;
  const long first = (part.first - k0) / BEGIN * BEGIN, end = part.end - k0, some = end - first;
  const Tile kind = w.view.tile(r0, here, k0 + first, some, w.allowed, w.bias);
  if (kind == Tile::masked) return;
  const long row_blocks = blocks_of(here), step = first / STEP, steps = steps_of(end) - step;
  for (long i = step; i < step + steps; i++)
    for (long j = 0; j < row_blocks; j++)
      multiply<1, 1>(keys + i * w.steps * PART_WORDS,
                     w.query_of(panel) + j * w.steps * PART_WORDS, w.steps,
                     w.scores + i * SIDE * ROWS + j * SIDE, ROWS);
  float *const row_max = w.row_max + panel * ROWS, *const scores = w.scores + first * ROWS;
  if (kind != Tile::clear) {
    const float* const bias = w.view.has_bias() ? w.bias : nullptr;
    const float rest = p.whole_logits() ? p.rest : 1.f;
    apply_conditions({some, lanes, scores, w.allowed, bias, rest, p.soft_cap});
  }
  std::copy(row_max, row_max + ROWS, w.now);
  update_row_max(some, lanes, scores, w.now);
  exponentials(some, lanes, Exponent(p.exponent()), scores, row_max, w.now, w.alpha,
               w.row_sum + panel * ROWS);
  std::copy(w.now, w.now + ROWS, row_max);
  // Keys of these steps that are not of the part have no weight.
  std::fill(w.scores + step * STEP * ROWS, scores, 0.f);
  std::fill(w.scores + end * ROWS, w.scores + (step + steps) * STEP * ROWS, 0.f);
  if (w.f.gradient)
    add_values<ALL_PARTS>(w, panel, row_blocks, step, steps, values);
  else
    add_values<PARTS>(w, panel, row_blocks, step, steps, values);
}

void finish(Item& w, long panel) {
  const long h = w.p.h, rows = w.rows_of(panel);
  for (long x = 0; x < h; x += ROWS) {
    const long count = std::min(ROWS, h - x);
    transpose(w.out_of(panel) + x * ROWS, ROWS, count, rows, w.transposed);
    for (long r = 0; r < rows; r++)
      std::copy(w.transposed + r * ROWS, w.transposed + r * ROWS + count, w.staging + r * h + x);
  }
  for (long r = 0; r < rows; r++) {
    const long row = panel * ROWS + r;
    write_attended(w.f, w.view, w.b, w.n, w.row0 + row, w.row_max[row], w.row_sum[row],
                   w.staging + r * h);
  }
}

void attend_rows(const Forward& f, const Packed& packed, long b, long n, long row0, long rows) {
  Item w(f, b, n, row0, rows);
  const Problem& p = w.p;
  const long first = (b * p.K + n / p.group() - packed.first) * packed.blocks;
  const Range all = w.view.keys_of(row0, rows);
  const auto next = [&](long k) { return w.view.next_key(row0, rows, k, all.end); };
  {
    const Tiles tiles;
    for (long k = next(all.first); k < all.end;) {
      const long block = k / KEYS, k0 = block * KEYS;
      for (long panel = 0; panel < w.panels; panel++)
        visit(w, panel, k0, std::min(KEYS, all.end - k0),
              packed.keys + (first + block) * key_words(p),
              packed.values + (first + block) * value_words(p));
      k = next(k0 + KEYS);
    }
  }
  for (long panel = 0; panel < w.panels; panel++) finish(w, panel);
}

}  // namespace

void attend(const Forward& f, Pool& pool) {
  if (!suits(f.problem, f.gradient)) return avx512::attend(f, pool);
  const Problem& p = f.problem;
  const long size = rows_of_item(p, pool.threads()), heads = p.B * p.K;
  const long blocks = (p.S + KEYS - 1) / KEYS;
  const size_t of_head = blocks * (key_words(p) + value_words(p));
  // As many heads as fit, or more where they have too few items.
  const long items = p.group() * ((p.T + size - 1) / size), fit = MOST_PACKED / sizeof(Word) / of_head;
  const long wanted = std::max(fit, std::min(4 * fit, pool.threads() / items));
  const long most = std::max(1l, std::min(heads, wanted));
  Scratch memory(most * of_head);
  Word* const keys = take_words(memory, most * blocks * key_words(p));
  Packed packed{keys, take_words(memory, most * blocks * value_words(p)), 0, blocks};
  std::vector<std::atomic<bool>> not_finite(heads);
  for (; packed.first < heads; packed.first += most) {
    const long end = std::min(heads, packed.first + most);
    parallel(pool, (end - packed.first) * blocks, [&](long i) {
      if (!pack(p, packed, i / blocks, i % blocks)) not_finite[packed.first + i / blocks] = true;
    });
    for_rows(p, packed.first, end, size, pool, [&](long b, long n, long row0, long rows) {
      if (not_finite[b * p.K + n / p.group()]) return avx512::attend_rows(f, b, n, row0, rows);
      attend_rows(f, packed, b, n, row0, rows);
    });
  }
}

}  // namespace amx
}  // namespace jaxmha
