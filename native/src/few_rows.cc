// Few query rows over many keys, as in decoding: keys and values are read once, in place, and the
// time is that of memory. Features lie in lanes. An item is a range of keys of some key heads, which
// lie side by side in memory; the states of the ranges are joined at the end.
#include "few_rows.h"

#include <cmath>
#include <vector>

#include "keys.h"
#include "kernels.h"
#include "scores.h"
#include "scratch.h"
#include "state.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr long KEYS = 64;  // of a block
constexpr long LEAST = 256;  // keys of an item
constexpr long MOST_ROWS = 8;
constexpr long AHEAD = 8;  // keys fetched before they are read
constexpr long EXACT = 1024;  // most products of a head whose sums are of float64

struct Item {
  const Problem& p;
  const long b, kv0, rows, H, h;  // rows: of all query heads of a group
  long kv;                        // the key head in use
  Scratch memory;
  float *queries, *query, *keys, *values, *scores, *bias;  // queries: of all key heads
  uint8_t* allowed;

  Item(const Problem& p, long b, long kv0, long kv1);
  void use(long key_head) { kv = key_head, query = queries + (kv - kv0) * rows * H; }
  long head(long row) const { return kv * p.group() + row / p.T; }
};

Item::Item(const Problem& p, long b, long kv0, long kv1)
    : p(p), b(b), kv0(kv0), rows(p.group() * p.T), H(padded(p.H)), h(padded(p.h)),
      memory((kv1 - kv0) * rows * H + KEYS * (H + h) + rows * KEYS + KEYS * ROWS * 5 / 4 +
             6 * 16) {
  queries = memory.take((kv1 - kv0) * rows * H);
  keys = memory.take(KEYS * H);
  values = memory.take(KEYS * h);
  scores = memory.take(rows * KEYS);
  bias = memory.take(KEYS * ROWS);
  allowed = reinterpret_cast<uint8_t*>(memory.take(KEYS * ROWS / 4));
  for (long key_head = kv0; key_head < kv1; key_head++) {
    use(key_head);
    for (long row = 0; row < rows; row++) {
      float* const to = query + row * H;
      pad_row(p.query.at(b, row % p.T, head(row)), p.query.type, p.H, H, to);
      for (long x = 0; x < p.H; x++) to[x] *= p.scale;
    }
  }
}

// Keys and values of a block: those of the key head in use.
struct Block {
  long count;
  bool clear;  // every row attends every key
  const float *keys, *values;
  long key_stride, value_stride;
};

// scores[row][key] as sums of float64, in as many parts.
void multiply_exactly(const Item& w, const Block& block) {
  for (long row = 0; row < w.rows; row++)
    for (long key = 0; key < block.count; key++) {
      const float *const x = w.query + row * w.H, *const y = block.keys + key * block.key_stride;
      double parts[W] = {};
      for (long i = 0; i < w.H; i += W)
        for (int j = 0; j < W; j++) parts[j] += static_cast<double>(x[i + j]) * y[i + j];
      for (int half = W / 2; half; half /= 2)
        for (int j = 0; j < half; j++) parts[j] += parts[j + half];
      w.scores[row * KEYS + key] = static_cast<float>(parts[0]);
    }
}

// Prefetches keys AHEAD rows ahead, and the values of the four keys in use: rows are far apart.
void fetch_ahead(const Item& w, const Block& block, long key) {
  for (long i = key; i < key + 4; i++) {
    fetch(block.values + i * block.value_stride, w.h * 4);
    if (i + AHEAD < block.count) fetch(block.keys + (i + AHEAD) * block.key_stride, w.H * 4);
  }
}

// scores[row][key], each a sum over lanes; four keys at a time share the loads of a query.
void multiply(const Item& w, const Block& block) {
  const long stride = block.key_stride;
  long key = 0;
  for (; key + 4 <= block.count; key += 4) {
    fetch_ahead(w, block, key);
    const float* const keys = block.keys + key * stride;
    for (long row = 0; row < w.rows; row++) {
      const float* const query = w.query + row * w.H;
      Vector sums[4] = {set1(0.f), set1(0.f), set1(0.f), set1(0.f)};
      for (long x = 0; x < w.H; x += W) {
        const Vector q = load(query + x);
        for (int i = 0; i < 4; i++) sums[i] = fma(q, load(keys + i * stride + x), sums[i]);
      }
      store_sums(w.scores + row * KEYS + key, sums[0], sums[1], sums[2], sums[3]);
    }
  }
  for (; key < block.count; key++)
    for (long row = 0; row < w.rows; row++) {
      Vector total = set1(0.f);
      for (long x = 0; x < w.H; x += W)
        total = fma(load(w.query + row * w.H + x), load(block.keys + key * stride + x), total);
      w.scores[row * KEYS + key] = sum(total);
    }
}

// Conditions of the rows of one head; their tile is transposed.
bool apply(const Item& w, long n, long k0, long count) {
  const Problem& p = w.p;
  const View view(p, w.b, n);
  const Tile kind = view.tile(0, p.T, k0, count, w.allowed, w.bias);
  float* const scores = w.scores + (n - w.kv * p.group()) * p.T * KEYS;
  if (kind == Tile::masked) {
    for (long r = 0; r < p.T; r++)
      std::fill(scores + r * KEYS, scores + r * KEYS + count, -INFINITY);
    return false;
  }
  for (long r = 0; r < p.T && kind != Tile::clear; r++)
    for (long key = 0; key < count; key++) {
      float& x = scores[r * KEYS + key];
      if (p.whole_logits()) x *= p.rest;
      if (p.soft_cap != 0.f) x = p.soft_cap * std::tanh(x / p.soft_cap);
      if (view.has_bias()) x += w.bias[key * ROWS + r];
      if (!w.allowed[key * ROWS + r]) x = -INFINITY;
    }
  return true;
}

// Scores of a row become exponentials; the state of the row is rescaled.
void exponentials(long count, const Exponent& exponent, float* scores, float* row_max,
                  float* row_sum, float* out, long h) {
  float m = *row_max;
  for (long key = 0; key < count; key++) m = scores[key] > m ? scores[key] : m;
  std::fill(scores + count, scores + KEYS, -INFINITY);
  const float before = *row_max;
  float rescale[W];
  store(rescale, exp(set1(before - m), exponent));
  Vector total = set1(0.f);
  for (long key = 0; key < KEYS; key += W) {
    const Vector x = exp(sub(load(scores + key), set1(m)), exponent);
    store(scores + key, x);
    total = add(total, x);
  }
  *row_max = m;
  *row_sum = *row_sum * rescale[0] + sum(total);
  if (before != m)
    for (long x = 0; x < h; x += W) store(out + x, mul(load(out + x), set1(rescale[0])));
}

void add_values(const Item& w, long row, const Block& block, float* out) {
  const long count = block.count, stride = block.value_stride;
  for (long x = 0; x < w.h; x += W) {
    Vector even = set1(0.f), odd = set1(0.f);
    long key = 0;
    for (; key + 2 <= count; key += 2) {
      const float* const from = block.values + key * stride + x;
      even = fma(set1(w.scores[row * KEYS + key]), load(from), even);
      odd = fma(set1(w.scores[row * KEYS + key + 1]), load(from + stride), odd);
    }
    if (key < count)
      even = fma(set1(w.scores[row * KEYS + key]), load(block.values + key * stride + x), even);
    store(out + x, add(load(out + x), add(even, odd)));
  }
}

// True if all rows of the key head in use attend all these keys.
bool all_attend(const Item& w, long k0, long count) {
  for (long n = w.kv * w.p.group(); n < (w.kv + 1) * w.p.group(); n++)
    if (View(w.p, w.b, n).tile(0, w.p.T, k0, count, w.allowed, w.bias) != Tile::clear) return false;
  return true;
}

// Where keys and values are read: in place, unless they have to be converted, padded, or made finite
// where none attends them.
Block block_of(Item& w, long k0, long count) {
  const Problem& p = w.p;
  const bool wide = p.key.type == Float::f32 && p.value.type == Float::f32;
  const bool whole = wide && p.H % W == 0 && p.h % W == 0;
  const bool clear = all_attend(w, k0, count);
  if (whole && (clear || finite_keys(p, w.b, w.kv, k0, count)))
    return {count, clear, reinterpret_cast<const float*>(p.key.at(w.b, k0, w.kv)),
            reinterpret_cast<const float*>(p.value.at(w.b, k0, w.kv)), p.key.stride(),
            p.value.stride()};
  copy_keys(p, w.b, w.kv, k0, count, w.H, w.h, w.keys, w.values);
  return {count, clear, w.keys, w.values, w.H, w.h};
}

// Adds a block of keys to the state of the rows of the key head in use.
void visit_block(Item& w, const State& state, long k0, long count) {
  const Problem& p = w.p;
  const Block block = block_of(w, k0, count);
  if (w.rows * p.S * w.H <= EXACT)
    multiply_exactly(w, block);
  else
    multiply(w, block);
  bool some = block.clear;
  for (long n = 0; n < p.group() && !block.clear; n++) some |= apply(w, w.kv * p.group() + n, k0, count);
  for (long row = 0; some && row < w.rows; row++) {
    float* const out = state.out + row * w.h;
    exponentials(count, Exponent(p.exponent()), w.scores + row * KEYS, state.row_max + row,
                 state.row_sum + row, out, w.h);
    add_values(w, row, block, out);
  }
}

// Adds keys [first, end) to the states of the key heads of an item.
void visit_keys(Item& w, long first, long end, const std::vector<State>& states) {
  const long heads = states.size();
  std::vector<Range> seen;
  for (long i = 0; i < heads; i++) seen.push_back(keys_of_head(w.p, w.b, w.kv0 + i));
  for (long k0 = first; k0 < end; k0 += KEYS)
    for (long i = 0; i < heads; i++) {
      const long from = std::max(k0, seen[i].first);
      const long to = std::min({k0 + KEYS, end, seen[i].end});
      w.use(w.kv0 + i);
      if (from < to) visit_block(w, states[i], from, to - from);
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
    std::vector<State> states;
    for (long kv = kv0; kv < kv1; kv++) {
      const State& state =
          states.emplace_back(all + ((b * p.K + kv) * ranges + range) * step, rows, h);
      state.clear(rows, h);
    }
    Item w(p, b, kv0, kv1);
    const Range valid = View(p, b, kv0 * p.group()).valid_keys();
    const long count = valid.end - valid.first;
    const long each = ((count + ranges - 1) / ranges + KEYS - 1) / KEYS * KEYS;
    const long first = valid.first + range * each;
    visit_keys(w, first, std::min(first + each, valid.end), states);
  });
  for (long head = 0; head < p.B * p.K; head++)
    join(f, head / p.K, head % p.K, {all + head * ranges * step, ranges, rows, h});
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
