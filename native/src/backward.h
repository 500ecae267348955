// The backward pass without its arithmetic: items, and the sums of gradients of keys over them.
#pragma once
#include "parallel.h"
#include "rows.h"
#include "scratch.h"

namespace jaxmha {
namespace JAXMHA_ISA {

struct Sizes {
  long H, h;           // padded
  long panels, parts;  // of the query rows of a key head
  Sizes(const Problem& p, long threads);
  size_t floats_of_head(const Problem& p) const { return Scratch::rounded(p.S * (H + h)); }
};

// Writes the gradients of every `parts`-th panel of query rows of a key head, from the part on, and
// what they add to those of its keys and values: sums `S H'` and `S h'`.
using VisitPart = void (*)(const Backward& g, const Sizes& sizes, long head, long part, float* sums);

void attend_backward(const Backward& g, Pool& pool, VisitPart visit);

// The part in float32.
void visit_part(const Backward& g, const Sizes& sizes, long head, long part, float* sums);

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
