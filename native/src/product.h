// Products of blocks of float32, from one register tile.
#pragma once
#include <algorithm>

#include "simd.h"

namespace jaxmha {
namespace JAXMHA_ISA {

static_assert(MR <= 6 && NR <= 4, "strip and product have a case for every number below");

// A matrix operand; element (i, p) lies at data[i * row + p * column]. One of both steps is 1.
struct Left {
  const float* data;
  long row, column;
  Left down(long rows) const { return {data + rows * row, row, column}; }
};

// What else is done before each step of a tile.
struct Nothing {
  void operator()() {}
};

// finish(c): c[M][N] vectors of A[M x depth] B[depth x N vectors]. `Unit`: A's column step is 1.
template <int M, int N, bool Unit, class Finish, class Each>
inline __attribute__((always_inline)) void tile(Left a, const float* __restrict b, long ldb,
                                                long depth, Finish&& finish, Each& each) {
  Vector c[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) c[i][j] = set1(0.f);
  const float* __restrict data = a.data;
  const long row = Unit ? a.row : 1, column = Unit ? 1 : a.column;
  Each own = each;  // in registers
  for (long p = 0; p < depth; p++) {
    own();
    Vector v[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) v[j] = load(b + p * ldb + j * W);
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
      const Vector x = set1(data[i * row + p * column]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) c[i][j] = fma(x, v[j], c[i][j]);
    }
  }
  each = own;
  finish(c);
}

// The use of a product: C = AB, C += AB, or row i of C = C * factors[i] + AB.
enum class Into { replaced, added, rescaled };

template <Into into, int M, int N>
struct Store {
  float* __restrict c;
  long ldc;
  const float* __restrict factors;
  inline __attribute__((always_inline)) void operator()(Vector (&x)[M][N]) const {
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) {
        float* to = c + i * ldc + j * W;
        if (into == Into::added) x[i][j] = add(load(to), x[i][j]);
        if (into == Into::rescaled) x[i][j] = fma(set1(factors[i]), load(to), x[i][j]);
        store(to, x[i][j]);
      }
  }
};

template <Into into, int M, int N, class Each>
__attribute__((noinline)) void piece(Left a, const float* b, long ldb, long depth, float* c,
                                     long ldc, const float* factors, Each& each) {
  const Store<into, M, N> finish{c, ldc, factors};
  // Rows of a large C are far apart and wait for memory at the end.
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) __builtin_prefetch(c + i * ldc + j * W, 1);
  if (a.column == 1)
    tile<M, N, true>(a, b, ldb, depth, finish, each);
  else
    tile<M, N, false>(a, b, ldb, depth, finish, each);
}

template <Into into, int N, class Each>
void strip(long rows, Left a, const float* b, long ldb, long depth, float* c, long ldc,
           const float* factors, Each& each) {
  const auto step = [&](auto size) {
    piece<into, size, N>(a, b, ldb, depth, c, ldc, factors, each);
    rows -= size, a = a.down(size), c += size * ldc;
    if (into == Into::rescaled) factors += size;
  };
  while (rows >= MR && rows != 8) step(std::integral_constant<int, MR>());
  if (rows == 8) step(std::integral_constant<int, 4>());  // 4 + 4 rather than 6 + 2
  switch (rows) {
    case 1: return piece<into, 1, N>(a, b, ldb, depth, c, ldc, factors, each);
    case 2: return piece<into, 2, N>(a, b, ldb, depth, c, ldc, factors, each);
    case 3: return piece<into, 3, N>(a, b, ldb, depth, c, ldc, factors, each);
    case 4: return piece<into, 4, N>(a, b, ldb, depth, c, ldc, factors, each);
    case 5: return piece<into, 5, N>(a, b, ldb, depth, c, ldc, factors, each);
  }
}

// C[rows x vectors * W], from A[rows x depth] and B[depth x vectors * W].
template <Into into, class Each>
void product(long rows, long vectors, long depth, Left a, const float* b, long ldb, float* c,
             long ldc, const float* factors, Each& each) {
  for (long j = 0; j < vectors; j += NR, b += NR * W, c += NR * W)
    switch (std::min<long>(NR, vectors - j)) {
      case 1: strip<into, 1>(rows, a, b, ldb, depth, c, ldc, factors, each); break;
      case 2: strip<into, 2>(rows, a, b, ldb, depth, c, ldc, factors, each); break;
      case 3:
        if constexpr (NR >= 3) strip<into, 3>(rows, a, b, ldb, depth, c, ldc, factors, each);
        break;
      case 4:
        if constexpr (NR >= 4) strip<into, 4>(rows, a, b, ldb, depth, c, ldc, factors, each);
        break;
    }
}

template <Into into>
void product(long rows, long vectors, long depth, Left a, const float* b, long ldb, float* c,
             long ldc, const float* factors = nullptr) {
  Nothing nothing;
  product<into>(rows, vectors, depth, a, b, ldb, c, ldc, factors, nothing);
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
