// The conditions of one batch row and query head, tile by tile. A tile has some keys and the ROWS
// rows of a panel, transposed: `keys ROWS`.
#pragma once
#include <algorithm>
#include <cstring>

#include "problem.h"
#include "rows.h"

namespace jaxmha {
namespace JAXMHA_ISA {

enum class Tile { masked, clear, mixed };  // no pair is allowed, all are, some are

struct Range {
  long first, end;
  bool empty() const { return end <= first; }
};

class View {
 public:
  View(const Problem& problem, long b, long n);

  // The keys outside which none is valid in this batch row.
  Range valid_keys() const { return {first_key_, end_key_}; }
  // The keys outside which rows [r0, r0 + rows) attend nothing.
  Range keys_of(long r0, long rows) const;
  // The first key from k on, below `end`, in a cell that is not masked; else `end`.
  long next_key(long r0, long rows, long k, long end) const;
  // The keys of [k0, k0 + keys) that these rows may attend: without masked cells at both ends.
  Range attended_part(long r0, long rows, long k0, long keys) const;
  bool valid_row(long r) const { return rows_ == nullptr || rows_[r]; }
  // True if any row of [0, T) attends key j; by a loop, for the few keys that need it.
  bool attended(long j) const;
  // True if some pairs may be masked, by anything.
  bool any() const { return conditions_; }

  // Decides on a tile, and fills allowed and bias (`keys ROWS`) where it is mixed. A tile with a
  // bias or a soft cap is never clear.
  Tile tile(long r0, long rows, long k0, long keys, uint8_t* allowed, float* bias) const;
  bool has_bias() const { return bias_ != nullptr; }

 private:
  bool pair(long i, long j) const;
  // Of the cells that rows [r0, r0 + rows) and keys [k0, k0 + keys) lie in; mixed: unknown.
  Cell cell(long r0, long rows, long k0, long keys) const;
  bool diagonal(long r0, long rows, long k0, long keys, uint8_t* allowed) const;
  bool apply_keys(long k0, long keys, uint8_t* allowed) const;
  bool apply_segments(long r0, long rows, long k0, long keys, uint8_t* allowed) const;
  bool apply_array(long r0, long rows, long k0, long keys, uint8_t* allowed) const;
  bool apply_bits(long r0, long rows, long k0, long keys, uint8_t* allowed) const;
  void apply_bias(long r0, long rows, long k0, long keys, uint8_t* allowed, float* bias) const;

  long T_, S_, below_, above_, first_key_, end_key_;
  bool conditions_, capped_;
  const uint8_t *rows_, *keys_, *allowed_, *bits_;
  const int32_t *query_ids_, *key_ids_;
  const float* bias_;
  const Cells* cells_;  // null: unknown
  long first_panel_;    // of the mask of this head
  long allowed_t_, allowed_s_, bias_t_, bias_s_;
};

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
