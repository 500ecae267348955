// Keys and values of one head, copied to consecutive rows: rows that lie a multiple of 2 KiB apart
// would collide in the caches.
#pragma once
#include "conditions.h"
#include "problem.h"

namespace jaxmha {
namespace JAXMHA_ISA {

using Usable = bool (*)(const float* numbers, long n);

// True if any query of a key head attends key j; by a loop, for the few keys that need it.
bool attended_by_group(const Problem& problem, long b, long kv, long j);

// Copies keys [k0, k0 + count) of batch row b and head kv to rows of `key_width` and
// `value_width`, both padded by 0. A key that is not usable and that no query attends becomes 0:
// its weight of 0 would not keep NaN out of sums.
void copy_keys(const Problem& problem, long b, long kv, long k0, long count, long key_width,
               long value_width, float* keys, float* values, Usable usable = all_finite);

// The keys outside which no query of a key head attends.
Range keys_of_head(const Problem& problem, long b, long kv);

// True if keys [k0, k0 + count) and their values are all finite. They are then in the cache.
bool finite_keys(const Problem& problem, long b, long kv, long k0, long count);

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
