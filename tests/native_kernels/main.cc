// Prints the instruction set of the kernels of this CPU, then the error of every array that they
// compute against loops in float64, one a line: `case/array type error`.
#include "numbers.h"

int main() {
  const jaxmha::Kernels* const kernels = jaxmha::usable_kernels();
  if (kernels == nullptr) return 1;
  std::printf("%s\n", kernels->isa);
  check_attention(*kernels);
  check_cache(*kernels);
  check_matmul(*kernels);
}
