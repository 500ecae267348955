// Buffers of XLA as operands of kernels. Every shape is checked: a compiled program may pass any
// buffers to a handler.
//
// Axes are counted from the last. All axes before those of an operand are batch axes; each has its
// full size or 1, so that vmap is one more of them.
#pragma once
#include <string>
#include <vector>

#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmha {

namespace ffi = xla::ffi;
using Sizes = std::vector<long>;

template <class E>
constexpr ffi::DataType type_of() {
  if (std::is_same_v<E, const float> || std::is_same_v<E, float>) return ffi::F32;
  if (std::is_same_v<E, const uint16_t>) return ffi::BF16;
  return std::is_same_v<E, const int32_t> ? ffi::S32 : ffi::PRED;
}

struct ConditionBuffers {
  ffi::AnyBuffer bias, allowed, bits, rows, keys, query_ids, key_ids, offset;
};

struct Attributes {
  float scale, rest, soft_cap;
  int64_t below, above;
  bool in_parts;
};

// Reads buffers; after the first that does not fit, `error` says which and why.
class Reader {
 public:
  // `out`: the buffer whose batch axes are all full: `... T N x`.
  explicit Reader(const ffi::AnyBuffer& out);
  // Broadcasts the batch axes of operands; `axes`: each operand's number of other axes.
  Reader(const std::vector<ffi::AnyBuffer>& operands, const Sizes& axes);

  Problem problem(const ffi::AnyBuffer& query, const ffi::AnyBuffer& key,
                  const ffi::AnyBuffer& value, const ConditionBuffers& others,
                  const Attributes& attributes);
  // `positions heads features` of a floating type; `full`: a result, with all batch axes.
  Heads heads(const char* name, const ffi::AnyBuffer& x, Sizes sizes, bool full = false);
  // An operand of `E` with axes `sizes`; a buffer without elements is absent.
  template <class E>
  Batched<E> batched(const char* name, const ffi::AnyBuffer& x, const Sizes& sizes,
                     ffi::DataType type = type_of<E>());
  template <class E>
  Pairs<E> pairs(const char* name, const ffi::AnyBuffer& x, const Sizes& sizes,
                 ffi::DataType type = type_of<E>());
  // `pairs`, or the diagonals `b n 1 (T + S - 1)` if there are several rows.
  Pairs<const float> bias(const ffi::AnyBuffer& x, const Sizes& sizes);
  // A float32 result with all batch axes.
  float* result(const char* name, const ffi::AnyBuffer& x, Sizes sizes);
  // The same of float32 or bfloat16, and which.
  char* result(const char* name, const ffi::AnyBuffer& x, Sizes sizes, Float& type);
  // For each entry of a result's batch axes (full size or 1): the batch rows that it sums.
  std::vector<std::vector<long>> parts(const char* name, const ffi::AnyBuffer& x, size_t axes);

  long batches() const { return batches_; }
  bool failed() const { return !error_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument("jaxmha_cpu: " + error_); }
  void fail(const char* name, const ffi::AnyBuffer& x, const std::string& expected);

 private:
  bool fits(const char* name, const ffi::AnyBuffer& x, const Sizes& sizes);
  std::vector<long> starts(const ffi::AnyBuffer& x, long elements) const;

  Sizes lead_;
  long batches_ = 1;
  std::string error_;
};

}  // namespace jaxmha
