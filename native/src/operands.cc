#include "operands.h"

#include <algorithm>

namespace jaxmha {
namespace {

std::string shown(const Sizes& sizes) {
  std::string found = "(";
  for (const long size : sizes) found += (found.size() > 1 ? ", " : "") + std::to_string(size);
  return found + ")";
}

Sizes sizes_of(const ffi::AnyBuffer& x) { return {x.dimensions().begin(), x.dimensions().end()}; }

}  // namespace

Reader::Reader(const ffi::AnyBuffer& out) {
  const Sizes sizes = sizes_of(out);
  if (sizes.size() < 3) {
    fail("out", out, "at least axes (T, N, h)");
    return;
  }
  lead_.assign(sizes.begin(), sizes.end() - 3);
  for (const long size : lead_) batches_ *= size;
  if (!out.element_count()) fail("out", out, "sizes of at least 1");
}

Reader::Reader(const std::vector<ffi::AnyBuffer>& operands, const Sizes& axes) {
  for (size_t i = 0; i < operands.size(); i++) {
    Sizes sizes = sizes_of(operands[i]);
    if (!operands[i].element_count()) continue;
    if (static_cast<long>(sizes.size()) < axes[i])
      fail("operand", operands[i], "more axes");
    if (failed()) return;
    sizes.resize(sizes.size() - axes[i]);
    if (lead_.size() < sizes.size()) lead_.resize(sizes.size(), 1);
    for (size_t axis = 0; axis < sizes.size(); axis++)
      lead_[axis] = std::max(lead_[axis], sizes[axis]);
  }
  for (const long size : lead_) batches_ *= size;
}

void Reader::fail(const char* name, const ffi::AnyBuffer& x, const std::string& expected) {
  if (failed()) return;
  error_ = std::string(name) + ": expected " + expected + ", got " + shown(sizes_of(x));
}

bool Reader::fits(const char* name, const ffi::AnyBuffer& x, const Sizes& sizes) {
  const Sizes got = sizes_of(x);
  bool same = got.size() == lead_.size() + sizes.size();
  for (size_t i = 0; same && i < got.size(); i++)
    same = i < lead_.size() ? got[i] == lead_[i] || got[i] == 1
                            : got[i] == sizes[i - lead_.size()];
  if (!same) fail(name, x, "batch axes of " + shown(lead_) + " or 1, then " + shown(sizes));
  return same;
}

std::vector<long> Reader::starts(const ffi::AnyBuffer& x, long elements) const {
  const Sizes got = sizes_of(x);
  std::vector<long> found(batches_);
  for (long b = 0; b < batches_; b++) {
    long rest = b, step = elements;
    for (size_t axis = lead_.size(); axis-- > 0; rest /= lead_[axis])
      if (got[axis] != 1) {
        found[b] += rest % lead_[axis] * step;
        step *= got[axis];
      }
  }
  return found;
}

Heads Reader::heads(const char* name, const ffi::AnyBuffer& x, Sizes sizes, bool full) {
  Heads found;
  switch (x.element_type()) {
    case ffi::F32: found.type = Float::f32; break;
    case ffi::BF16: found.type = Float::bf16; break;
    case ffi::F16: found.type = Float::f16; break;
    default: fail(name, x, "float32, bfloat16 or float16, not another type");
  }
  if (failed() || !fits(name, x, sizes)) return found;
  found.positions = sizes[0], found.heads = sizes[1], found.features = sizes[2];
  const long elements = sizes[0] * sizes[1] * sizes[2];
  if (full && static_cast<long>(x.element_count()) != batches_ * elements)
    fail(name, x, "all batch axes " + shown(lead_));
  found.data = static_cast<char*>(x.untyped_data());
  found.start = starts(x, elements * size_of(found.type));
  return found;
}

template <class E>
Batched<E> Reader::batched(const char* name, const ffi::AnyBuffer& x, const Sizes& sizes,
                           ffi::DataType type) {
  Batched<E> found;
  if (failed() || !x.element_count()) return found;
  if (x.element_type() != type) {
    fail(name, x, "another element type");
    return found;
  }
  if (!fits(name, x, sizes)) return found;
  long elements = 1;
  for (const long size : sizes) elements *= size;
  found.data = static_cast<E*>(x.untyped_data());
  found.start = starts(x, elements);
  return found;
}

template <class E>
Pairs<E> Reader::pairs(const char* name, const ffi::AnyBuffer& x, const Sizes& sizes,
                       ffi::DataType type) {
  Pairs<E> found;
  if (failed() || !x.element_count()) return found;
  const Sizes got = sizes_of(x);
  Sizes last(got.end() - std::min<size_t>(3, got.size()), got.end());
  bool fit = last.size() == 3;
  for (size_t i = 0; fit && i < 3; i++) fit = last[i] == 1 || last[i] == sizes[i];
  if (!fit) {
    fail(name, x, "axes of " + shown(sizes) + " or 1");
    return found;
  }
  static_cast<Batched<E>&>(found) = batched<E>(name, x, last, type);
  if (failed()) return found;
  found.s = last[2] == 1 ? 0 : 1;
  found.t = last[1] == 1 ? 0 : last[2];
  found.n = last[0] == 1 ? 0 : last[1] * last[2];
  return found;
}

Pairs<const float> Reader::bias(const ffi::AnyBuffer& x, const Sizes& sizes) {
  const Sizes got = sizes_of(x);
  const long diagonals = sizes[1] + sizes[2] - 1;
  const size_t axes = got.size();
  if (sizes[1] == 1 || axes < 3 || got[axes - 2] != 1 || got[axes - 1] != diagonals)
    return pairs<const float>("bias", x, sizes);
  Pairs<const float> found = pairs<const float>("bias", x, {sizes[0], 1, diagonals});
  if (!found) return found;
  found.data += sizes[1] - 1, found.t = -1, found.s = 1;
  return found;
}

float* Reader::result(const char* name, const ffi::AnyBuffer& x, Sizes sizes) {
  Float type = Float::f32;
  char* const found = result(name, x, sizes, type);
  if (type != Float::f32) fail(name, x, "float32, not another type");
  return reinterpret_cast<float*>(found);
}

char* Reader::result(const char* name, const ffi::AnyBuffer& x, Sizes sizes, Float& type) {
  if (failed()) return nullptr;
  sizes.insert(sizes.begin(), lead_.begin(), lead_.end());
  const bool half = x.element_type() == ffi::BF16;
  if ((x.element_type() != ffi::F32 && !half) || sizes_of(x) != sizes)
    fail(name, x, "a floating type and " + shown(sizes));
  type = half ? Float::bf16 : Float::f32;
  return static_cast<char*>(x.untyped_data());
}

std::vector<std::vector<long>> Reader::parts(const char* name, const ffi::AnyBuffer& x,
                                             size_t axes) {
  std::vector<std::vector<long>> found;
  const Sizes got = sizes_of(x);
  if (failed()) return found;
  if (x.element_type() != ffi::F32 || got.size() != lead_.size() + axes) {
    fail(name, x, "float32 with batch axes " + shown(lead_) + " or 1");
    return found;
  }
  const Sizes last(got.begin() + lead_.size(), got.end());
  if (!fits(name, x, last)) return found;
  long count = 1;
  for (size_t axis = 0; axis < lead_.size(); axis++) count *= got[axis];
  found.resize(count);
  const std::vector<long> part = starts(x, 1);
  for (long b = 0; b < batches_; b++) found[part[b]].push_back(b);
  return found;
}

// Once per call: a view of every block of keys would scan them again.
static void find_bounds(Conditions& c, const Problem& p) {
  for (long b = 0; b < p.B; b++) {
    const uint8_t* const valid = c.keys.of(b);
    long first = 0, end = p.S;
    while (first < end && !valid[first]) first++;
    while (end > first && !valid[end - 1]) end--;
    c.first_key.push_back(first), c.end_key.push_back(end);
  }
}

Problem Reader::problem(const ffi::AnyBuffer& query, const ffi::AnyBuffer& key,
                        const ffi::AnyBuffer& value, const ConditionBuffers& others,
                        const Attributes& attributes) {
  Problem p{};
  const Sizes q = sizes_of(query), k = sizes_of(key), v = sizes_of(value);
  if (failed()) return p;
  if (q.size() < 3) fail("query", query, "at least axes (T, N, H)");
  if (k.size() < 3) fail("key", key, "at least axes (S, K, H)");
  if (v.size() < 3) fail("value", value, "at least axes (S, K, h)");
  if (failed()) return p;
  p.B = batches_, p.T = q[q.size() - 3], p.N = q[q.size() - 2], p.H = q.back();
  p.S = k[k.size() - 3], p.K = k[k.size() - 2], p.h = v.back();
  if (p.T < 1 || p.N < 1 || p.H < 1 || p.h < 1 || p.S < 1 || p.K < 1 || p.N % p.K) {
    fail("key", key, "sizes of at least 1, and K that divides N");
    return p;
  }
  p.scale = attributes.scale, p.rest = attributes.rest, p.soft_cap = attributes.soft_cap;
  p.in_parts = attributes.in_parts;
  p.query = heads("query", query, {p.T, p.N, p.H});
  p.key = heads("key", key, {p.S, p.K, p.H});
  p.value = heads("value", value, {p.S, p.K, p.h});
  p.bias = bias(others.bias, {p.N, p.T, p.S});
  Conditions& c = p.conditions;
  c.below = std::clamp<long>(attributes.below, -FAR, FAR);
  c.above = std::clamp<long>(attributes.above, -FAR, FAR);
  c.offset = batched<const int32_t>("offset", others.offset, {});
  c.rows = batched<const uint8_t>("rows", others.rows, {p.T});
  c.keys = batched<const uint8_t>("keys", others.keys, {p.S});
  c.query_ids = batched<const int32_t>("query_ids", others.query_ids, {p.T});
  c.key_ids = batched<const int32_t>("key_ids", others.key_ids, {p.S});
  c.allowed = pairs<const uint8_t>("allowed", others.allowed, {p.N, p.T, p.S});
  c.bits = pairs<const uint8_t>("bits", others.bits, {p.N, (p.T + 7) / 8, p.S}, ffi::U8);
  const Sizes of_bits = sizes_of(others.bits);
  if (c.bits && !failed() &&
      (of_bits.back() != p.S || of_bits[of_bits.size() - 2] != (p.T + 7) / 8))
    fail("bits", others.bits, "axes of all queries and keys");
  if (!c.query_ids != !c.key_ids) fail("query_ids", others.query_ids, "key_ids as well");
  if (c.keys && !failed()) find_bounds(c, p);
  return p;
}

template Batched<const float> Reader::batched(const char*, const ffi::AnyBuffer&, const Sizes&,
                                              ffi::DataType);
template Batched<const uint16_t> Reader::batched(const char*, const ffi::AnyBuffer&, const Sizes&,
                                                 ffi::DataType);

}  // namespace jaxmha
