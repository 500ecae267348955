// A thin layer over AVX-512, AVX2 + FMA and NEON: all other code is written once and compiled per
// ISA. This header chooses one; simd_neon.h has the same names as the others.
//
// The objects of an ISA are linked after those of every narrower one (build_library.py), so that a
// function of the standard library that both contain is taken from the narrower.
#pragma once

#if defined(__AVX512F__)
#define JAXMHA_ISA avx512
#include "simd_avx512.h"
#include "simd_x86.h"
#elif defined(__AVX2__)
#define JAXMHA_ISA avx2
#include "simd_avx2.h"
#include "simd_x86.h"
#elif defined(__aarch64__)
#define JAXMHA_ISA neon
#include "simd_neon.h"
#else
#error "no kernels for this instruction set"
#endif
