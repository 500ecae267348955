// Questions that the library answers before any of its handlers is registered.
#pragma once
#include "kernels.h"

namespace jaxmha {

// The kernels of one instruction set.
struct Kernels {
  const char* isa;
  bool (*usable)();
  void (*attend)(const Forward&, Pool&);
  void (*attend_backward)(const Backward&, Pool&);
  void (*bias_gradient)(const BiasGradient&, Pool&);
  void (*attend_cache)(const CacheStep&, Pool&);
  void (*matmul)(const Matmul&, Pool&);
  void (*matmul_bf16)(const Bf16Matmul&, Pool&);
};

// Those of the widest instruction set that this CPU and its operating system have, and that
// JAXMHA_NATIVE does not rule out; null: none.
const Kernels* usable_kernels();

}  // namespace jaxmha

extern "C" {
const char* jaxmha_cpu_version();       // of the distribution
const char* jaxmha_cpu_isa();           // "amx", "avx512", "avx2", "neon", or "" where no kernel can run
int jaxmha_cpu_interface();             // of the handlers: their operands and attributes
int jaxmha_cpu_ffi_major();             // of the headers of XLA that they were compiled with
int jaxmha_cpu_ffi_minor();
// Items of work that a problem is cut into, forward or backward.
long jaxmha_cpu_items(int backward, long B, long T, long S, long N, long K, long threads);
}
