// The instruction sets that a library has kernels for, the widest first, and whether the CPU and its
// operating system have them.
#pragma once
#if defined(JAXMHA_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
#if defined(JAXMHA_AMX)
// Also asks Linux for the registers of tiles, which a process does not have otherwise.
inline bool has_amx() {
  constexpr unsigned TILE_AND_BF16 = 1u << 24 | 1u << 22;
  constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned AVX512_BF16 = 1u << 5;
  unsigned a, b, c, d, more;
  return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 &&
         (d & TILE_AND_BF16) == TILE_AND_BF16 && __get_cpuid_count(7, 1, &more, &b, &c, &d) != 0 &&
         (more & AVX512_BF16) != 0 && syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}
#endif
#else
#define JAXMHA_EVERY_ISA(of) of(neon)
inline bool has_neon() { return true; }  // a part of every AArch64
#endif

}  // namespace jaxmha
