// Few query rows over many keys, as in decoding.
#pragma once
#include "parallel.h"
#include "problem.h"
#include "simd.h"

namespace jaxmha {
namespace JAXMHA_ISA {

// True if rows of all query heads of a group are so few that reading keys takes the time. Not where
// a gradient follows: it computes the logits again, which has to round in the same way.
bool are_few_rows(const Forward& forward);

void attend_few_rows(const Forward& forward, Pool& pool);

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
