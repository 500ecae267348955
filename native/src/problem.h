// One call of attention, as the handlers give it to the kernels. Sizes by the dimension key of the
// project: B T S N K H h.
#pragma once
#include <cstdint>
#include <vector>

#include "cells.h"

namespace jaxmha {

enum class Float : uint8_t { f32, bf16, f16 };

inline long size_of(Float type) { return type == Float::f32 ? 4 : 2; }

// An operand with batch axes, of which each has its full size or 1: `start` of every batch row.
template <class E>
struct Batched {
  E* data = nullptr;  // null: the operand is absent
  std::vector<long> start;
  E* of(long b) const { return data + start[b]; }
  explicit operator bool() const { return data != nullptr; }
};

// `b n t s`; a step is 0 where the axis has size 1. Of diagonals, `b n 1 (T + S - 1)`, entry
// j - i + T - 1 is that of every pair (i, j): one step along t is one back.
template <class E>
struct Pairs : Batched<E> {
  long n = 0, t = 0, s = 0;
};

// Rows of heads, `B T N H` or `B S K H`: their type and sizes.
struct Heads : Batched<char> {
  Float type = Float::f32;
  long positions = 0, heads = 0, features = 0;
  long stride() const { return heads * features; }
  char* at(long b, long position, long head) const {
    return of(b) + ((position * heads + head) * features) * size_of(type);
  }
};

// Bounds of a row i on its keys j: i - below <= j <= i + above.
constexpr long FAR = 1l << 40;

struct Conditions {
  long below = FAR, above = FAR;
  Batched<const int32_t> offset;           // B; also j <= i + offset
  Batched<const uint8_t> rows, keys;       // B T, B S: valid positions
  std::vector<long> first_key, end_key;    // B: outside which no key is valid; empty: unknown
  Batched<const int32_t> query_ids, key_ids;  // B T, B S
  Pairs<const uint8_t> allowed;            // b n t s
  Pairs<const uint8_t> bits;               // b n t/8 s: bit r of byte i is row 8 i + r
  Cells cells;                             // of `bits`, or of `allowed`
};

struct Problem {
  long B, T, S, N, K, H, h;
  // The scale of the logits is scale * rest: queries are multiplied by a power of two, exactly, and
  // the exponent by a rest in [1, 2).
  float scale, rest, soft_cap;  // soft_cap 0: none
  bool in_parts;  // the call has some of the queries or keys; its backward pass may have others
  Heads query, key, value;
  Pairs<const float> bias;
  Conditions conditions;
  long group() const { return N / K; }
  // Terms of a partial sum of a score: rounding grows with the terms and with the number of parts,
  // and exp magnifies that of large logits. Parts cost time, which small problems spend elsewhere.
  // All kernels sum scores alike, so that the gradient finds those of the forward pass.
  // 0: sums are of float64.
  long terms() const { return exact() ? 0 : !few_scores() ? 16 : H <= 16 ? 4 : 8; }
  // The same of cotangents of weights, which no exp magnifies.
  long cotangent_terms() const { return exact() ? 0 : few_scores() ? 8 : 32; }
  bool exact() const { return !in_parts && T * S <= 1024; }
  bool few_scores() const { return !in_parts && T * S <= 4096; }
  // Soft caps and biases need whole logits; else scores and row statistics lack this factor.
  bool whole_logits() const { return bias || soft_cap != 0.f; }
  float exponent() const { return whole_logits() ? 1.f : rest; }
};

// Row statistics `B N T`: the largest logit (the lowest float32 where no key is allowed) and the
// sum of exponentials below it, 0 where no key is allowed.
struct Forward {
  Problem problem;
  Heads out;
  float *row_max, *row_sum;
  bool gradient;  // whether one reads the row statistics
};

struct Cotangents {
  Problem problem;
  Heads d_out;
  Batched<const float> row_max, row_sum, d_lse;  // B N T; d_lse may be absent
};

struct Backward : Cotangents {
  Heads out;  // of the forward pass, float32
  Heads d_query, d_key, d_value;
  float* delta;  // B N T: what the gradient of logits subtracts; also for that of the bias
};

struct BiasGradient : Cotangents {
  Batched<const float> delta;
  float* d_bias;  // parts n t s; of diagonals, t is 1
  long n, t, s;
  std::vector<std::vector<long>> batches;  // the batch rows that share a part
};

}  // namespace jaxmha
