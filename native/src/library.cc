#include "library.h"

#include <cstdlib>
#include <string_view>

#include "kernels.h"
#include "xla/ffi/api/c_api.h"

namespace jaxmha {
namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

Isa found_isa() {
  __builtin_cpu_init();
  const char* const given = std::getenv("JAXMHA_NATIVE");
  const std::string_view named = given == nullptr ? "" : given;
  if (named == "none") return Isa::none;  // as on a CPU that is too old
  if (has_avx512() && named != "avx2") return Isa::avx512;
  return has_avx2() ? Isa::avx2 : Isa::none;
}

}  // namespace

Isa usable_isa() {
  static const Isa found = found_isa();
  return found;
}

}  // namespace jaxmha

#pragma GCC visibility push(default)
const char* jaxmha_cpu_version() { return JAXMHA_CPU_VERSION; }
const char* jaxmha_cpu_isa() {
  const jaxmha::Isa isa = jaxmha::usable_isa();
  return isa == jaxmha::Isa::avx512 ? "avx512" : isa == jaxmha::Isa::avx2 ? "avx2" : "";
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
