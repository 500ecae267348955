// Matmuls of whole layers on AMX.
#include <atomic>
#include <vector>

#include "amx_tiles.h"
#include "kernels.h"
#include "scratch.h"

namespace jaxmha {
namespace amx {
namespace {

constexpr long DEPTH = 512;  // that is split at a time
constexpr long PARTS = 3;    // bfloat16 of a float32: high, middle, low
constexpr long STEP_WORDS = PARTS * PART_WORDS;
// Up to so many rows, a is split first and stays in the L2 cache of every thread, and items split their
// own columns of b; for more, b is split first, and items their own rows of a.
constexpr long FEW = 256;
constexpr long MOST_ROWS = 320;  // of an item
constexpr long MOST_WORDS = (8l << 20) / 4;  // that are split first at a time, of 4 steps at least

// Blocks of SIDE rows of a or columns of b, one after another: words, and the power of two by which
// each row or column was divided.
struct Blocks {
  Word* words;
  float* powers;
  long steps;
  static size_t floats(long count, long steps) {
    return Scratch::rounded(count * steps * STEP_WORDS) + Scratch::rounded(count * SIDE);
  }
  Blocks(Scratch& from, long count, long steps_of_block)
      : words(take_words(from, count * steps_of_block * STEP_WORDS)),
        powers(from.take(count * SIDE)), steps(steps_of_block) {}
  Blocks from(long block) const {
    Blocks some = *this;
    some.words = words_of(block), some.powers = powers_of(block);
    return some;
  }
  Word* words_of(long block) const { return words + block * steps * STEP_WORDS; }
  float* powers_of(long block) const { return powers + block * SIDE; }
};

// Some depths of one batch row, from p0 on.
struct Part {
  const Matmul& m;  // of one batch row
  const Depths& depths;
  long p0, depth;
  std::vector<std::atomic<bool>>& rows_not_finite;
  std::atomic<bool>& column_not_finite;
  long steps() const { return steps_of(depth); }
};

// The larger absolute values, as bits, which are in the order of the values; those of NaN are above.
inline __m512i larger(__m512i found, Vector x) {
  return _mm512_max_epu32(found, _mm512_and_si512(bits(x), _mm512_set1_epi32(0x7fffffff)));
}

inline bool is_finite(Word largest) { return largest < 0x7f800000u; }

// The power of two by which a row or column is divided: its largest entry is near 1 then. Else low
// parts of small numbers would be 0, and so would their products; large ones would be infinite.
inline float power_of(Word largest) {
  return largest == 0 || !is_finite(largest) ? 0.f : static_cast<float>(largest >> 23) - 127.f;
}

inline Vector divided(Vector x, Vector powers) { return _mm512_scalef_ps(x, sub(set1(0.f), powers)); }

// `row(p)` has `count` columns of b at depth p.
template <class Row>
void split_columns(const Part& x, const Blocks& to, long block, long count, const Row& row) {
  __m512i found[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (long p = 0; p < x.depth; p++)
    for (long tile = 0; tile < 2; tile++)
      found[tile] = larger(found[tile], load_some(row(p) + tile * W, count - tile * W));
  Word largest[SIDE];
  float* const powers = to.powers_of(block);
  for (long tile = 0; tile < 2; tile++) _mm512_storeu_si512(largest + tile * W, found[tile]);
  for (long j = 0; j < SIDE; j++) {
    powers[j] = power_of(largest[j]);
    if (!is_finite(largest[j])) x.column_not_finite = true;
  }
  const auto near_one = [&](long p, long tile) {
    if (p >= x.depth) return set1(0.f);
    return divided(load_some(row(p) + tile * W, count - tile * W), load(powers + tile * W));
  };
  Word* words = to.words_of(block);
  for (long p = 0; p < x.depth; p += STEP, words += STEP_WORDS)
    for (long tile = 0; tile < 2; tile++)
      for (long j = 0; j < W; j++)
        split<PARTS>(near_one(p + j, tile), near_one(p + W + j, tile),
                     words + tile * TILE_WORDS + j * W);
}

void split_b(const Part& x, const Blocks& to, long block, long panel) {
  const Matmul& m = x.m;
  const long j0 = panel * SIDE, count = std::min(SIDE, m.columns - j0);
  const float* const b = m.b.of(0);
  if (!m.b_transposed) {
    const auto row = [&](long p) { return b + x.depths[x.p0 + p] * m.columns + j0; };
    return split_columns(x, to, block, count, row);
  }
  Scratch memory(x.depth * ROWS);
  float* const copied = memory.take(x.depth * ROWS);
  transpose(b + j0 * m.depth + x.p0, m.depth, count, x.depth, copied);
  split_columns(x, to, block, count, [&](long p) { return copied + p * ROWS; });
}

// A row of a; returns its power of two. A row that is not finite counts as 0.
float split_row(const Part& x, const float* row, long r, long steps, Word* to) {
  __m512i found = _mm512_setzero_si512();
  for (long p = 0; p < x.depth; p += W) found = larger(found, load_some(row + p, x.depth - p));
  const Word largest = _mm512_reduce_max_epu32(found);
  const long depth = is_finite(largest) ? x.depth : 0;
  if (!is_finite(largest)) x.rows_not_finite[r] = true;
  const float power = power_of(largest);
  const auto near_one = [&](long p) { return divided(load_some(row + p, depth - p), set1(power)); };
  for (long s = 0; s < steps; s++, to += STEP_WORDS)
    split<PARTS>(near_one(s * STEP), near_one(s * STEP + W), to);
  return power;
}

// Rows of a transposed a are copied first; they do not lie a power of two apart.
constexpr long STRIDE = DEPTH + W;
long copied_floats(const Matmul& m) { return m.a_transposed ? SIDE * STRIDE : 0; }

// SIDE rows from r0 on, STRIDE apart.
void copy_rows(const Part& x, long r0, float* to) {
  const long count = std::min(SIDE, x.m.rows - r0);
  for (long p = 0; p < x.depth; p += ROWS) {
    float lines[ROWS * SIDE] = {}, rows[SIDE * ROWS];
    const long now = std::min(ROWS, x.depth - p);
    for (long i = 0; i < now; i++) {
      const float* const from = x.m.a.of(0) + x.depths[x.p0 + p + i] * x.m.rows + r0;
      std::copy(from, from + count, lines + i * SIDE);
    }
    transpose(lines, SIDE, now, count, rows);
    for (long i = 0; i < count; i++)
      std::copy(rows + i * ROWS, rows + i * ROWS + now, to + i * STRIDE + p);
  }
}

// Splits SIDE rows of a from r0 on into bfloat16 parts. Rows that are not kept or lie past the end are 0.
void split_a(const Part& x, const Blocks& to, long block, long r0, float* copied) {
  const Matmul& m = x.m;
  const long stride = m.a_transposed ? STRIDE : m.depth;
  if (m.a_transposed) copy_rows(x, r0, copied);
  const float* const rows = m.a_transposed ? copied : m.a.of(0) + r0 * m.depth + x.p0;
  for (long i = 0; i < SIDE; i++) {
    Word* const words = to.words_of(block) + i / W * TILE_WORDS + i % W * W;
    float& power = to.powers_of(block)[i];
    power = 0.f;
    if (any_kept(m, 0, r0 + i, 1))
      power = split_row(x, rows + i * stride, r0 + i, to.steps, words);
    else
      for (long s = 0; s < to.steps; s++) split<PARTS>(set1(0.f), set1(0.f), words + s * STEP_WORDS);
  }
}

// A block of y: the products, times the powers of two, what earlier depths gave, and the bias.
void finish(const Part& x, long r0, long panel, const float* c, const float* row_powers,
            const float* column_powers) {
  const Matmul& m = x.m;
  const bool added = x.p0 > 0, last = x.p0 + x.depth == x.depths.count;
  const long rows = std::min(SIDE, m.rows - r0);
  for (long tile = 0; tile < 2; tile++) {
    const long j0 = panel * SIDE + tile * W, count = std::min<long>(W, m.columns - j0);
    if (count <= 0) return;
    const __mmask16 mask = (1u << count) - 1;
    const Vector powers = load(column_powers + tile * W);
    const Vector bias = m.bias && last ? load_some(m.bias.of(0) + j0, count) : set1(0.f);
    float* to = m.y + r0 * m.columns + j0;
    for (long i = 0; i < rows; i++, to += m.columns) {
      Vector sum = load(c + i * SIDE + tile * W);
      sum = _mm512_scalef_ps(sum, add(set1(row_powers[i]), powers));  // at once: each may overflow
      if (added) sum = add(sum, _mm512_maskz_loadu_ps(mask, to));
      _mm512_mask_storeu_ps(to, mask, add(sum, bias));
    }
  }
}

// Fetches some cache lines.
struct Fetch {
  const Word *next, *end;
  long lines;
  void operator()() {
    for (long i = 0; i < lines && next < end; i++, next += W) __builtin_prefetch(next, 0, 2);
  }
};

// Multiplies blocks of a, whose first row is r0, and of b, whose first panel is `first`.
void multiply_blocks(const Part& x, const Blocks& a, long r0, long rows, const Blocks& b,
                     long first, long panels) {
  alignas(64) float c[SIDE * SIDE];
  constexpr long PRODUCTS = products_of(PARTS, PARTS), ALL_LINES = STEP_WORDS / W / PRODUCTS;
  const long blocks = blocks_of(rows), lines = (ALL_LINES + blocks - 1) / blocks;
  const Tiles tiles;
  for (long j = 0; j < panels; j++)
    for (long i = 0; i < blocks; i++) {
      const Word* const next = b.words_of(j + 1) + i * lines * PRODUCTS * a.steps * W;
      const Word* const end = b.words_of(j + 1 < panels ? j + 2 : j + 1);
      if (any_kept(x.m, 0, r0 + i * SIDE, SIDE))
        multiply<PARTS, PARTS>(a.words_of(i), b.words_of(j), a.steps, c, SIDE,
                               Fetch{next, end, lines});
      else
        std::fill(c, c + SIDE * SIDE, 0.f);
      finish(x, r0 + i * SIDE, first + j, c, a.powers_of(i), b.powers_of(j));
    }
}

void multiply_few(const Part& x, Pool& pool) {
  const long steps = x.steps(), blocks = blocks_of(x.m.rows);
  const long panels = blocks_of(x.m.columns);
  Scratch memory(Blocks::floats(blocks, steps));
  const Blocks a(memory, blocks, steps);
  parallel(pool, blocks, [&](long i) {
    Scratch own(copied_floats(x.m));
    split_a(x, a, i, i * SIDE, own.take(copied_floats(x.m)));
  });
  parallel(pool, panels, [&](long panel) {
    Scratch own(Blocks::floats(1, steps));
    const Blocks b(own, 1, steps);
    split_b(x, b, 0, panel);
    multiply_blocks(x, a, 0, x.m.rows, b, panel, 1);
  });
}

// Parts of the rows, each of which reads all of b: as few as a of a part allows, which stays in the L2
// cache, and the same number for every thread.
long parts_of_rows(long blocks, long threads) {
  const long turns = (blocks * SIDE + threads * MOST_ROWS - 1) / (threads * MOST_ROWS);
  return std::min(turns * threads, (blocks + 1) / 2);
}

void multiply_many(const Part& x, Pool& pool) {
  const long steps = x.steps(), panels = blocks_of(x.m.columns);
  Scratch memory(Blocks::floats(panels, steps));
  const Blocks b(memory, panels, steps);
  parallel(pool, panels, [&](long panel) { split_b(x, b, panel, panel); });
  const long blocks = blocks_of(x.m.rows), threads = pool.threads();
  const long parts = parts_of_rows(blocks, threads);
  // Of fewer parts than threads, several items take some columns each, and split the rows again.
  const long groups = std::min(panels, (threads + parts - 1) / parts);
  parallel(pool, parts * groups, [&](long item) {
    const long part = item / groups, group = item % groups;
    const long first = part * blocks / parts, own = (part + 1) * blocks / parts - first;
    const long j0 = group * panels / groups, r0 = first * SIDE;
    Scratch memory(Blocks::floats(own, steps) + copied_floats(x.m));
    const Blocks a(memory, own, steps);
    float* const copied = memory.take(copied_floats(x.m));
    for (long i = 0; i < own; i++) split_a(x, a, i, r0 + i * SIDE, copied);
    multiply_blocks(x, a, r0, std::min(own * SIDE, x.m.rows - r0), b.from(j0), j0,
                    (group + 1) * panels / groups - j0);
  });
}

// The matmul of one batch row, as a matmul without batch axes.
Matmul alone(const Matmul& m, long batch) {
  Matmul one = m;
  const auto take = [&](auto& operand) {
    if (operand) operand.data = operand.of(batch), operand.start = {0};
  };
  take(one.a), take(one.b), take(one.bias), take(one.kept);
  one.batches = 1, one.y = m.y + batch * m.rows * m.columns;
  return one;
}

// Rows that are not finite, in float32: copied together, so that b is packed once.
void multiply_rows(const Matmul& one, const std::vector<long>& rows, Pool& pool) {
  const long count = rows.size();
  Scratch memory(Scratch::rounded(count * one.depth) + Scratch::rounded(count * one.columns));
  float* const a = memory.take(count * one.depth);
  float* const y = memory.take(count * one.columns);
  for (long i = 0; i < count; i++) {
    const float* const from = one.a.of(0) + rows[i] * one.depth;
    std::copy(from, from + one.depth, a + i * one.depth);
  }
  Matmul some = one;
  some.rows = count, some.a.data = a, some.y = y, some.kept = {};
  avx512::matmul(some, pool);
  for (long i = 0; i < count; i++)
    std::copy(y + i * one.columns, y + (i + 1) * one.columns, one.y + rows[i] * one.columns);
}

// One batch row. Returns false, with y undefined, where no depth is kept, or a column of b or a row of
// a transposed a is not finite.
bool multiply_batch(const Matmul& one, Pool& pool) {
  const Depths depths(one, 0);
  if (depths.count == 0) return false;
  const long first = one.rows <= FEW ? one.rows : one.columns;
  const long fit = MOST_WORDS / (PARTS * (first + SIDE) * STEP / 2) * STEP;
  const long most = std::min(DEPTH, std::max(4 * STEP, fit));
  std::vector<std::atomic<bool>> not_finite(one.rows);
  std::atomic<bool> failed{false};
  for (long p0 = 0; p0 < depths.count && !failed; p0 += most) {
    const Part x{one, depths, p0, std::min(most, depths.count - p0), not_finite, failed};
    one.rows <= FEW ? multiply_few(x, pool) : multiply_many(x, pool);
  }
  std::vector<long> rows;
  for (long r = 0; r < one.rows; r++)
    if (not_finite[r]) rows.push_back(r);
  if (failed || (!rows.empty() && one.a_transposed)) return false;
  if (!rows.empty()) multiply_rows(one, rows, pool);
  return true;
}

}  // namespace

void matmul(const Matmul& m, Pool& pool) {
  // Below, splitting takes longer than it saves.
  constexpr long LEAST_ROWS = 96, LEAST_DEPTH = 64, LEAST_COLUMNS = 128;
  if (m.rows < LEAST_ROWS || m.depth < LEAST_DEPTH || m.columns < LEAST_COLUMNS)
    return avx512::matmul(m, pool);
  for (long batch = 0; batch < m.batches; batch++) {
    const Matmul one = alone(m, batch);
    if (!multiply_batch(one, pool)) avx512::matmul(one, pool);
  }
}

}  // namespace amx
}  // namespace jaxmha
