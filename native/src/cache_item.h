// The work of one item over a cache: rows of one key head, and a range of slots. Shared by the loops
// over few rows and over many.
#pragma once
#include <algorithm>

#include "few.h"
#include "kernels.h"
#include "scratch.h"
#include "state.h"

namespace jaxmha {
namespace JAXMHA_ISA {

// Memory that is fetched while something else is computed, `each` bytes per step of a tile: into
// the L2 cache, since the L1 cache holds what is computed with.
struct Ahead {
  const char* at;
  long each;
  Ahead(const char* from, long bytes, long steps)
      : at(from), each(from == nullptr ? 0 : (bytes + steps - 1) / steps) {}
  void operator()() {
    __builtin_prefetch(at, 0, 2);
    at += each;
  }
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

// Finds whether all rows attend all keys of a block, else which; false: none attends any.
bool decide(Item& w, Block& block);

// Sets values to zero whose keys no row attends: their weight is 0, but 0 * NaN is NaN.
void clear_unattended(const Item& w, const Block& block, float* values);

// Adds a block to the state of the rows.
template <Stored type>
void visit_few(Item& w, const Block& block);
template <Stored type>
void visit_many(Item& w, const Block& block);

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
