#include "cells.h"

#include <algorithm>
#include <cstring>

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

// GCC's vectors of 16 bytes, which compile for every instruction set.
using Bytes __attribute__((vector_size(16))) = uint8_t;
using Words __attribute__((vector_size(16))) = uint64_t;

struct Sums {
  uint8_t any, all;
  Cell kind() const { return all == 0xff ? Cell::clear : any ? Cell::mixed : Cell::masked; }
};

// Of lines [first, end) and CELL_KEYS keys.
Sums of_whole_cell(const Mask& mask, const uint8_t* from, long first, long end) {
  Bytes any = {}, missing = {};
  for (long i = first; i < end; i++, from += mask.S) {
    const Bytes valid = Bytes{} + mask.valid(i);
    for (long k = 0; k < CELL_KEYS; k += 16) {
      Bytes x;
      std::memcpy(&x, from + k, sizeof(x));
      any |= x & valid, missing |= ~x & valid;
    }
  }
  const auto some = reinterpret_cast<Words>(any), none = reinterpret_cast<Words>(missing);
  return {static_cast<uint8_t>((some[0] | some[1]) != 0),
          static_cast<uint8_t>((none[0] | none[1]) != 0 ? 0 : 0xff)};
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
