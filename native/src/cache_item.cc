// An item over a cache: its memory, and which keys of a block its rows attend.
#include "cache_item.h"

#include "scores.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr long MOST_FEW = 8;  // rows whose features lie in lanes

size_t floats_of(const CacheStep& s, bool few) {
  const long H = padded(s.H), h = padded(s.h), panels = (s.R + ROWS - 1) / ROWS;
  const long rows = few ? s.R * H : panels * s.H * ROWS;
  const long scores = few ? s.R * KEYS : KEYS * ROWS;
  return rows + KEYS * (H + h) + scores + 2 * ROWS + (s.R + ROWS) * KEYS / 4 + 8 * 16;
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

}  // namespace

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
    for (long panel = 0; panel < panels; panel++) {
      const long here = std::min(ROWS, s.R - panel * ROWS), width = padded(here);
      float* const to = rows + panel * s.H * ROWS;
      transpose(s.rows + (head * s.R + panel * ROWS) * s.H, s.H, here, s.H, to);
      for (long x = 1; x < s.H && width < ROWS; x++)  // lines in use lie side by side
        std::copy(to + x * ROWS, to + x * ROWS + width, to + x * width);
    }
  }
  state.clear(s.R, h);
}

bool decide(Item& w, Block& block) {
  const CacheStep& s = w.s;
  const long i = s.first[w.b], end = block.first + block.count - 1;
  const bool newest = block.first <= w.at && w.at < end;  // the token after it is the oldest
  const long least = w.token(newest ? w.at + 1 : block.first);
  const long most = w.token(newest ? w.at : end);
  block.clear = !s.allowed && least >= 0 && most <= i && least >= i + s.T - 1 - s.left;
  return block.clear || fill_pairs(w, block);
}

void clear_unattended(const Item& w, const Block& block, float* values) {
  if (!block.unattended) return;
  for (long key = 0; key < block.count; key++)
    if (!w.attended[key])
      std::fill(values + key * w.h, values + (key + 1) * w.h, 0.f);
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
