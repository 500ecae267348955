#include "keys.h"

#include "rows.h"

namespace jaxmha {
namespace JAXMHA_ISA {
namespace {

constexpr long AHEAD = 8;  // rows fetched before they are read: they are far apart in memory

}  // namespace

bool attended_by_group(const Problem& p, long b, long kv, long j) {
  for (long n = kv * p.group(); n < (kv + 1) * p.group(); n++)
    if (View(p, b, n).attended(j)) return true;
  return false;
}

void copy_keys(const Problem& p, long b, long kv, long k0, long count, long key_width,
               long value_width, float* keys, float* values, Usable usable) {
  const Heads &key = p.key, &value = p.value;
  for (long j = 0; j < count; j++) {
    float *to_key = keys + j * key_width, *to_value = values + j * value_width;
    if (j + AHEAD < count) {
      fetch(key.at(b, k0 + j + AHEAD, kv), p.H * size_of(key.type));
      fetch(value.at(b, k0 + j + AHEAD, kv), p.h * size_of(value.type));
    }
    pad_row(key.at(b, k0 + j, kv), key.type, p.H, key_width, to_key);
    pad_row(value.at(b, k0 + j, kv), value.type, p.h, value_width, to_value);
    if (usable(to_key, p.H) && usable(to_value, p.h)) continue;
    if (attended_by_group(p, b, kv, k0 + j)) continue;
    std::fill(to_key, to_key + key_width, 0.f);
    std::fill(to_value, to_value + value_width, 0.f);
  }
}

Range keys_of_head(const Problem& p, long b, long kv) {
  Range found{p.S, 0};
  for (long n = kv * p.group(); n < (kv + 1) * p.group(); n++) {
    const Range one = View(p, b, n).keys_of(0, p.T);
    if (!one.empty()) found = {std::min(found.first, one.first), std::max(found.end, one.end)};
  }
  return found;
}

bool finite_keys(const Problem& p, long b, long kv, long k0, long count) {
  const auto finite = [](const Heads& x, const char* row) {
    if (x.type == Float::f32) return all_finite(reinterpret_cast<const float*>(row), x.features);
    const unsigned exponent = x.type == Float::bf16 ? 0x7f80 : 0x7c00;
    unsigned bad = 0;
    for (long i = 0; i < x.features; i++)
      bad |= (reinterpret_cast<const uint16_t*>(row)[i] & exponent) == exponent;
    return !bad;
  };
  for (long j = k0; j < k0 + count; j++)
    for (const Heads* x : {&p.key, &p.value}) {
      fetch(x->at(b, std::min(j + AHEAD, p.S - 1), kv), x->features * size_of(x->type));
      if (!finite(*x, x->at(b, j, kv))) return false;
    }
  return true;
}

}  // namespace JAXMHA_ISA
}  // namespace jaxmha
