// Attention on AMX: as in forward.cc, but products of blocks, and out is transposed, `h' ROWS`, since
// weights then need no transposition.
//
// Blocks of keys pass through three stages, so that tiles and vectors work at once: while the
// exponentials of one block are computed, the keys of the next are multiplied and the values of the one
// before. Source of the idea: Shah et al., "FlashAttention-3" (2024).
//
// Queries, keys and values of bfloat16 are multiplied as they are, of other types as sums of three
// bfloat16. So are exponentials, or as sums of two, of 16 significand bits, where operands are bfloat16 and no
// gradient follows: those of one would be rounded as coarsely as the output. The second may be 0, and 0
// times an infinite value is NaN: heads with keys or values out of range are computed on AVX-512. A
// query of any size changes only its own row, whose logits lose no digit that exp would see.
#include <atomic>
#include <cmath>
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

// Words of a block of keys, and of their values, where each is IN parts.
template <int IN>
long key_words(const Problem& p) { return KEY_BLOCKS * steps_of(p.H) * IN * PART_WORDS; }
template <int IN>
long value_words(const Problem& p) { return blocks_of(p.h) * KEY_STEPS * IN * PART_WORDS; }

// Blocks of the keys and values of key heads, from the first head on.
struct Packed {
  Word *keys, *values;
  long first, blocks;  // blocks: of a head
};

// Packs a block of keys of a head; keys beyond the last are 0. Returns false if one is out of range.
template <int IN>
bool pack(const Problem& p, const Packed& to, long head, long block) {
  const long bk = to.first + head, k0 = block * KEYS, h = p.h, width = blocks_of(h) * SIDE;
  const Range seen = keys_of_head(p, bk / p.K, bk % p.K);
  const long first = std::max(k0, seen.first), end = std::min(k0 + KEYS, seen.end);
  if (first >= end) return true;
  Scratch memory(KEYS * (p.H + h) + width * ROWS);
  float* const keys = memory.take(KEYS * p.H);
  float* const values = memory.take(KEYS * h);
  float* const transposed = memory.take(width * ROWS);
  std::fill(keys, keys + KEYS * p.H, 0.f);
  std::fill(values, values + KEYS * h, 0.f);
  std::fill(transposed, transposed + width * ROWS, 0.f);
  copy_keys(p, bk / p.K, bk % p.K, first, end - first, p.H, h, keys + (first - k0) * p.H,
            values + (first - k0) * h, in_range<IN>);
  const long at = head * to.blocks + block;
  pack_rows<IN>(keys, p.H, KEYS, p.H, steps_of(p.H), to.keys + at * key_words<IN>(p));
  for (long key = 0; key < KEYS; key += ROWS) {
    transpose(values + key * h, h, ROWS, h, transposed);
    pack_rows<IN>(transposed, ROWS, width, ROWS, KEY_STEPS,
              to.values + at * value_words<IN>(p) + key / STEP * IN * PART_WORDS);
  }
  return in_range<IN>(keys, KEYS * p.H) && in_range<IN>(values, KEYS * h);
}

// The scores of a panel and a block of keys, the row max before them and with them, what the latter
// leaves of earlier sums, and the words of the exponentials.
struct Block {
  float *scores, *max_before, *max_now, *alpha;
  Word* exps;
};

// A block of keys that a panel attends; steps of keys, from the first that is multiplied on.
struct Visit {
  long panel = 0, row_blocks = 0, step = 0, steps = 0;  // 0 steps: none
  const Word *keys = nullptr, *values = nullptr;
  float* row_max = nullptr;  // of all scores; null where conditions come first
  Block* block = nullptr;
};

// The memory of an item: blocks of query rows, out h' ROWS, row max and row sum of every panel.
template <int IN, int PARTS>
struct Item {
  const Forward& f;
  const Problem& p;
  long b, n, row0, rows, panels, steps, width;
  View view;
  Scratch memory;
  Word* query;
  float *out, *row_max, *row_sum, *bias, *staging, *transposed;
  uint8_t* allowed;
  Block blocks[2];
  long turn = 0;
  Visit last, last_but_one;  // visits without exponentials yet, and without their sum

  Item(const Forward& forward, long b, long n, long row0, long rows);
  long rows_of(long panel) const { return std::min(rows - panel * ROWS, ROWS); }
  Word* query_of(long panel) const { return query + panel * ROW_BLOCKS * steps * IN * PART_WORDS; }
  float* out_of(long panel) const { return out + panel * width * ROWS; }
};

template <int IN, int PARTS>
size_t floats_of(const Problem& p, long panels) {
  const long width = blocks_of(p.h) * SIDE, most = std::max({p.H, p.h, ROWS});
  return panels * (ROW_BLOCKS * steps_of(p.H) * IN * PART_WORDS + ROWS * width + 2 * ROWS) +
         2 * (ROW_BLOCKS * KEY_STEPS * PARTS * PART_WORDS + 3 * ROWS + KEYS * ROWS) + KEYS * ROWS +
         KEYS * ROWS / 4 + 2 * ROWS * most;
}

template <int IN, int PARTS>
Item<IN, PARTS>::Item(const Forward& forward, long b, long n, long row0, long rows)
    : f(forward), p(f.problem), b(b), n(n), row0(row0), rows(rows),
      panels((rows + ROWS - 1) / ROWS), steps(steps_of(p.H)), width(blocks_of(p.h) * SIDE),
      view(p, b, n), memory(floats_of<IN, PARTS>(p, panels)) {
  query = take_words(memory, panels * ROW_BLOCKS * steps * IN * PART_WORDS);
  out = memory.take(panels * ROWS * width);
  row_max = memory.take(panels * ROWS);
  row_sum = memory.take(panels * ROWS);
  for (Block& x : blocks) {
    x.scores = memory.take(KEYS * ROWS);
    x.max_before = memory.take(ROWS);
    x.max_now = memory.take(ROWS);
    x.alpha = memory.take(ROWS);
    x.exps = take_words(memory, ROW_BLOCKS * KEY_STEPS * PARTS * PART_WORDS);
  }
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
      pack_columns<IN>(transposed + i * SIDE, ROWS, p.H, query_of(panel) + i * steps * IN * PART_WORDS);
  }
}

// Exponentials of a visit, and their words, in pieces of two keys and W rows.
template <int PARTS>
class Exponentials {
 public:
  Exponentials(const Visit& visit, float* row_sum, const Exponent& exponent)
      : v_(visit), row_sum_(row_sum + visit.panel * ROWS), exponent_(exponent),
        lanes_(visit.row_blocks * (SIDE / W)) {}
  long pieces() const { return lanes_ * v_.steps * W; }
  void next() {
    const Block& block = *v_.block;
    const long r = lane_ * W, step = key_ / W, key = key_ % W;
    const float* const scores = block.scores + ((v_.step + step) * STEP + key) * ROWS + r;
    Word* const words = block.exps + (lane_ / 2 * KEY_STEPS + step) * PARTS * PART_WORDS +
                        lane_ % 2 * TILE_WORDS + key * W;
    const Vector m = load(block.max_now + r);
    const Vector x = exp(sub(load(scores), m), exponent_);
    const Vector y = exp(sub(load(scores + W * ROWS), m), exponent_);
    low_.add_next(x), high_.add_next(y);
    split_truncated<PARTS>(x, y, words);
    if (++key_ == v_.steps * W) end_lane(block, r, m);
  }

 private:
  void end_lane(const Block& block, long r, Vector m) {
    const Vector factor = exp(sub(load(block.max_before + r), m), exponent_);
    // A first 0 applies the pending correction: zeros of keys of other rows then change nothing.
    low_.add_next(set1(0.f)), high_.add_next(set1(0.f));
    store(block.alpha + r, factor);
    store(row_sum_ + r, fma(load(row_sum_ + r), factor, low_.with(high_)));
    low_ = high_ = Sum();
    key_ = 0, lane_++;
  }
  const Visit v_;
  float* const row_sum_;
  const Exponent exponent_;
  const long lanes_;
  long lane_ = 0, key_ = 0;
  Sum low_, high_;
};

// out = out * alpha + the products of values and exponentials.
template <int IN, int PARTS, class Each>
void add_values(Item<IN, PARTS>& w, const Visit& v, Each& each) {
  for (long j = 0; j < v.row_blocks; j++) {
    const Word* const exps = v.block->exps + j * KEY_STEPS * PARTS * PART_WORDS;
    const Vector alpha[] = {load(v.block->alpha + j * SIDE), load(v.block->alpha + j * SIDE + W)};
    for (long i = 0; i < w.width / SIDE; i++) {
      alignas(64) float c[SIDE * SIDE];
      multiply<IN, PARTS>(v.values + (i * KEY_STEPS + v.step) * IN * PART_WORDS, exps, v.steps, c,
                          SIDE, each);
      float* const out = w.out_of(v.panel) + i * SIDE * ROWS + j * SIDE;
      for (long x = 0; x < SIDE; x++)
        for (long tile = 0; tile < 2; tile++) {
          float* const to = out + x * ROWS + tile * W;
          store(to, fma(load(to), alpha[tile], load(c + x * SIDE + tile * W)));
        }
    }
  }
}

template <int IN, int PARTS, class Each>
void multiply_keys(Item<IN, PARTS>& w, const Visit& v, Each& each) {
  for (long i = v.step; i < v.step + v.steps; i++)
    for (long j = 0; j < v.row_blocks; j++) {
      float* const scores = v.block->scores + i * SIDE * ROWS + j * SIDE;
      multiply<IN, IN>(v.keys + i * w.steps * IN * PART_WORDS,
                       w.query_of(v.panel) + j * w.steps * IN * PART_WORDS, w.steps, scores, ROWS, each);
      if (v.row_max) update_row_max(SIDE, SIDE / W, scores, v.row_max + j * SIDE);
    }
}

// Multiplies the keys of the next visit, and the values of the last but one, while the exponentials of
// the last are computed.
template <int IN, int PARTS>
void advance(Item<IN, PARTS>& w, const Visit& next) {
  const auto products = [&](const Visit& v, long steps, int b) {
    return v.steps * v.row_blocks * steps * products_of(IN, b);
  };
  Exponentials<PARTS> exps(w.last, w.row_sum, Exponent(w.p.exponent()));
  Between<Exponentials<PARTS>> each(
      exps, products(next, w.steps, IN) + products(w.last_but_one, w.width / SIDE, PARTS));
  multiply_keys(w, next, each);
  add_values(w, w.last_but_one, each);
  each.rest();
  w.last_but_one = w.last, w.last = next;
}

// One block of keys, seen by one panel of rows.
template <int IN, int PARTS>
void visit(Item<IN, PARTS>& w, long panel, long k0, long count, const Word* keys, const Word* values) {
  const Problem& p = w.p;
  const long r0 = w.row0 + panel * ROWS, here = w.rows_of(panel);
  const Range part = w.view.attended_part(r0, here, k0, count);
  if (part.empty()) return;
  const long first = part.first - k0, end = part.end - k0, some = end - first;
  const Tile kind = w.view.tile(r0, here, k0 + first, some, w.allowed, w.bias);
  if (kind == Tile::masked) return;
  Block& block = w.blocks[w.turn ^= 1];
  const long step = first / STEP, steps = steps_of(end) - step, row_blocks = blocks_of(here);
  float* const row_max = w.row_max + panel * ROWS;
  std::copy(row_max, row_max + ROWS, block.max_before);
  const bool whole = kind == Tile::clear && first % STEP == 0 && end % STEP == 0;
  advance(w, {panel, row_blocks, step, steps, keys, values, whole ? row_max : nullptr, &block});
  const long lanes = row_blocks * (SIDE / W);
  float* const scores = block.scores + first * ROWS;
  if (kind != Tile::clear) {
    const float* const bias = w.view.has_bias() ? w.bias : nullptr;
    const float rest = p.whole_logits() ? p.rest : 1.f;
    apply_conditions({some, lanes, scores, w.allowed, bias, rest, p.soft_cap});
  }
  if (!whole) update_row_max(some, lanes, scores, row_max);
  std::copy(row_max, row_max + ROWS, block.max_now);
  // The exponentials of other keys of these steps are 0.
  std::fill(block.scores + step * STEP * ROWS, scores, -INFINITY);
  std::fill(block.scores + end * ROWS, block.scores + (step + steps) * STEP * ROWS, -INFINITY);
}

template <int IN, int PARTS>
void finish(Item<IN, PARTS>& w, long panel) {
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

template <int IN, int PARTS>
void attend_rows(const Forward& f, const Packed& packed, long b, long n, long row0, long rows) {
  Item<IN, PARTS> w(f, b, n, row0, rows);
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
              packed.keys + (first + block) * key_words<IN>(p),
              packed.values + (first + block) * value_words<IN>(p));
      k = next(k0 + KEYS);
    }
    for (int i = 0; i < 2; i++) advance(w, {});
  }
  for (long panel = 0; panel < w.panels; panel++) finish(w, panel);
}

template <int IN, int PARTS>
void attend_in_parts(const Forward& f, Pool& pool) {
  const Problem& p = f.problem;
  const long size = rows_of_item(p, pool.threads()), heads = p.B * p.K;
  const long blocks = (p.S + KEYS - 1) / KEYS;
  const long of_head = blocks * (key_words<IN>(p) + value_words<IN>(p));
  const long most = heads_at_once(p, of_head, size, pool.threads());
  Scratch memory(most * of_head);
  Word* const keys = take_words(memory, most * blocks * key_words<IN>(p));
  Packed packed{keys, take_words(memory, most * blocks * value_words<IN>(p)), 0, blocks};
  std::vector<std::atomic<bool>> out_of_range(heads);
  for (; packed.first < heads; packed.first += most) {
    const long end = std::min(heads, packed.first + most);
    parallel(pool, (end - packed.first) * blocks, [&](long i) {
      if (!pack<IN>(p, packed, i / blocks, i % blocks)) out_of_range[packed.first + i / blocks] = true;
    });
    for_rows(p, packed.first, end, size, pool, [&](long b, long n, long row0, long rows) {
      if (out_of_range[b * p.K + n / p.group()]) return avx512::attend_rows(f, b, n, row0, rows);
      attend_rows<IN, PARTS>(f, packed, b, n, row0, rows);
    });
  }
}

}  // namespace

void attend(const Forward& f, Pool& pool) {
  switch (parts_of(f.problem, f.gradient)) {
    case 1: return f.gradient ? attend_in_parts<1, 3>(f, pool) : attend_in_parts<1, 2>(f, pool);
    case 3: return attend_in_parts<3, 3>(f, pool);
    default: return avx512::attend(f, pool);
  }
}

}  // namespace amx
}  // namespace jaxmha
