// Matmuls of bfloat16 by the kernels of float32: of programs from a CPU with AMX, whose kernels take
// bfloat16 as it is. No other CPU is given them, so that this is short, not fast.
#include "kernels.h"
#include "rows.h"
#include "scratch.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

Batched<const float> widened(const Batched<const uint16_t>& from, long batch, long count,
                             Scratch& memory) {
  if (!from) return {};
  float* const to = memory.take(count);
  read_row(reinterpret_cast<const char*>(from.of(batch)), Float::bf16, count, to);
  return {to, {0}};
}

}  // namespace

void matmul_bf16(const Bf16Matmul& m, Pool& pool) {
  const long of_a = m.rows * m.depth, of_b = m.depth * m.columns, of_y = m.rows * m.columns;
  for (long batch = 0; batch < m.batches; batch++) {
    Scratch memory(Scratch::rounded(of_a) + Scratch::rounded(of_b) + Scratch::rounded(m.columns) +
                   of_y);
    Matmul one{};
    static_cast<MatmulSizes&>(one) = m;
    one.batches = 1;
    one.a = widened(m.a, batch, of_a, memory);
    one.b = widened(m.b, batch, of_b, memory);
    one.bias = widened(m.bias, batch, m.columns, memory);
    if (m.kept) one.kept = {m.kept.of(batch), {0}};
    one.y = memory.take(of_y);
    matmul(one, pool);
    write_row(one.y, m.type, of_y, m.y + batch * of_y * size_of(m.type));
  }
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
