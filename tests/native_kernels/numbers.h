// Random numbers of every stored type and what they mean in float64, for kernels without JAX.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "../../native/src/library.h"

using jaxmha::Stored;

constexpr double NaN = std::numeric_limits<double>::quiet_NaN();
inline std::mt19937 random_bits(7);  // the same on every platform

// Bits of exponent and mantissa; no exponent: an integer.
struct Format {
  int exponent, mantissa;
  explicit Format(Stored type) {
    constexpr int BITS[][2] = {{8, 23}, {8, 7}, {5, 10}, {0, 7}, {4, 3}, {5, 2}};
    exponent = BITS[static_cast<int>(type)][0], mantissa = BITS[static_cast<int>(type)][1];
  }
  uint32_t fraction() const { return (1u << mantissa) - 1; }
  int highest() const { return (1 << exponent) - 1; }
  int bias() const { return highest() / 2; }
};

inline double decoded(uint32_t bits, Stored type) {
  if (type == Stored::s8) return static_cast<int8_t>(bits);
  const Format of(type);
  const uint32_t fraction = bits & of.fraction();
  const int power = bits >> of.mantissa & of.highest();
  if (power == of.highest() && (type != Stored::e4m3 || fraction == of.fraction())) return NaN;
  const double whole = power ? fraction + of.fraction() + 1. : fraction;
  const double size = std::ldexp(whole, std::max(power, 1) - of.bias() - of.mantissa);
  return bits >> (of.exponent + of.mantissa) & 1 ? -size : size;
}

struct Numbers {
  Stored type;
  std::vector<char> bytes;
  Numbers(Stored type, long count) : type(type), bytes(count * jaxmha::size_of(type)) {}
  char* data() { return bytes.data(); }
  float* floats() { return reinterpret_cast<float*>(bytes.data()); }
  long count() const { return bytes.size() / jaxmha::size_of(type); }
  double at(long i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * jaxmha::size_of(type), jaxmha::size_of(type));
    return decoded(bits, type);
  }
  void set(long i, uint32_t bits) {
    std::memcpy(bytes.data() + i * jaxmha::size_of(type), &bits, jaxmha::size_of(type));
  }
  void set_nan(long first, long many) {
    const Format of(type);
    for (long i = first; i < first + many && type != Stored::s8; i++)
      set(i, static_cast<uint32_t>(of.highest()) << of.mantissa | of.fraction());
  }
};

// Of sizes from 1/4 to 2, some of them subnormal or zero; integers: any.
inline Numbers random_numbers(Stored type, long count) {
  Numbers found(type, count);
  const Format of(type);
  for (long i = 0; i < count; i++) {
    const uint32_t bits = random_bits(), sign = bits >> 31, small = bits >> 24 & 15;
    const uint32_t power = small ? of.bias() - bits % 3 : 0;
    const uint32_t fraction = random_bits() & of.fraction();
    found.set(i, type == Stored::s8 ? bits >> 8
                                    : (sign << of.exponent | power) << of.mantissa | fraction);
  }
  return found;
}

// Threads of their own, in place of those of XLA.
struct Threads : jaxmha::Pool {
  std::vector<std::thread> all;
  long threads() override { return 3; }
  void spawn(std::function<void()> task) override { all.emplace_back(std::move(task)); }
  ~Threads() override {
    for (auto& one : all) one.join();
  }
};

// Prints the largest error relative to the largest expected number, and the type that rounds it.
inline void compare(const char* name, const Numbers& got, const std::vector<double>& expected) {
  double error = 0., largest = 0.;
  for (long i = 0; i < got.count(); i++) {
    const double x = got.at(i), y = expected[i];
    if (std::isnan(x) && std::isnan(y)) continue;
    error = std::isnan(x) || std::isnan(y) ? INFINITY : std::max(error, std::abs(x - y));
    if (std::isinf(error)) break;
    largest = std::max(largest, std::abs(y));
  }
  constexpr const char* TYPES[] = {"float32", "bfloat16", "float16"};
  std::printf("%s %s %.3g\n", name, TYPES[static_cast<int>(got.type)],
              error / (largest ? largest : 1.));
}

void check_attention(const jaxmha::Kernels& kernels);
void check_cache(const jaxmha::Kernels& kernels);
void check_matmul(const jaxmha::Kernels& kernels);
