#include "conditions.h"

#include <cmath>

namespace jaxmha {
namespace JAXMHA_ISA {

View::View(const Problem& p, long b, long n) {
  const Conditions& c = p.conditions;
  T_ = p.T, S_ = p.S, below_ = c.below, above_ = c.above;
  if (c.offset) above_ = std::min<long>(above_, *c.offset.of(b));
  rows_ = c.rows ? c.rows.of(b) : nullptr;
  keys_ = c.keys ? c.keys.of(b) : nullptr;
  query_ids_ = c.query_ids ? c.query_ids.of(b) : nullptr;
  key_ids_ = c.key_ids ? c.key_ids.of(b) : nullptr;
  allowed_ = c.allowed ? c.allowed.of(b) + n * c.allowed.n : nullptr;
  bias_ = p.bias ? p.bias.of(b) + n * p.bias.n : nullptr;
  allowed_t_ = c.allowed.t, allowed_s_ = c.allowed.s, bias_t_ = p.bias.t, bias_s_ = p.bias.s;
  bits_ = c.bits ? c.bits.of(b) + n * c.bits.n : nullptr;
  cells_ = c.cells.kinds.empty() ? nullptr : &c.cells;
  if (cells_)
    first_panel_ = cells_->panels * (bits_ ? (bits_ - c.bits.data) / ((T_ + 7) / 8 * S_)
                                           : (allowed_ - c.allowed.data) / (T_ * S_));
  first_key_ = c.first_key.empty() ? 0 : c.first_key[b];
  end_key_ = c.end_key.empty() ? S_ : c.end_key[b];
  capped_ = p.soft_cap != 0.f;
  conditions_ = below_ < T_ || above_ < S_ - 1 || rows_ || keys_ || key_ids_ || allowed_ || bits_ ||
                bias_;
}

Range View::keys_of(long r0, long rows) const {
  long first = std::max(first_key_, r0 - below_), end = std::min(end_key_, r0 + rows + above_);
  if (cells_) {
    long first_column = cells_->columns, end_column = 0;
    for (long panel = r0 / CELL_ROWS; panel <= (r0 + rows - 1) / CELL_ROWS; panel++) {
      const long at = first_panel_ + panel;
      if (cells_->first[at] == cells_->end[at]) continue;
      first_column = std::min(first_column, cells_->first[at]);
      end_column = std::max(end_column, cells_->end[at]);
    }
    first = std::max(first, first_column * CELL_KEYS), end = std::min(end, end_column * CELL_KEYS);
  }
  return {first, std::max(first, end)};
}

Cell View::cell(long r0, long rows, long k0, long keys) const {
  if (!cells_) return Cell::mixed;
  uint8_t any = 0, all = static_cast<uint8_t>(Cell::clear);
  for (long panel = r0 / CELL_ROWS; panel <= (r0 + rows - 1) / CELL_ROWS; panel++) {
    const uint8_t* const kinds = cells_->kinds.data() + (first_panel_ + panel) * cells_->columns;
    for (long column = k0 / CELL_KEYS; column <= (k0 + keys - 1) / CELL_KEYS; column++)
      any |= kinds[column], all &= kinds[column];
  }
  if (!any) return Cell::masked;
  return all == static_cast<uint8_t>(Cell::clear) ? Cell::clear : Cell::mixed;
}

long View::next_key(long r0, long rows, long k, long end) const {
  while (k < end && cell(r0, rows, k, 1) == Cell::masked) k = (k / CELL_KEYS + 1) * CELL_KEYS;
  return std::min(k, end);
}

Range View::attended_part(long r0, long rows, long k0, long keys) const {
  const Range seen = keys_of(r0, rows);
  const long end = std::min(k0 + keys, seen.end);
  Range part{next_key(r0, rows, std::max(k0, seen.first), end), end};
  while (!part.empty() && cell(r0, rows, part.end - 1, 1) == Cell::masked)
    part.end = (part.end - 1) / CELL_KEYS * CELL_KEYS;
  return part;
}

bool View::pair(long i, long j) const {
  if (j > i + above_ || j < i - below_ || !valid_row(i)) return false;
  if (query_ids_ && query_ids_[i] != key_ids_[j]) return false;
  if (allowed_ && !allowed_[i * allowed_t_ + j * allowed_s_]) return false;
  if (bits_ && !(bits_[i / 8 * S_ + j] >> i % 8 & 1)) return false;
  return !bias_ || bias_[i * bias_t_ + j * bias_s_] != -INFINITY;
}

bool View::attended(long j) const {
  if (keys_ && !keys_[j]) return false;
  const long end = std::min(T_, j + below_ + 1);
  for (long i = std::max(0l, j - above_); i < end; i++)
    if (pair(i, j)) return true;
  return false;
}

// Each function below applies one condition; it returns true if it may mask a pair.

bool View::diagonal(long r0, long rows, long k0, long keys, uint8_t* allowed) const {
  const bool right = k0 + keys - 1 > r0 + above_, left = k0 < r0 + rows - 1 - below_;
  if (!right && !left) return false;
  for (long j = 0; j < keys; j++) {
    const long first = std::clamp(k0 + j - above_ - r0, 0l, ROWS);
    const long end = std::clamp(k0 + j + below_ - r0 + 1, first, ROWS);
    std::memset(allowed + j * ROWS, 0, first);
    std::memset(allowed + j * ROWS + end, 0, ROWS - end);
  }
  return true;
}

bool View::apply_keys(long k0, long keys, uint8_t* allowed) const {
  bool some = false;
  for (long j = 0; j < keys; j++)
    if (!keys_[k0 + j]) {
      std::memset(allowed + j * ROWS, 0, ROWS);
      some = true;
    }
  return some;
}

bool View::apply_segments(long r0, long rows, long k0, long keys, uint8_t* allowed) const {
  int32_t ids[ROWS];
  bool one = true;
  for (long r = 0; r < ROWS; r++) ids[r] = query_ids_[r0 + std::min(r, rows - 1)];
  for (long r = 1; r < ROWS; r++) one &= ids[r] == ids[0];
  for (long j = 0; j < keys; j++) one &= key_ids_[k0 + j] == ids[0];
  if (one) return false;
  for (long j = 0; j < keys; j++) {
    const int32_t id = key_ids_[k0 + j];
    uint8_t* const to = allowed + j * ROWS;
    for (long r = 0; r < ROWS; r++) to[r] &= ids[r] == id;
  }
  return true;
}

bool View::apply_array(long r0, long rows, long k0, long keys, uint8_t* allowed) const {
  const uint8_t* const from = allowed_ + r0 * allowed_t_ + k0 * allowed_s_;
  long r = 0;
  if (allowed_t_ && allowed_s_)
    for (; r + 8 <= rows; r += 8) {
      long j = 0;
      for (; j + 8 <= keys; j += 8)
        and_transposed8(from + r * allowed_t_ + j, allowed_t_, allowed + j * ROWS + r, ROWS);
      for (; j < keys; j++)
        for (long i = r; i < r + 8; i++) allowed[j * ROWS + i] &= from[i * allowed_t_ + j];
    }
  for (long j = 0; j < keys; j++)
    for (long i = r; i < rows; i++)
      allowed[j * ROWS + i] &= from[i * allowed_t_ + j * allowed_s_];
  return true;
}

// The bits of every byte, as eight bytes of 0 or 1.
struct Bits {
  uint64_t bytes[256] = {};
  constexpr Bits() {
    for (int byte = 0; byte < 256; byte++)
      for (int bit = 0; bit < 8; bit++)
        bytes[byte] |= static_cast<uint64_t>(byte >> bit & 1) << 8 * bit;
  }
};
constexpr Bits BITS;

// Rows from r0, a multiple of 8, on.
bool View::apply_bits(long r0, long rows, long k0, long keys, uint8_t* allowed) const {
  for (long r = 0; r < rows; r += 8) {
    const uint8_t* const from = bits_ + (r0 + r) / 8 * S_ + k0;
    for (long j = 0; j < keys; j++) {
      uint64_t x;
      std::memcpy(&x, allowed + j * ROWS + r, 8);
      x &= BITS.bytes[from[j]];
      std::memcpy(allowed + j * ROWS + r, &x, 8);
    }
  }
  return true;
}

void View::apply_bias(long r0, long rows, long k0, long keys, uint8_t* allowed,
                      float* bias) const {
  const float* const from = bias_ + r0 * bias_t_ + k0 * bias_s_;
  if (bias_t_ && bias_s_) {
    transpose(from, bias_t_, rows, keys, bias);
  } else {
    for (long j = 0; j < keys; j++)
      for (long r = 0; r < ROWS; r++)
        bias[j * ROWS + r] = from[std::min(r, rows - 1) * bias_t_ + j * bias_s_];
  }
  for (long i = 0; i < keys * ROWS; i++) allowed[i] &= bias[i] != -INFINITY;
}

Tile View::tile(long r0, long rows, long k0, long keys, uint8_t* allowed, float* bias) const {
  const Cell kind = cell(r0, rows, k0, keys);  // of bits, else of `allowed`
  if (kind == Cell::masked) return Tile::masked;
  bool some = false;
  if (conditions_) {
    std::memset(allowed, 1, keys * ROWS);
    some |= diagonal(r0, rows, k0, keys, allowed);
    if (keys_) some |= apply_keys(k0, keys, allowed);
    if (key_ids_) some |= apply_segments(r0, rows, k0, keys, allowed);
    if (allowed_ && (bits_ || kind != Cell::clear))
      some |= apply_array(r0, rows, k0, keys, allowed);
    if (bits_ && kind != Cell::clear) some |= apply_bits(r0, rows, k0, keys, allowed);
    if (bias_) apply_bias(r0, rows, k0, keys, allowed, bias);
  } else if (capped_) {
    std::memset(allowed, 1, keys * ROWS);
  }
  if (some || bias_) {
    uint8_t found = 0;
    for (long j = 0; j < keys; j++)
      for (long r = 0; r < rows; r++) found |= allowed[j * ROWS + r];
    if (!found) return Tile::masked;
  }
  return some || bias_ || capped_ ? Tile::mixed : Tile::clear;
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
