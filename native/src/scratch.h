// Scratch memory, aligned for vectors.
#pragma once
#include <cstddef>
#include <memory>

namespace jaxmha {

// Memory of a call. Buffers of up to KEPT bytes in all are kept for later calls, since fresh pages
// cost as much as filling them several times; others are given back at once.
class Scratch {
 public:
  static constexpr size_t KEPT = size_t{64} << 20;
  explicit Scratch(size_t floats);  // throws std::bad_alloc
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // The next part, of `floats`; it begins at a cache line.
  float* take(size_t floats) {
    float* found = data_ + used_;
    used_ += rounded(floats);
    return found;
  }
  static size_t rounded(size_t floats) { return (floats + 15) / 16 * 16; }

 private:
  float* data_;
  size_t floats_, used_ = 0;
};

}  // namespace jaxmha
