// Gradients of attention on AMX. Queries, keys, values and cotangents of bfloat16 are multiplied as they
// are, weights and gradients of logits then as sums of two bfloat16; all else as sums of three. Delta is
// always the row sum of out * d_out.
//
// Blocks of keys pass through three stages, as in amx_forward.cc: while the weights of one block are
// computed, the logits of the next are multiplied and the gradients of the one before.
#include <cmath>
#include <vector>

#include "amx_gradient.h"
#include "kernels.h"
#include "scores.h"

namespace jaxmha {
namespace amx {
namespace {

constexpr long KEYS = 64;  // of a block
constexpr long KEY_STEPS = KEYS / STEP, KEY_BLOCKS = KEYS / SIDE;
constexpr long MOST_PANELS = (2l << 20) / 4;  // floats of the panels that are in memory at a time

// Parts (bfloat16) of each weight and gradient of a logit, if each operand has IN parts.
template <int IN>
constexpr int PARTS = IN == 1 ? 2 : 3;

// Logits and cotangents of weights `KEYS ROWS`, and the words of weights and of gradients of logits:
// blocks of rows, which are keys, and blocks of columns, which are query rows.
struct Block {
  float *logits, *d_weights, *cap_gradient;
  Word *weight_rows, *d_logit_rows, *d_logit_columns;
};

// Blocks of SIDE keys that a panel attends; `of_chunk`: the first of them, in its chunk.
struct Visit {
  long k0 = 0, of_chunk = 0, blocks = 0;  // 0 blocks: none
  const Panel* panel = nullptr;
  Block* block = nullptr;
};

// The memory of an item.
template <int IN>
struct Item : Operands<IN> {
  const Sizes& sizes;
  Block blocks[2];
  float *d_keys, *d_values;
  uint8_t* allowed;
  long turn = 0;
  Visit last, last_but_one;  // visits without weights yet, and without gradients

  Item(const Backward& g, const Sizes& sizes, long head, long panels, float* sums);
};

template <int IN>
constexpr long WORDS = KEY_BLOCKS * ROW_STEPS * PARTS<IN> * PART_WORDS;

template <int IN>
constexpr long OF_BLOCKS = 2 * (3 * KEYS * ROWS + 3 * WORDS<IN>) + KEYS * ROWS / 4;  // floats

template <int IN>
Item<IN>::Item(const Backward& g, const Sizes& s, long head, long panels, float* sums)
    : Operands<IN>(g, head, panels, OF_BLOCKS<IN>), sizes(s), d_keys(sums),
      d_values(sums + g.problem.S * s.H) {
  for (Block& x : blocks) {
    x.logits = this->memory.take(KEYS * ROWS);
    x.d_weights = this->memory.take(KEYS * ROWS);
    x.cap_gradient = this->memory.take(KEYS * ROWS);
    x.weight_rows = take_words(this->memory, WORDS<IN>);
    x.d_logit_rows = take_words(this->memory, WORDS<IN>);
    x.d_logit_columns = take_words(this->memory, WORDS<IN>);
  }
  allowed = reinterpret_cast<uint8_t*>(this->memory.take(KEYS * ROWS / 4));
  const auto [first, end] = this->attended;
  if (this->attended.empty()) return;
  std::fill(d_keys + first * s.H, d_keys + end * s.H, 0.f);
  std::fill(d_values + first * s.h, d_values + end * s.h, 0.f);
}

// Weights of a visit and gradients of its logits, in words, in pieces of two keys and SIDE rows. A
// weight of 0 has gradient 0, whatever its cotangent; rows that attend nothing have weights of 0.
template <int PARTS>
class Weights {
 public:
  Weights(const Visit& visit, const Exponent& exponent, bool capped)
      : v_(visit), exponent_(exponent), capped_(capped) {}
  long pieces() const { return v_.blocks * ROW_BLOCKS * W; }
  void next() {
    const long r = at_ % W, j = at_ / W % ROW_BLOCKS, i = at_ / W / ROW_BLOCKS;
    at_++;
    Vector x[2][2], y[2][2];  // keys r and r + W; two tiles of rows
    for (long tile = 0; tile < 2; tile++)
      for (long key = 0; key < 2; key++)
        differentiate((i * SIDE + key * W + r) * ROWS, j * SIDE + tile * W, x[key][tile], y[key][tile]);
    const Block& block = *v_.block;
    const long rows = (i * ROW_STEPS + j) * PARTS * PART_WORDS + r * W;
    const long columns = (j * KEY_STEPS + i) * PARTS * PART_WORDS + r * W;
    for (long key = 0; key < 2; key++) {
      split_truncated<PARTS>(x[key][0], x[key][1], block.weight_rows + rows + key * TILE_WORDS);
      split_truncated<PARTS>(y[key][0], y[key][1], block.d_logit_rows + rows + key * TILE_WORDS);
      split_truncated<PARTS>(y[0][key], y[1][key], block.d_logit_columns + columns + key * TILE_WORDS);
    }
  }

 private:
  inline __attribute__((always_inline)) void differentiate(long key, long row, Vector& weight,
                                                           Vector& d_logit) const {
    const Panel& panel = *v_.panel;
    const Block& block = *v_.block;
    const Vector below = sub(load(block.logits + key + row), load(panel.row_max + row));
    weight = mul(exp(below, exponent_), load(panel.inverse + row));
    d_logit = mul(weight, sub(load(block.d_weights + key + row), load(panel.delta + row)));
    if (capped_) d_logit = mul(d_logit, load(block.cap_gradient + key + row));
    d_logit = select(is_zero(weight), set1(0.f), d_logit);
  }
  const Visit v_;
  const Exponent exponent_;
  const bool capped_;
  long at_ = 0;
};

// to[keys x ROWS] = the products of blocks of keys or values and of a panel over features.
template <int IN, class Each>
void multiply_features(const Visit& v, const Word* keys, const Word* panel, long features, float* to,
                       Each& each) {
  const long steps = steps_of(features), words = steps * IN * PART_WORDS;
  for (long i = 0; i < v.blocks; i++)
    for (long j = 0; j < ROW_BLOCKS; j++)
      multiply<IN, IN>(keys + (v.of_chunk + i) * words, panel + j * words, steps,
                       to + i * SIDE * ROWS + j * SIDE, ROWS, each);
}

// to[keys x width] += the products of words of a visit and of a panel over query rows, times a power of
// two.
template <int IN, class Each>
void add_over_rows(const Item<IN>& w, const Visit& v, const Word* rows, const Word* panel, float exponent,
                   long width, float* to, Each& each) {
  const Vector power = set1(exponent);
  for (long i = 0; i < v.blocks; i++, rows += ROW_STEPS * PARTS<IN> * PART_WORDS) {
    const long key = v.k0 + i * SIDE, keys = std::min(SIDE, w.p.S - key);
    for (long x = 0; x < width; x += SIDE) {
      alignas(64) float c[SIDE * SIDE];
      multiply<PARTS<IN>, IN>(rows, panel + x / SIDE * ROW_STEPS * IN * PART_WORDS, ROW_STEPS, c, SIDE,
                              each);
      for (long k = 0; k < keys; k++)
        for (long tile = 0; tile < std::min(SIDE, width - x); tile += W) {
          float* const at = to + (key + k) * width + x + tile;
          store(at, add(load(at), _mm512_scalef_ps(load(c + k * SIDE + tile), power)));
        }
    }
  }
}

// The gradient of queries, transposed, += the products of keys and gradients of logits.
template <int IN, class Each>
void add_over_keys(const Item<IN>& w, const Visit& v, Each& each) {
  for (long j = 0; j < ROW_BLOCKS; j++)
    for (long x = 0; x < blocks_of(w.H); x++) {
      alignas(64) float c[SIDE * SIDE];
      const Word* const keys = w.keys_over_keys + (x * CHUNK_STEPS + v.of_chunk) * IN * PART_WORDS;
      const Word* const columns = v.block->d_logit_columns + j * KEY_STEPS * PARTS<IN> * PART_WORDS;
      multiply<IN, PARTS<IN>>(keys, columns, v.blocks, c, SIDE, each);
      float* const to = v.panel->d_query + x * SIDE * ROWS + j * SIDE;
      for (long i = 0; i < SIDE; i++)
        for (long tile = 0; tile < SIDE; tile += W)
          store(to + i * ROWS + tile, add(load(to + i * ROWS + tile), load(c + i * SIDE + tile)));
    }
}

// Multiplies the features of the next visit, and the gradients of the last but one, while the weights of
// the last are computed.
template <int IN>
void advance(Item<IN>& w, const Visit& next) {
  const long H = blocks_of(w.H), h = blocks_of(w.h);
  const long of_next = next.blocks * (H + h) * products_of(IN, IN);
  const long of_last = w.last_but_one.blocks * (2 * H + h) * products_of(PARTS<IN>, IN);
  Weights<PARTS<IN>> weights(w.last, Exponent(w.p.exponent()), w.p.soft_cap != 0.f);
  Between<Weights<PARTS<IN>>> each(weights, ROW_BLOCKS * (of_next + of_last));
  if (next.blocks) {
    multiply_features<IN>(next, w.keys, next.panel->query, w.H, next.block->logits, each);
    multiply_features<IN>(next, w.values, next.panel->d_out, w.h, next.block->d_weights, each);
  }
  if (const Visit& v = w.last_but_one; v.blocks) {
    const Panel& p = *v.panel;
    add_over_rows(w, v, v.block->weight_rows, p.d_out_rows, p.d_out_exponent, w.sizes.h, w.d_values,
                  each);
    add_over_rows(w, v, v.block->d_logit_rows, p.query_rows, p.query_exponent + p.d_out_exponent,
                  w.sizes.H, w.d_keys, each);
    add_over_keys(w, v, each);
  }
  each.rest();
  w.last_but_one = w.last, w.last = next;
}

// One block of at most KEYS keys from k0 on, of a chunk that begins at `chunk`, seen by a panel.
template <int IN>
void visit_block(Item<IN>& w, const Panel& panel, const View& view, long chunk, long k0, long end) {
  const Problem& p = w.p;
  const Range part = view.attended_part(panel.r0, panel.rows, k0, end - k0);
  if (part.empty()) return;
  const long from = k0 + (part.first - k0) / SIDE * SIDE, first = part.first - from;
  const long count = part.end - part.first, blocks = blocks_of(first + count);
  const Tile kind = view.tile(panel.r0, panel.rows, part.first, count, w.allowed, nullptr);
  if (kind == Tile::masked) return;
  Block& block = w.blocks[w.turn ^= 1];
  advance(w, {from, (from - chunk) / SIDE, blocks, &panel, &block});
  float* const logits = block.logits + first * ROWS;
  if (kind != Tile::clear)
    apply_conditions({count, ROWS / W, logits, w.allowed, nullptr, p.whole_logits() ? p.rest : 1.f,
                      p.soft_cap, p.soft_cap != 0.f ? block.cap_gradient + first * ROWS : nullptr});
  // Other keys of these blocks have no weight.
  std::fill(block.logits, logits, -INFINITY);
  std::fill(logits + count * ROWS, block.logits + blocks * SIDE * ROWS, -INFINITY);
}

template <int IN>
void write_queries(const Item<IN>& w, const Panel& panel) {
  const Problem& p = w.p;
  const float factor = p.scale * p.rest;
  const int exponent = static_cast<int>(panel.d_out_exponent);
  for (long x = 0; x < w.H; x += ROWS)
    transpose(panel.d_query + x * ROWS, ROWS, std::min(ROWS, w.H - x), panel.rows, w.staging + x * ROWS);
  for (long r = 0; r < panel.rows; r++) {
    float* const row = w.transposed;
    for (long x = 0; x < p.H; x++)
      row[x] = std::ldexp(w.staging[x / ROWS * ROWS * ROWS + r * ROWS + x % ROWS] * factor, exponent);
    write_row(row, w.g.d_query.type, p.H, w.g.d_query.at(w.b, panel.r0 + r, panel.n));
  }
}

// Visits all keys with some panels.
template <int IN>
void visit_panels(Item<IN>& w, const Panel* panels, long count) {
  for (long chunk = w.attended.first / CHUNK * CHUNK; chunk < w.attended.end; chunk += CHUNK) {
    const long end = std::min(chunk + CHUNK, w.attended.end);
    bool loaded = false;
    for (long i = 0; i < count; i++) {
      const Panel& panel = panels[i];
      const View view(w.p, w.b, panel.n);
      const Range seen = view.keys_of(panel.r0, panel.rows);
      if (seen.end <= chunk || seen.first >= end) continue;
      if (!loaded) w.load_chunk(chunk, end), loaded = true;
      for (long k0 = chunk; k0 < end; k0 += KEYS)
        visit_block(w, panel, view, chunk, k0, std::min(k0 + KEYS, end));
    }
    for (int i = 0; i < 2; i++) advance(w, {});
  }
  for (long i = 0; i < count; i++) write_queries(w, panels[i]);
}

template <int IN>
void visit_part(const Backward& g, const Sizes& s, long head, long part, float* sums) {
  if (!Operands<IN>(g, head, 0, 0).keys_in_range()) return avx512::visit_part(g, s, head, part, sums);
  const Problem& p = g.problem;
  const long own = (s.panels - part + s.parts - 1) / s.parts, each = s.panels / p.group();
  const long fit = MOST_PANELS / Operands<IN>::panel_floats(p);
  std::vector<Panel> panels(std::max(1l, std::min(fit, own)));
  Item<IN> w(g, s, head, panels.size(), sums);
  for (Panel& panel : panels) w.take_panel(panel);
  const Tiles tiles;
  for (long i = 0; i < own;) {
    long count = 0;
    for (; count < static_cast<long>(panels.size()) && i < own; count++, i++) {
      const long number = part + i * s.parts, r0 = number % each * ROWS;
      w.load_panel(panels[count], w.kv * p.group() + number / each, r0, std::min(ROWS, p.T - r0));
    }
    visit_panels(w, panels.data(), count);
  }
}

}  // namespace

void attend_backward(const Backward& g, Pool& pool) {
  const int parts = parts_of(g.problem, true);
  VisitPart visit = avx512::visit_part;
  if (parts) visit = parts == 1 && g.d_out.type == Float::bf16 ? visit_part<1> : visit_part<3>;
  avx512::attend_backward(g, pool, visit);
}

}  // namespace amx
}  // namespace jaxmha
