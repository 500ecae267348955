// Cells of a dense mask: blocks of CELL_ROWS queries and CELL_KEYS keys, of which no pair is allowed,
// some are, or all are. They are found once per call, for all heads that share the mask.
#pragma once
#include <cstdint>
#include <vector>

namespace jaxmha {

constexpr long CELL_ROWS = 64, CELL_KEYS = 32;

enum class Cell : uint8_t { masked = 0, mixed = 1, clear = 3 };

struct Cells {
  long panels = 0, columns = 0;  // of a matrix of T queries and S keys
  std::vector<uint8_t> kinds;    // matrices panels columns; empty: unknown
  // The columns outside which a panel has no allowed pair: `matrices panels`.
  std::vector<long> first, end;
};

struct Problem;
struct Pool;

// Fills the cells of bits or, without bits, of a dense mask that has all T queries and S keys.
void find_cells(Problem& problem, Pool& pool);

}  // namespace jaxmha
