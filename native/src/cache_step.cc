// Rows of new tokens over a cache: keys and values are read once, where they lie, and widened in
// registers. An item is a range of slots of one key head; the states of the ranges are joined.
//
// Few rows: features lie in lanes, and four keys share the loads of a query. Many rows: scores are
// transposed, as in forward.cc, and a block of keys is read from cache by every panel of rows.
#include <cmath>

#include "kernels.h"
#include "scores.h"
#include "scratch.h"
#include "stored.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr long KEYS = 64;       // of a block
constexpr long LEAST = 512;     // slots of an item
constexpr long MOST_FEW = 8;    // rows whose features lie in lanes
constexpr int SCORE_ROWS = W == 16 ? 4 : 2;  // with 4 keys, as many sums as registers hold
constexpr long TERMS = 32;      // of a partial sum of a score of many rows
constexpr long AHEAD = 8;       // keys fetched before they are read

// Sums of the lanes of four vectors.
inline __m128 sum4(Vector a, Vector b, Vector c, Vector d) {
#if defined(__AVX512F__)
  const Vector ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vector cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Vector x = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#else
  const Vector ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vector cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 y = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
#endif
  return _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
}

inline void fetch(const char* from, long bytes) {
  for (long i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// The state of rows after some keys: out `rows h'`, row max, row sum.
struct State {
  float *out, *row_max, *row_sum;
  State(float* memory, long rows, long width)
      : out(memory), row_max(memory + rows * width), row_sum(memory + rows * (width + 1)) {}
  static size_t floats(long rows, long width) { return Scratch::rounded(rows * (width + 2)); }
};

// A run of slots of one page.
struct Block {
  long first, count;  // slots
  const char *keys, *values;
  const float *key_scale, *value_scale;  // or null
  const char* next_keys;  // of the block after it, or null
  bool clear;                            // every row attends every key
  bool unattended;                       // some keys are attended by no row
};

struct Item {
  const CacheStep& s;
  const long b, kv, H, h;  // H, h: padded
  const bool few;
  const long last, at;  // position of the latest token, and its slot
  Scratch memory;
  State state;
  float *rows, *keys, *values, *scores, *now, *alpha;
  uint8_t *pairs, *allowed;  // of a block: R KEYS; many: KEYS ROWS of a panel
  uint8_t attended[KEYS];    // keys of a block that some row attends

  Item(const CacheStep& s, long head, float* state);
  // The position of the token in a slot; negative: none.
  long token(long slot) const { return last - at + slot - (slot > at ? s.slots() : 0); }
};

size_t floats_of(const CacheStep& s, bool few) {
  const long H = padded(s.H), h = padded(s.h), panels = (s.R + ROWS - 1) / ROWS;
  const long rows = few ? s.R * H : panels * s.H * ROWS;
  const long scores = few ? s.R * KEYS : KEYS * ROWS;
  return rows + KEYS * (H + h) + scores + 2 * ROWS + (s.R + ROWS) * KEYS / 4 + 8 * 16;
}

Item::Item(const CacheStep& step, long head, float* memory_of_state)
    : s(step), b(head / step.K), kv(head % step.K), H(padded(step.H)), h(padded(step.h)),
      few(step.R <= MOST_FEW), last(std::max(0, step.lengths[b]) - 1l),
      at(last < 0 ? -1 : last % step.slots()),
      memory(floats_of(step, few)), state(memory_of_state, step.R, h) {
  const long panels = (s.R + ROWS - 1) / ROWS;
  rows = memory.take(few ? s.R * H : panels * s.H * ROWS);
  keys = memory.take(KEYS * H);
  values = memory.take(KEYS * h);
  scores = memory.take(few ? s.R * KEYS : KEYS * ROWS);
  pairs = reinterpret_cast<uint8_t*>(memory.take(s.R * KEYS / 4));
  allowed = reinterpret_cast<uint8_t*>(memory.take(KEYS * ROWS / 4));
  now = memory.take(ROWS);
  alpha = memory.take(ROWS);
  const auto* from = reinterpret_cast<const char*>(s.rows + head * s.R * s.H);
  if (few) {
    widen_rows<Stored::f32>(from, s.R, s.H, H, rows);
  } else {
    for (long panel = 0; panel < panels; panel++)
      transpose(s.rows + (head * s.R + panel * ROWS) * s.H, s.H,
                std::min(ROWS, s.R - panel * ROWS), s.H, rows + panel * s.H * ROWS);
  }
  std::fill(state.out, state.out + s.R * h, 0.f);
  std::fill(state.row_max, state.row_max + s.R, LOWEST);
  std::fill(state.row_sum, state.row_sum + s.R, 0.f);
}

// Fills the pairs of a block; false: no row attends any of its keys.
bool fill_pairs(Item& w, Block& block) {
  const CacheStep& s = w.s;
  long tokens[KEYS];
  for (long key = 0; key < block.count; key++) tokens[key] = w.token(block.first + key);
  std::fill(w.attended, w.attended + block.count, 0);
  for (long row = 0; row < s.R; row++) {
    const long t = row % s.T, i = s.first[w.b] + t, n = w.kv * (s.R / s.T) + row / s.T;
    uint8_t* const to = w.pairs + row * KEYS;
    for (long key = 0; key < block.count; key++)
      to[key] = tokens[key] >= 0 && tokens[key] <= i && tokens[key] >= i - s.left;
    if (s.allowed) {
      const uint8_t* const from = s.allowed + w.b * s.allowed_b + n * s.allowed_n +
                                  t * s.allowed_t + block.first * s.allowed_s;
      for (long key = 0; key < block.count; key++) to[key] &= from[key * s.allowed_s] != 0;
    }
    for (long key = 0; key < block.count; key++) w.attended[key] |= to[key];
  }
  const auto found = std::count(w.attended, w.attended + block.count, 1);
  block.unattended = found < block.count;
  return found > 0;
}

// Finds whether all rows attend all keys of a block, else which; false: none attends any.
bool decide(Item& w, Block& block) {
  const CacheStep& s = w.s;
  const long i = s.first[w.b], end = block.first + block.count - 1;
  const bool newest = block.first <= w.at && w.at < end;  // the token after it is the oldest
  const long least = w.token(newest ? w.at + 1 : block.first);
  const long most = w.token(newest ? w.at : end);
  block.clear = !s.allowed && least >= 0 && most <= i && least >= i + s.T - 1 - s.left;
  return block.clear || fill_pairs(w, block);
}

// Scores of M rows and 4 keys.
template <Stored type, int M>
inline __attribute__((always_inline)) void score_tile(const float* rows, long H, const char* keys,
                                                      long bytes, float* scores) {
  Vector c[M][4];
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) c[i][j] = set1(0.f);
  for (long x = 0; x < H; x += W) {
    Vector k[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) k[j] = widened<type>(keys + j * bytes, x);
#pragma GCC unroll 4
    for (int i = 0; i < M; i++) {
      const Vector q = load(rows + i * H + x);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) c[i][j] = fma(q, k[j], c[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
    _mm_storeu_ps(scores + i * KEYS, sum4(c[i][0], c[i][1], c[i][2], c[i][3]));
}

template <Stored type>
void score_rows(const Item& w, const Block& block) {
  const char* const keys = block.keys;
  const long bytes = w.H * size_of(type), of_value = w.h * size_of(type), count = block.count;
  long key = 0;
  for (; key + 4 <= count; key += 4) {
    const bool next = key + AHEAD >= count && block.next_keys;
    fetch((next ? block.next_keys - count * bytes : keys) + (key + AHEAD) * bytes, 4 * bytes);
    fetch(block.values + key * of_value, 4 * of_value);
    long row = 0;
    for (; row + SCORE_ROWS <= w.s.R; row += SCORE_ROWS)
      score_tile<type, SCORE_ROWS>(w.rows + row * w.H, w.H, keys + key * bytes, bytes,
                                   w.scores + row * KEYS + key);
    for (; row < w.s.R; row++)
      score_tile<type, 1>(w.rows + row * w.H, w.H, keys + key * bytes, bytes,
                          w.scores + row * KEYS + key);
  }
  for (; key < count; key++)
    for (long row = 0; row < w.s.R; row++) {
      Vector total = set1(0.f);
      for (long x = 0; x < w.H; x += W)
        total = fma(load(w.rows + row * w.H + x), widened<type>(keys + key * bytes, x), total);
      w.scores[row * KEYS + key] = sum(total);
    }
}

// Scores of one row become weights of values; its state is rescaled by alpha later.
void weigh_row(Item& w, long row, const Block& block) {
  const CacheStep& s = w.s;
  float* const scores = w.scores + row * KEYS;
  const Exponent natural;
  const long count = block.count, vectors = (count + W - 1) / W;
  if (block.key_scale)
    for (long key = 0; key < count; key++) scores[key] *= block.key_scale[key];
  if (s.soft_cap != 0.f)
    for (long x = 0; x < vectors * W; x += W)
      store(scores + x, mul(set1(s.soft_cap), tanh(div(load(scores + x), set1(s.soft_cap)))));
  std::fill(scores + count, scores + vectors * W, -INFINITY);
  for (long key = 0; key < count && !block.clear; key++)
    if (!w.pairs[row * KEYS + key]) scores[key] = -INFINITY;
  Vector largest = set1(w.state.row_max[row]);
  for (long x = 0; x < vectors * W; x += W) largest = max(largest, load(scores + x));
  float lanes[W], m = w.state.row_max[row];
  store(lanes, largest);
  for (int i = 0; i < W; i++) m = lanes[i] > m ? lanes[i] : m;
  float factor[W];
  store(factor, exp(set1(w.state.row_max[row] - m), natural));
  Vector total = set1(0.f);
  for (long x = 0; x < vectors * W; x += W) {
    const Vector e = exp(sub(load(scores + x), set1(m)), natural);
    store(scores + x, e);
    total = add(total, e);
  }
  if (block.value_scale)
    for (long key = 0; key < count; key++)
      if (block.clear || w.attended[key]) scores[key] *= block.value_scale[key];
  w.state.row_max[row] = m;
  w.state.row_sum[row] = w.state.row_sum[row] * factor[0] + sum(total);
  w.alpha[row] = factor[0];
}

template <Stored type, int M, int N>
inline __attribute__((always_inline)) void value_tile(const float* weights, long count,
                                                      const char* values, long x, long bytes,
                                                      const float* alpha, float* out, long h) {
  Vector c[M][N];
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) c[i][j] = set1(0.f);
  for (long key = 0; key < count; key++) {
    Vector v[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) v[j] = widened<type>(values + key * bytes, x + j * W);
#pragma GCC unroll 4
    for (int i = 0; i < M; i++) {
      const Vector weight = set1(weights[i * KEYS + key]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) c[i][j] = fma(weight, v[j], c[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      float* const to = out + i * h + x + j * W;
      store(to, fma(set1(alpha[i]), load(to), c[i][j]));
    }
}

template <Stored type, int M>
void add_values(const Item& w, long row, long count, const char* values) {
  const float* const weights = w.scores + row * KEYS;
  float* const out = w.state.out + row * w.h;
  const long bytes = w.h * size_of(type);
  long x = 0;
  for (; x + NR * W <= w.h; x += NR * W)
    value_tile<type, M, NR>(weights, count, values, x, bytes, w.alpha + row, out, w.h);
  for (; x < w.h; x += W)
    value_tile<type, M, 1>(weights, count, values, x, bytes, w.alpha + row, out, w.h);
}

template <Stored type>
void visit_few(Item& w, const Block& block) {
  score_rows<type>(w, block);
  for (long row = 0; row < w.s.R; row++) weigh_row(w, row, block);
  long row = 0;
  for (; row + 4 <= w.s.R; row += 4) add_values<type, 4>(w, row, block.count, block.values);
  for (; row < w.s.R; row++) add_values<type, 1>(w, row, block.count, block.values);
}

// Values of keys that no row attends may be anything: their weight is 0, but 0 * NaN is NaN.
void clear_unattended(Item& w, const Block& block, float* values) {
  if (!block.unattended) return;
  for (long key = 0; key < block.count; key++)
    if (!w.attended[key])
      std::fill(values + key * w.h, values + (key + 1) * w.h, 0.f);
}

template <Stored type>
void visit_many(Item& w, const Block& block) {
  const CacheStep& s = w.s;
  const auto* keys = reinterpret_cast<const float*>(block.keys);
  const auto* values = reinterpret_cast<const float*>(block.values);
  long stride = s.H;
  if (type != Stored::f32) {
    widen_rows<type>(block.keys, block.count, s.H, w.H, w.keys);
    keys = w.keys, stride = w.H;
  }
  if (type != Stored::f32 || s.h != w.h || block.unattended) {
    widen_rows<type>(block.values, block.count, s.h, w.h, w.values);
    clear_unattended(w, block, w.values);
    values = w.values;
  }
  for (long row0 = 0; row0 < s.R; row0 += ROWS) {
    const long here = std::min(ROWS, s.R - row0), lanes = (here + W - 1) / W;
    float* const row_max = w.state.row_max + row0;
    const bool plain = block.clear && !block.key_scale && s.soft_cap == 0.f;
    std::fill(w.now, w.now + ROWS, LOWEST);
    std::copy(row_max, row_max + here, w.now);
    float before[ROWS], row_sum[ROWS] = {};
    std::copy(w.now, w.now + ROWS, before);
    std::copy(w.state.row_sum + row0, w.state.row_sum + row0 + here, row_sum);
    short_products(block.count, lanes, s.H, TERMS, keys, stride, w.rows + row0 * s.H, w.scores,
                   plain ? w.now : nullptr);
    if (!plain) {
      if (block.key_scale)
        for (long key = 0; key < block.count; key++)
          for (long j = 0; j < lanes * W; j++) w.scores[key * ROWS + j] *= block.key_scale[key];
      for (long key = 0; key < block.count; key++)
        for (long r = 0; r < lanes * W; r++)
          w.allowed[key * ROWS + r] =
              block.clear || (r < here && w.pairs[(row0 + r) * KEYS + key]);
      apply_conditions({block.count, lanes, w.scores, w.allowed, nullptr, 1.f, s.soft_cap});
      update_row_max(block.count, lanes, w.scores, w.now);
    }
    exponentials(block.count, lanes, Exponent(), w.scores, before, w.now, w.alpha, row_sum);
    std::copy(w.now, w.now + here, row_max);
    std::copy(row_sum, row_sum + here, w.state.row_sum + row0);
    if (block.value_scale)
      for (long key = 0; key < block.count; key++) {
        const bool some = block.clear || w.attended[key];
        const float scale = some ? block.value_scale[key] : 0.f;
        for (long j = 0; j < lanes * W; j++) w.scores[key * ROWS + j] *= scale;
      }
    product<Into::rescaled>(here, w.h / W, block.count, {w.scores, 1, ROWS}, values, w.h,
                            w.state.out + row0 * w.h, w.h, w.alpha);
  }
}

template <Stored type>
void visit(Item& w, Block block) {
  if (!w.few) return visit_many<type>(w, block);
  if (w.s.H == w.H && w.s.h == w.h && !block.unattended) return visit_few<type>(w, block);
  widen_rows<type>(block.keys, block.count, w.s.H, w.H, w.keys);
  widen_rows<type>(block.values, block.count, w.s.h, w.h, w.values);
  clear_unattended(w, block, w.values);
  block.keys = reinterpret_cast<const char*>(w.keys);
  block.values = reinterpret_cast<const char*>(w.values);
  block.next_keys = nullptr;
  visit_few<Stored::f32>(w, block);
}

// The row of the pools that holds a slot, or -1.
long row_of(const Item& w, long slot) {
  const CacheStep& s = w.s;
  const long page = s.table ? s.table[w.b * s.M + slot / s.page] : w.b;
  return page < 0 || page >= s.P ? -1 : (page * s.K + w.kv) * s.page + slot % s.page;
}

// Slots [first, end), in blocks that lie in one page each.
void visit_slots(Item& w, long first, long end) {
  const CacheStep& s = w.s;
  const auto keys_at = [&](long row) { return s.key.data + row * s.H * size_of(s.key.type); };
  const auto values_at = [&](long row) { return s.value.data + row * s.h * size_of(s.value.type); };
  for (long slot = first; slot < end;) {
    Block block{};
    block.first = slot, block.count = std::min({KEYS, s.page - slot % s.page, end - slot});
    slot += block.count;
    const long row = row_of(w, block.first), next = slot < end ? row_of(w, slot) : -1;
    if (row < 0 || !decide(w, block)) continue;
    block.keys = keys_at(row), block.values = values_at(row);
    if (next >= 0) block.next_keys = keys_at(next);
    if (s.key.scale) block.key_scale = s.key.scale + row;
    if (s.value.scale) block.value_scale = s.value.scale + row;
#define JAXMHA_VISIT(type) visit<type>(w, block)
    JAXMHA_FOR_STORED(s.key.type, JAXMHA_VISIT)
#undef JAXMHA_VISIT
  }
}

// The slots that any row of a batch row attends.
void attended_slots(const CacheStep& s, long b, long* first, long* end) {
  const long last = std::max(0, s.lengths[b]) - 1l, S = s.slots();
  *first = 0, *end = std::min(last + 1, S);
  if (last >= S) return;  // the buffer has wrapped around
  *end = std::min(*end, s.first[b] + s.T);
  *first = std::max(0l, s.first[b] - s.left);
}

// Joins the states of all ranges of a head, in their order.
void join(const CacheStep& s, long head, float* states, long ranges) {
  const long h = padded(s.h);
  const size_t step = State::floats(s.R, h);
  for (long row = 0; row < s.R; row++) {
    float m = LOWEST, total = 0.f;
    for (long i = 0; i < ranges; i++)
      m = std::max(m, State(states + i * step, s.R, h).row_max[row]);
    float* const out = s.out + (head * s.R + row) * s.h;
    for (long i = 0; i < ranges; i++) {
      const State one(states + i * step, s.R, h);
      float factor[W];
      store(factor, exp(set1(one.row_max[row] - m), Exponent()));
      total += one.row_sum[row] * factor[0];
      for (long x = 0; x < s.h; x++)
        out[x] = (i ? out[x] : 0.f) + one.out[row * h + x] * factor[0];
    }
    s.row_max[head * s.R + row] = m;
    s.row_sum[head * s.R + row] = total;
  }
}

}  // namespace

void attend_cache(const CacheStep& s, Pool& pool) {
  const long heads = s.B * s.K;
  long longest = 1;
  for (long b = 0; b < s.B; b++) longest = std::max<long>(longest, s.lengths[b]);
  longest = std::min(longest, s.slots());
  const long wanted = (8 * pool.threads() + heads - 1) / heads;
  const long ranges = std::max(1l, std::min(wanted, longest / LEAST));
  const size_t step = State::floats(s.R, padded(s.h));
  Scratch memory(heads * ranges * step);
  float* const states = memory.take(heads * ranges * step);
  parallel(pool, heads * ranges, [&](long i) {
    Item w(s, i / ranges, states + i * step);
    long first = 0, end = 0;
    attended_slots(s, w.b, &first, &end);
    const long each = ((end - first + ranges - 1) / ranges + KEYS - 1) / KEYS * KEYS;
    const long from = first + i % ranges * each;
    visit_slots(w, from, std::min(from + each, end));
  });
  for (long head = 0; head < heads; head++) join(s, head, states + head * ranges * step, ranges);
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
