// The instruction of a loop that waits for another thread.
#pragma once

namespace jaxmha {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("isb" ::: "memory");  // tens of cycles; `yield` returns at once on most CPUs
#endif
}

}  // namespace jaxmha
