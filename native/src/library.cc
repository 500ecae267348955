#include "library.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include "xla/ffi/api/c_api.h"

namespace jaxmha {
namespace {

#define JAXMHA_TABLE(isa)                                                                     \
  {#isa, has_##isa, isa::attend, isa::attend_backward, isa::bias_gradient, isa::attend_cache, \
   isa::matmul, isa::matmul_bf16},
const Kernels EVERY[] = {
#if defined(JAXMHA_AMX)
    {"amx", has_amx, amx::attend, amx::attend_backward, avx512::bias_gradient,
     avx512::attend_cache, amx::matmul, amx::matmul_bf16},
#endif
    JAXMHA_EVERY_ISA(JAXMHA_TABLE)};
#undef JAXMHA_TABLE

const Kernels* found_kernels() {
  const char* const given = std::getenv("JAXMHA_NATIVE");
  const std::string_view named = given == nullptr ? "" : given;
  if (named == "none") return nullptr;  // as on a CPU that is too old
  const auto* widest = std::find_if(std::begin(EVERY), std::end(EVERY),
                                    [&](const Kernels& one) { return named == one.isa; });
  if (widest == std::end(EVERY)) widest = std::begin(EVERY);
  const auto* const found = std::find_if(widest, std::end(EVERY),
                                         [](const Kernels& one) { return one.usable(); });
  return found == std::end(EVERY) ? nullptr : found;
}

}  // namespace

const Kernels* usable_kernels() {
  static const Kernels* const found = found_kernels();
  return found;
}

}  // namespace jaxmha

#pragma GCC visibility push(default)
const char* jaxmha_cpu_version() { return JAXMHA_CPU_VERSION; }
const char* jaxmha_cpu_isa() {
  const jaxmha::Kernels* const kernels = jaxmha::usable_kernels();
  return kernels == nullptr ? "" : kernels->isa;
}
int jaxmha_cpu_interface() { return JAXMHA_CPU_INTERFACE; }
int jaxmha_cpu_ffi_major() { return XLA_FFI_API_MAJOR; }
int jaxmha_cpu_ffi_minor() { return XLA_FFI_API_MINOR; }
long jaxmha_cpu_items(int backward, long B, long T, long S, long N, long K, long threads) {
  jaxmha::Problem p{};
  p.B = B, p.T = T, p.S = S, p.N = N, p.K = K;
  if (backward) return B * K * jaxmha::parts_of_backward(p, threads, 64, 1l << 20);
  const long rows = jaxmha::rows_of_item(p, threads);
  return B * N * ((T + rows - 1) / rows);
}
#pragma GCC visibility pop
