// Few query rows over many keys, as in decoding: keys and values are read once, in place and in the
// order of memory, and the time is that of memory. Features lie in lanes. An item is a range of keys
// of some key heads, which lie side by side; the states of the ranges are joined at the end.
#include "few_rows.h"

#include <cmath>
#include <vector>

#include "few.h"
#include "keys.h"
#include "kernels.h"
#include "scores.h"
#include "scratch.h"
#include "state.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr long LEAST = 256;  // keys of an item
constexpr long MOST_ROWS = 8;
constexpr long AHEAD = 8;  // keys fetched before they are read
constexpr long VALUES = 8;  // of each head that are read one after another
constexpr long EXACT = 1024;  // most products of a head whose sums are of float64

// Keys of some key heads: their queries, and the state of their rows.
struct Item {
  const Problem& p;
  const long b, kv0, heads, rows, H, h;  // rows: of all query heads of a group; H, h: padded
  std::vector<State> states;             // of the key heads, as all that follows
  std::vector<Range> seen;
  Scratch memory;
  float *queries, *scores, *alpha;  // rows H, rows KEYS, rows
  float *keys, *values, *bias;      // of one head; of one tile
  uint8_t* allowed;
  std::vector<uint8_t> clear;  // every row attends every key of the block

  Item(const Problem& p, long b, long kv0, long heads);
  long head(long i, long row) const { return (kv0 + i) * p.group() + row / p.T; }
  float* queries_of(long i) const { return queries + i * rows * H; }
  float* scores_of(long i) const { return scores + i * rows * KEYS; }
};

Item::Item(const Problem& p, long b, long kv0, long heads)
    : p(p), b(b), kv0(kv0), heads(heads), rows(p.group() * p.T), H(padded(p.H)), h(padded(p.h)),
      memory(heads * rows * (H + KEYS + 1) + KEYS * (H + h) + KEYS * ROWS * 5 / 4 + 7 * 16),
      clear(heads) {
  queries = memory.take(heads * rows * H);
  scores = memory.take(heads * rows * KEYS);
  alpha = memory.take(heads * rows);
  keys = memory.take(KEYS * H);
  values = memory.take(KEYS * h);
  bias = memory.take(KEYS * ROWS);
  allowed = reinterpret_cast<uint8_t*>(memory.take(KEYS * ROWS / 4));
  for (long i = 0; i < heads; i++) {
    seen.push_back(keys_of_head(p, b, kv0 + i));
    for (long row = 0; row < rows; row++) {
      float* const to = queries_of(i) + row * H;
      pad_row(p.query.at(b, row % p.T, head(i, row)), p.query.type, p.H, H, to);
      for (long x = 0; x < p.H; x++) to[x] *= p.scale;
    }
  }
}

// Rows of one type that lie `step` bytes apart; those of the next head `head` bytes on.
struct Rows {
  const char* data;
  long step, head;
  const char* at(long i, long key) const { return data + i * head + key * step; }
};

// Keys [k0, k0 + count) of heads [first, end).
struct Block {
  long first, end, k0, count;
  Rows keys, values;  // of the first head on
};

// scores[row][key] as sums of float64, in as many parts.
void multiply_exactly(const Item& w, const Block& block) {
  for (long i = block.first; i < block.end; i++)
    for (long row = 0; row < w.rows; row++)
      for (long key = 0; key < block.count; key++) {
        const float* const x = w.queries_of(i) + row * w.H;
        const auto* const y =
            reinterpret_cast<const float*>(block.keys.at(i - block.first, key));
        double parts[W] = {};
        for (long c = 0; c < w.H; c += W)
          for (int j = 0; j < W; j++) parts[j] += static_cast<double>(x[c + j]) * y[c + j];
        for (int half = W / 2; half; half /= 2)
          for (int j = 0; j < half; j++) parts[j] += parts[j + half];
        w.scores_of(i)[row * KEYS + key] = static_cast<float>(parts[0]);
      }
}

// scores[row][key], in the order in which keys lie in memory: the heads of a key side by side.
template <Stored type>
void multiply(const Item& w, const Block& block) {
  const long heads = block.end - block.first;
  long key = 0;
  for (; key + 4 <= block.count; key += 4) {
    for (long j = key; j < key + 4; j++) {
      fetch(block.values.at(0, j), heads * w.h * size_of(type));
      if (j + AHEAD < block.count) fetch(block.keys.at(0, j + AHEAD), heads * w.H * size_of(type));
    }
    for (long i = 0; i < heads; i++)
      score_four<type>(w.queries_of(block.first + i), w.rows, w.H, block.keys.at(i, key),
                       block.keys.step, w.scores_of(block.first + i) + key);
  }
  for (; key < block.count; key++)
    for (long i = 0; i < heads; i++)
      score_one<type>(w.queries_of(block.first + i), w.rows, w.H, block.keys.at(i, key),
                      w.scores_of(block.first + i) + key);
}

// Conditions of the rows of one query head, the g-th of key head i; their tile is transposed.
void apply(const Item& w, long i, long g, const Block& block) {
  const Problem& p = w.p;
  const View view(p, w.b, (w.kv0 + i) * p.group() + g);
  const Tile kind = view.tile(0, p.T, block.k0, block.count, w.allowed, w.bias);
  for (long r = 0; r < p.T && kind != Tile::clear; r++) {
    float* const scores = w.scores_of(i) + (g * p.T + r) * KEYS;
    for (long key = 0; key < block.count; key++) {
      float& x = scores[key];
      if (p.whole_logits()) x *= p.rest;
      if (p.soft_cap != 0.f) x = p.soft_cap * std::tanh(x / p.soft_cap);
      if (view.has_bias()) x += w.bias[key * ROWS + r];
      if (kind == Tile::masked || !w.allowed[key * ROWS + r]) x = -INFINITY;
    }
  }
}

// Adds a block to the states of its heads; values are read in the order in which they lie.
template <Stored type>
void visit(const Item& w, const Block& block) {
  const Problem& p = w.p;
  if (type == Stored::f32 && w.rows * p.S * w.H <= EXACT)
    multiply_exactly(w, block);
  else
    multiply<type>(w, block);
  const Exponent exponent(p.exponent());
  for (long i = block.first; i < block.end; i++) {
    for (long g = 0; g < p.group() && !w.clear[i]; g++) apply(w, i, g, block);
    for (long row = 0; row < w.rows; row++)
      w.alpha[i * w.rows + row] =
          exponentials(block.count, exponent, w.scores_of(i) + row * KEYS,
                       w.states[i].row_max + row, w.states[i].row_sum + row);
  }
  const float ones[MOST_ROWS] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
  for (long key = 0; key < block.count; key += VALUES)
    for (long i = block.first; i < block.end; i++)
      add_values<type>(w.scores_of(i) + key, w.rows, std::min(VALUES, block.count - key),
                       block.values.at(i - block.first, key), block.values.step,
                       key ? ones : w.alpha + i * w.rows, w.states[i].out, w.h);
}

// True if all rows of key head i attend all these keys.
bool all_attend(const Item& w, long i, long k0, long count) {
  for (long n = (w.kv0 + i) * w.p.group(); n < (w.kv0 + i + 1) * w.p.group(); n++)
    if (View(w.p, w.b, n).tile(0, w.p.T, k0, count, w.allowed, w.bias) != Tile::clear) return false;
  return true;
}

// Keys where they lie.
void visit_in_place(const Item& w, Block block) {
  const Problem& p = w.p;
  const long kv = w.kv0 + block.first, size = size_of(p.key.type);
  block.keys = {p.key.at(w.b, block.k0, kv), p.key.stride() * size, p.H * size};
  block.values = {p.value.at(w.b, block.k0, kv), p.value.stride() * size, p.h * size};
  switch (p.key.type) {
    case Float::f32: return visit<Stored::f32>(w, block);
    case Float::bf16: return visit<Stored::bf16>(w, block);
    case Float::f16: return visit<Stored::f16>(w, block);
  }
}

// Keys of each head, converted, padded, and made finite where none attends them.
void visit_copies(const Item& w, const Block& block) {
  for (long i = block.first; i < block.end; i++) {
    copy_keys(w.p, w.b, w.kv0 + i, block.k0, block.count, w.H, w.h, w.keys, w.values);
    visit<Stored::f32>(w, {i, i + 1, block.k0, block.count,
                           {reinterpret_cast<const char*>(w.keys), w.H * 4, 0},
                           {reinterpret_cast<const char*>(w.values), w.h * 4, 0}});
  }
}

// Adds keys [first, end) to the states: in place, unless they have to be copied.
void visit_keys(Item& w, long first, long end) {
  const Problem& p = w.p;
  const bool whole = p.key.type == p.value.type && p.H % W == 0 && p.h % W == 0;
  for (long k0 = first; k0 < end; k0 += KEYS) {
    const auto part = [&](long i) {
      return Range{std::max(k0, w.seen[i].first), std::min({k0 + KEYS, end, w.seen[i].end})};
    };
    for (long i = 0; i < w.heads;) {
      const Range keys = part(i);
      const long from = i;
      bool usable = whole;
      for (; i < w.heads && part(i).first == keys.first && part(i).end == keys.end; i++) {
        const long count = keys.end - keys.first;
        if (count <= 0) continue;
        w.clear[i] = all_attend(w, i, keys.first, count);
        usable = usable && (w.clear[i] || finite_keys(p, w.b, w.kv0 + i, keys.first, count));
      }
      if (keys.empty()) continue;
      const Block block{from, i, keys.first, keys.end - keys.first, {}, {}};
      usable ? visit_in_place(w, block) : visit_copies(w, block);
    }
  }
}

// Joins the states of all ranges, and writes the rows of a head.
void join(const Forward& f, long b, long kv, const States& states) {
  const Problem& p = f.problem;
  for (long row = 0; row < states.rows; row++) {
    const long n = kv * p.group() + row / p.T, r = row % p.T;
    float* const out = states.of(0).out + row * states.width;
    const Statistics all = join_row(states, row, states.width, Exponent(p.exponent()), out);
    const bool valid = View(p, b, n).valid_row(r) && all.row_sum != 0.f;
    for (long x = 0; x < p.h; x++) out[x] = valid ? out[x] / all.row_sum : 0.f;
    write_row(out, f.out.type, p.h, f.out.at(b, r, n));
    f.row_max[(b * p.N + n) * p.T + r] = valid ? all.row_max : LOWEST;
    f.row_sum[(b * p.N + n) * p.T + r] = valid ? all.row_sum : 0.f;
  }
}

}  // namespace

bool are_few_rows(const Forward& f) {
  return !f.gradient && f.problem.group() * f.problem.T <= MOST_ROWS;
}

void attend_few_rows(const Forward& f, Pool& pool) {
  const Problem& p = f.problem;
  const long rows = p.group() * p.T, h = padded(p.h), wanted = 4 * pool.threads();
  const long most = std::max(1l, p.S / LEAST);
  const long parts = std::min(p.K, (wanted + p.B * most - 1) / (p.B * most));  // of key heads
  const long heads = (p.K + parts - 1) / parts;
  const long ranges = std::min(most, (wanted + p.B * parts - 1) / (p.B * parts));
  const size_t step = State::floats(rows, h);
  Scratch memory(p.B * p.K * ranges * step);
  float* const all = memory.take(p.B * p.K * ranges * step);
  parallel(pool, p.B * parts * ranges, [&](long i) {
    const long b = i / (parts * ranges), range = i % ranges;
    const long kv0 = std::min(i / ranges % parts * heads, p.K), kv1 = std::min(kv0 + heads, p.K);
    if (kv0 == kv1) return;
    Item w(p, b, kv0, kv1 - kv0);
    for (long kv = kv0; kv < kv1; kv++) {
      w.states.emplace_back(all + ((b * p.K + kv) * ranges + range) * step, rows, h);
      w.states.back().clear(rows, h);
    }
    const Range valid = View(p, b, kv0 * p.group()).valid_keys();
    const long count = valid.end - valid.first;
    const long each = ((count + ranges - 1) / ranges + KEYS - 1) / KEYS * KEYS;
    const long first = valid.first + range * each;
    visit_keys(w, first, std::min(first + each, valid.end));
  });
  for (long head = 0; head < p.B * p.K; head++)
    join(f, head / p.K, head % p.K, {all + head * ranges * step, ranges, rows, h});
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
