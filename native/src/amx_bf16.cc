// Matmuls of whole layers of bfloat16 on AMX, whose tiles multiply them exactly and sum in float32.
// They take denormal numbers for 0; NaN and infinities spread as in IEEE 754.
//
// A product of tiles takes little longer than the load of one of them from the L2 cache. So a panel of
// columns of b stays in the L1 cache, and blocks of rows of a pass by it. The order of sums depends on
// the depth alone.
#include <vector>

#include "amx_tiles.h"
#include "kernels.h"
#include "scratch.h"

namespace jaxmha {
namespace amx {
namespace {

constexpr long PART = 640;    // depth that is multiplied at a time, at most: a panel of it takes 40 KB
constexpr long DEPTH = 1024;  // that is packed at a time, at most; more has sums of all blocks in memory
constexpr long AHEAD = 2 * STEP;  // depths that are fetched before they are packed
constexpr long BLOCK_SUMS = SIDE * SIDE;
// Up to so many words, a is packed first and stays in the L2 cache of every thread, and items pack their
// own columns of b; beyond, b is packed first, and items pack their own rows of a, of up to ITEM_WORDS.
constexpr long FEW_WORDS = (1l << 20) / 4, ITEM_WORDS = (512l << 10) / 4;

using Lines = __m512i[W];

// One operand of a batch row: its rows or columns, as they are stored.
struct Operand {
  const uint16_t* data;
  long count;          // of rows or columns
  long stride;         // between stored lines
  bool across;         // stored as depth x count
  const uint8_t* kept;  // rows that have sums; null: all
};

inline __mmask32 first_bits(long n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

// A stored row or column; null: it is beyond the last.
inline const uint16_t* line_of(const Operand& x, long i) {
  return i < x.count ? x.data + i * x.stride : nullptr;
}

inline __m512i load_line(const uint16_t* from, long p, __mmask32 mask) {
  return from == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(mask, from + p);
}

// 16 pairs of depths, each of the rows or columns of both tiles, which share a cache line. Lines of
// later depths are fetched: they are pages apart.
inline void load_across(const Operand& x, const Depths& depths, long first, long p, long depth,
                        Lines (&to)[2]) {
  const __mmask32 mask = first_bits(x.count - first);
  const auto at = [&](long i) { return x.data + depths[p + i] * x.stride + first; };
  const auto line = [&](long i) {
    return i < depth ? _mm512_maskz_loadu_epi16(mask, at(i)) : _mm512_setzero_si512();
  };
  const __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i twice = _mm512_mullo_epi32(each, _mm512_set1_epi32(0x10001));
  const __m512i low = _mm512_add_epi32(twice, _mm512_set1_epi32(32 << 16));
  const __m512i high = _mm512_add_epi32(twice, _mm512_set1_epi32(48 << 16 | 16));
  for (long i = 0; i < W; i++) {
    const __m512i even = line(2 * i), odd = line(2 * i + 1);
    to[0][i] = _mm512_permutex2var_epi16(even, low, odd);
    to[1][i] = _mm512_permutex2var_epi16(even, high, odd);
  }
  for (long i = AHEAD; i < std::min(depth, AHEAD + STEP); i++) __builtin_prefetch(at(i));
}

// Of 16 lines of 16 words.
inline void transpose(Lines& x) {
  Lines y, z;
  for (int i = 0; i < W; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < W; i += 4)
    for (int j = 0; j < 2; j++) {
      z[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
      z[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
    }
  for (int i = 0; i < 4; i++) {
    const __m512i even[2] = {_mm512_shuffle_i32x4(z[i], z[4 + i], 0x88),
                             _mm512_shuffle_i32x4(z[8 + i], z[12 + i], 0x88)};
    const __m512i odd[2] = {_mm512_shuffle_i32x4(z[i], z[4 + i], 0xdd),
                            _mm512_shuffle_i32x4(z[8 + i], z[12 + i], 0xdd)};
    x[i] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
    x[8 + i] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
    x[4 + i] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
    x[12 + i] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
  }
}

// Some depths of one batch row, from p0 on, in parts.
struct Product {
  const Bf16Matmul& m;
  const long batch;
  const Depths& depths;
  const long p0, count, parts;
  const long depth;           // of a part; the last one may have less
  const long blocks, panels;  // of rows, of columns
  float* const every;         // sums of all blocks, panel after panel, if there are depths elsewhere
  Operand a, b;
  Product(const Bf16Matmul& of, long batch_row, const Depths& all, long from, long many, float* sums)
      : m(of), batch(batch_row), depths(all), p0(from), count(many),
        parts(std::max(1l, (many + PART - 1) / PART)),
        depth(steps_of((many + parts - 1) / parts) * STEP),
        blocks(blocks_of(m.rows)), panels(blocks_of(m.columns)), every(sums) {
    const bool rows_kept = m.kept && !m.a_transposed;
    a = {m.a.of(batch), m.rows, m.a_transposed ? m.rows : m.depth, m.a_transposed,
         rows_kept ? m.kept.of(batch) : nullptr};
    b = {m.b.of(batch), m.columns, m.b_transposed ? m.depth : m.columns, !m.b_transposed, nullptr};
  }
  long depth_of(long part) const { return std::max(0l, std::min(depth, count - part * depth)); }
  long steps_of_part(long part) const { return steps_of(depth_of(part)); }
  long words() const { return parts * words_of_part(); }  // of a block or panel
  long words_of_part() const { return steps_of(depth) * PART_WORDS; }
  bool any(long block) const { return any_kept(m, batch, block * SIDE, SIDE); }
  bool last(long part) const { return part == parts - 1 && p0 + count == depths.count; }
};

// A block of rows that are stored as such, at `depth` depths from p0 on.
void pack_rows(const Operand& from, long first, long p0, long depth, Word* to) {
  for (long i = 0; i < SIDE; i++) {
    const uint16_t* const line = line_of(from, first + i);
    Word* into = to + i / W * TILE_WORDS + i % W * W;
    for (long p = 0; p < depth; p += STEP, into += PART_WORDS)
      _mm512_storeu_si512(into, load_line(line, p0 + p, first_bits(depth - p)));
  }
}

// The same of 16 rows or columns that are stored as such: lines of words of depths.
inline void load_along(const uint16_t* const* stored, long p, long depth, Lines& to) {
  const __mmask32 mask = first_bits(depth);
  for (long i = 0; i < W; i++) to[i] = load_line(stored[i], p, mask);
}

// A block of rows or, if `columns`, a panel of columns at the depths of one part. Tiles of rows have
// lines of rows, those of columns lines of pairs of depths.
void pack(const Product& x, const Operand& from, bool columns, long block, long part, Word* to) {
  const long depth = x.depth_of(part), p0 = x.p0 + part * x.depth, first = block * SIDE;
  if (!from.across && !columns) return pack_rows(from, first, p0, depth, to);
  const uint16_t* stored[SIDE] = {};
  for (long i = 0; !from.across && i < SIDE; i++) stored[i] = line_of(from, first + i);
  for (long p = 0; p < depth; p += STEP, to += PART_WORDS) {
    Lines lines[2];
    if (from.across) load_across(from, x.depths, first, p0 + p, depth - p, lines);
    for (long tile : {0, 1}) {
      if (!from.across) load_along(stored + tile * W, p0 + p, depth - p, lines[tile]);
      if (from.across != columns) transpose(lines[tile]);
      for (long i = 0; i < W; i++) _mm512_storeu_si512(to + tile * TILE_WORDS + i * W, lines[tile][i]);
    }
  }
}

// A block of y, of its sums and the bias; rows are written a few at a time, while the next block is
// multiplied. The sums of rows that are not kept count as 0.
struct Output {
  char* to = nullptr;
  long stride = 0, rows = 0, rows_of_step = 0;  // rows that are left
  Float type = Float::f32;
  __mmask32 mask = 0;
  const float* sums = nullptr;
  const uint8_t* kept = nullptr;
  Vector bias[2];
  void step() { write(std::min(rows, rows_of_step)); }
  void write(long count) {
    rows -= count;
    for (; count > 0; count--, to += stride, sums += SIDE) {
      const bool read = kept == nullptr || *kept++;
      const Vector low = read ? add(load(sums), bias[0]) : bias[0];
      const Vector high = read ? add(load(sums + W), bias[1]) : bias[1];
      if (type == Float::bf16) {
        const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_mask_storeu_epi16(to, mask, both);
      } else {
        _mm512_mask_storeu_ps(to, static_cast<__mmask16>(mask), low);
        _mm512_mask_storeu_ps(to + 64, static_cast<__mmask16>(mask >> W), high);
      }
    }
  }
};

Output output(const Product& x, long block, long panel, const float* sums) {
  const Bf16Matmul& m = x.m;
  const long r0 = block * SIDE, j0 = panel * SIDE, steps = x.steps_of_part(x.parts - 1);
  Output found;
  found.to = m.y + ((x.batch * m.rows + r0) * m.columns + j0) * size_of(m.type);
  found.stride = m.columns * size_of(m.type);
  found.rows = std::min(SIDE, m.rows - r0);
  found.rows_of_step = steps > 0 ? (found.rows + steps - 1) / steps : 0;
  found.type = m.type, found.mask = first_bits(m.columns - j0), found.sums = sums;
  found.kept = x.a.kept == nullptr ? nullptr : x.a.kept + r0;
  __m512i bias = _mm512_setzero_si512();
  if (m.bias) bias = _mm512_maskz_loadu_epi16(found.mask, m.bias.of(x.batch) + j0);
  found.bias[0] = bf16_to_f32(_mm512_castsi512_si256(bias));
  found.bias[1] = bf16_to_f32(_mm512_extracti64x4_epi64(bias, 1));
  return found;
}

// sums[SIDE x SIDE] = or, if `added`, += a block times a panel; `write` is called before each step,
// since a core has time for it while tiles multiply. Tiles of rows are streamed: else they would drive the
// panel out of the L1 cache. Cache lines of `next` are fetched, `lines` before each step.
void multiply(const Word* a, const Word* b, long steps, bool added, float* sums, Output& write,
              const Word* next, long lines) {
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read
  if (added) {
    _tile_loadd(0, sums, SIDE * 4);
    _tile_loadd(1, sums + W, SIDE * 4);
    _tile_loadd(2, sums + W * SIDE, SIDE * 4);
    _tile_loadd(3, sums + W * SIDE + W, SIDE * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long s = 0; s < steps; s++, a += PART_WORDS, b += PART_WORDS) {
    for (long i = 0; i < lines; i++, next += W) __builtin_prefetch(next, 0, 2);
    write.step();
    _tile_stream_loadd(4, a, 64);
    _tile_stream_loadd(5, a + TILE_WORDS, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + TILE_WORDS, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, SIDE * 4);
  _tile_stored(1, sums + W, SIDE * 4);
  _tile_stored(2, sums + W * SIDE, SIDE * 4);
  _tile_stored(3, sums + W * SIDE + W, SIDE * 4);
  asm volatile("" ::: "memory");
}

// The sums of an item of some blocks, and the block of y that is still to be written.
class Sums {
 public:
  // Floats for the sums of two panels; with one part, of two blocks; 0 if `every` has all.
  static long floats(const Product& x, long blocks) {
    return x.every ? 0 : (x.parts > 1 ? 2 * blocks : 2) * BLOCK_SUMS;
  }
  Sums(const Product& of, long first, long blocks, float* memory)
      : x_(of), first_(first), blocks_(blocks), memory_(memory) {}
  ~Sums() { waiting_.write(waiting_.rows); }
  // Adds the product of a block and a panel at the depths of one part; y after the last depths. Cache
  // lines of `next` are fetched meanwhile.
  void add(long part, long block, long panel, const Word* a, const Word* b,
           const Word* next = nullptr, long lines = 0) {
    float* const sums = of(block, panel);
    const bool added = x_.p0 > 0 || part > 0;
    if (x_.any(block)) {
      multiply(a, b, x_.steps_of_part(part), added, sums, waiting_, next, lines);
      waiting_.write(waiting_.rows);
    }
    if (!x_.last(part)) return;
    waiting_.write(waiting_.rows);
    waiting_ = output(x_, block, panel, sums);
  }

 private:
  float* of(long block, long panel) {
    if (x_.every) return x_.every + (panel * x_.blocks + block) * BLOCK_SUMS;
    if (x_.parts > 1) return memory_ + (panel % 2 * blocks_ + block - first_) * BLOCK_SUMS;
    other_ = 1 - other_;
    return memory_ + other_ * BLOCK_SUMS;
  }
  const Product& x_;
  const long first_, blocks_;
  float* const memory_;
  long other_ = 0;
  Output waiting_;
};

void multiply_few(const Product& x, Pool& pool) {
  const long words = x.words_of_part();
  Scratch memory(x.blocks * x.words());
  Word* const a = take_words(memory, x.blocks * x.words());
  parallel(pool, x.blocks * x.parts, [&](long i) {
    if (x.any(i / x.parts)) pack(x, x.a, false, i / x.parts, i % x.parts, a + i * words);
  });
  parallel(pool, x.panels, [&](long panel) {
    Scratch own(words + Sums::floats(x, x.blocks));
    Word* const b = take_words(own, words);
    const Tiles tiles;
    Sums sums(x, 0, x.blocks, own.take(Sums::floats(x, x.blocks)));
    for (long part = 0; part < x.parts; part++) {
      pack(x, x.b, true, panel, part, b);
      for (long i = 0; i < x.blocks; i++) sums.add(part, i, panel, a + (i * x.parts + part) * words, b);
    }
  });
}

// Items of blocks of rows, as few as the L2 cache allows, and the same number for every thread.
long items_of(const Product& x, long threads) {
  const long most = threads * std::max(1l, ITEM_WORDS / x.words());
  return std::min((x.blocks + most - 1) / most * threads, x.blocks);
}

// Blocks of rows [first, first + own) and all panels, which are packed in b.
void multiply_rows(const Product& x, long first, long own, const Word* b) {
  const long words = x.words_of_part(), lines = (PART_WORDS / W + own - 1) / own;
  Scratch memory(own * x.words() + Sums::floats(x, own));
  Word* const a = take_words(memory, own * x.words());
  const Tiles tiles;
  Sums sums(x, first, own, memory.take(Sums::floats(x, own)));
  for (long i = 0; i < own * x.parts; i++) {
    const long block = first + i / x.parts;
    if (x.any(block)) pack(x, x.a, false, block, i % x.parts, a + i * words);
  }
  for (long j = 0; j < x.panels * x.parts; j++) {
    const long part = j % x.parts;
    const Word* const next = b + (j + 1) * words;
    for (long i = 0; i < own; i++)
      sums.add(part, first + i, j / x.parts, a + (i * x.parts + part) * words, b + j * words,
               next + i * lines * x.steps_of_part(part) * W,
               j + 1 < x.panels * x.parts ? lines : 0);
  }
}

void multiply_many(const Product& x, Pool& pool) {
  Scratch memory(x.panels * x.words());
  Word* const b = take_words(memory, x.panels * x.words());
  parallel(pool, x.panels * x.parts, [&](long i) {
    pack(x, x.b, true, i / x.parts, i % x.parts, b + i * x.words_of_part());
  });
  const long items = items_of(x, pool.threads());
  parallel(pool, items, [&](long item) {
    const long first = item * x.blocks / items, end = (item + 1) * x.blocks / items;
    multiply_rows(x, first, end - first, b);
  });
}

void multiply_batch(const Bf16Matmul& m, long batch, Pool& pool) {
  const Depths depths(m, batch);
  const long times = std::max(1l, (depths.count + DEPTH - 1) / DEPTH);
  const long most = steps_of((depths.count + times - 1) / times) * STEP;
  const long blocks = blocks_of(m.rows), panels = blocks_of(m.columns);
  const long floats = times > 1 ? blocks * panels * BLOCK_SUMS : 0;
  Scratch memory(floats);
  float* const every = times > 1 ? memory.take(floats) : nullptr;
  for (long i = 0; i < times; i++) {
    const long p0 = i * most, count = std::min(most, depths.count - p0);
    const Product x(m, batch, depths, p0, count, every);
    x.blocks * x.words() <= FEW_WORDS ? multiply_few(x, pool) : multiply_many(x, pool);
  }
}

}  // namespace

void matmul_bf16(const Bf16Matmul& m, Pool& pool) {
  for (long batch = 0; batch < m.batches; batch++) multiply_batch(m, batch, pool);
}

}  // namespace amx
}  // namespace jaxmha
