// The kernels, as every ISA offers them.
#pragma once
#include "cache_step.h"
#include "isas.h"
#include "matmul.h"
#include "parallel.h"
#include "problem.h"

namespace jaxmha {

#define JAXMHA_KERNELS(isa)                                     \
  namespace isa {                                               \
  void attend(const Forward& forward, Pool& pool);              \
  void attend_backward(const Backward& backward, Pool& pool);   \
  void bias_gradient(const BiasGradient& gradient, Pool& pool); \
  void attend_cache(const CacheStep& step, Pool& pool);         \
  void matmul(const Matmul& matmul, Pool& pool);                \
  void matmul_bf16(const Bf16Matmul& matmul, Pool& pool);       \
  }
JAXMHA_EVERY_ISA(JAXMHA_KERNELS)
#undef JAXMHA_KERNELS
#if defined(JAXMHA_AMX)
namespace amx {  // beside the kernels of AVX-512
void attend(const Forward& forward, Pool& pool);
void attend_backward(const Backward& backward, Pool& pool);
void matmul(const Matmul& matmul, Pool& pool);
void matmul_bf16(const Bf16Matmul& matmul, Pool& pool);
}
#endif

// Rows of an item of the forward pass: many, so that keys are read seldom, but enough items.
inline long rows_of_item(const Problem& p, long threads) {
  long rows = 128;
  const auto items = [&] { return p.B * p.N * ((p.T + rows - 1) / rows); };
  if (items() < 4 * threads) rows = 64;
  while (rows > 16 && items() < threads) rows /= 2;
  return rows;
}

// Parts of the query rows of a key head that are items of the backward pass: enough items for
// threads, of two panels each where those are enough, within `most` keys of gradients in memory.
inline long parts_of_backward(const Problem& p, long threads, long rows, long most) {
  const long heads = p.B * p.K, panels = p.group() * ((p.T + rows - 1) / rows);
  if (threads == 1) return 1;
  const long finest = heads * (panels / 2) >= threads ? panels / 2 : panels;
  const long wanted = std::min((4 * threads + heads - 1) / heads, finest);
  return std::max(1l, std::min(wanted, most / (heads * p.S)));
}

}  // namespace jaxmha
