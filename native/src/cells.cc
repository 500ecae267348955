#include "cells.h"

#include <emmintrin.h>

#include <algorithm>

#include "parallel.h"
#include "problem.h"

namespace jaxmha {
namespace {

// Matrices of T queries and S keys; a byte has the bits of `packed` queries.
struct Mask {
  const uint8_t* data;
  long T, S, packed;
  long lines() const { return (T + packed - 1) / packed; }
  // The bits of line i that stand for queries.
  uint8_t valid(long i) const { return 0xff >> (8 - std::min(packed, T - i * packed)); }
};

inline __m128i all_ones() { return _mm_set1_epi8(-1); }

struct Sums {
  uint8_t any, all;
  Cell kind() const { return all == 0xff ? Cell::clear : any ? Cell::mixed : Cell::masked; }
};

// Of lines [first, end) and CELL_KEYS keys.
Sums of_whole_cell(const Mask& mask, const uint8_t* from, long first, long end) {
  __m128i any = _mm_setzero_si128(), all = _mm_set1_epi8(-1);
  for (long i = first; i < end; i++, from += mask.S) {
    const __m128i valid = _mm_set1_epi8(mask.valid(i)), none = _mm_andnot_si128(valid, all_ones());
    for (long k = 0; k < CELL_KEYS; k += 16) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k));
      any = _mm_or_si128(any, _mm_and_si128(x, valid));
      all = _mm_and_si128(all, _mm_or_si128(x, none));
    }
  }
  const bool some = _mm_movemask_epi8(_mm_cmpeq_epi8(any, _mm_setzero_si128())) != 0xffff;
  const bool each = _mm_movemask_epi8(_mm_cmpeq_epi8(all, all_ones())) == 0xffff;
  return {static_cast<uint8_t>(some), static_cast<uint8_t>(each ? 0xff : 0)};
}

Sums of_last_cell(const Mask& mask, const uint8_t* from, long first, long end, long keys) {
  Sums found{0, 0xff};
  for (long i = first; i < end; i++, from += mask.S)
    for (long k = 0; k < keys; k++) {
      found.any |= from[k] & mask.valid(i);
      found.all &= from[k] | ~mask.valid(i);
    }
  return found;
}

// Panel `panel` of a matrix, the `at`-th of all.
void find_panel(Cells& cells, const Mask& mask, long matrix, long panel, long at) {
  const long step = CELL_ROWS / mask.packed, line = panel * step;
  const long end_line = std::min(line + step, mask.lines());
  const uint8_t* const lines = mask.data + (matrix * mask.lines() + line) * mask.S;
  uint8_t* const kinds = cells.kinds.data() + at * cells.columns;
  long first = cells.columns, end = 0;
  for (long column = 0; column < cells.columns; column++) {
    const long k0 = column * CELL_KEYS, keys = std::min(CELL_KEYS, mask.S - k0);
    const Sums sums = keys == CELL_KEYS ? of_whole_cell(mask, lines + k0, line, end_line)
                                        : of_last_cell(mask, lines + k0, line, end_line, keys);
    kinds[column] = static_cast<uint8_t>(sums.kind());
    if (sums.kind() == Cell::masked) continue;
    first = std::min(first, column), end = column + 1;
  }
  cells.first[at] = std::min(first, end), cells.end[at] = end;
}

}  // namespace

void find_cells(Problem& p, Pool& pool) {
  const Conditions& c = p.conditions;
  const Pairs<const uint8_t>& of = c.bits ? c.bits : c.allowed;
  if (!of || (!c.bits && (!of.t || !of.s)) || p.T * p.S < 4 * CELL_ROWS * CELL_KEYS) return;
  const Mask mask{of.data, p.T, p.S, c.bits ? 8 : 1};
  const long last = *std::max_element(of.start.begin(), of.start.end());
  const long matrices = last / (mask.lines() * p.S) + (of.n ? p.N : 1);
  Cells& cells = p.conditions.cells;
  cells.panels = (p.T + CELL_ROWS - 1) / CELL_ROWS;
  cells.columns = (p.S + CELL_KEYS - 1) / CELL_KEYS;
  const long panels = matrices * cells.panels;
  cells.kinds.resize(panels * cells.columns);
  cells.first.resize(panels), cells.end.resize(panels);
  parallel(pool, panels, [&](long at) {
    find_panel(cells, mask, at / cells.panels, at % cells.panels, at);
  });
}

}  // namespace jaxmha
