// Rows of new tokens over a cache: keys and values are read once, where they lie, and widened in
// registers. An item is a range of slots of one key head; the states of the ranges are joined.
#include <cmath>

#include "cache_item.h"
#include "scores.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr long LEAST = 512;  // slots of an item

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
#define JAXMHA_VISIT(type) case Stored::type: visit<Stored::type>(w, block); break;
    switch (s.key.type) { JAXMHA_EVERY_STORED(JAXMHA_VISIT) }
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

// Joins the states of all ranges of a head.
void join(const CacheStep& s, long head, const States& states) {
  for (long row = 0; row < s.R; row++) {
    const long at = head * s.R + row;
    const Statistics all = join_row(states, row, s.h, Exponent(), s.out + at * s.h);
    s.row_max[at] = all.row_max, s.row_sum[at] = all.row_sum;
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
  for (long head = 0; head < heads; head++)
    join(s, head, {states + head * ranges * step, ranges, s.R, padded(s.h)});
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
