// The instruction sets that a library has kernels for, the widest first, and whether the CPU and its
// operating system have them.
#pragma once
namespace jaxmha {

#if defined(__x86_64__)
#define JAXMHA_EVERY_ISA(of) of(avx512) of(avx2)
inline bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
#else
#define JAXMHA_EVERY_ISA(of) of(neon)
inline bool has_neon() { return true; }  // a part of every AArch64
#endif

}  // namespace jaxmha
