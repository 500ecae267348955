// Steps over caches of every stored type: dense and paged, few and many rows, wrapped buffers.
#include <string>

#include "numbers.h"

namespace {

struct Case {
  const char* name;
  Stored type;
  long group, T, slots, page, H, h;  // page 0: dense
  std::vector<int> lengths;          // of every batch row
  long left;
  float soft_cap;
  long nan_slot = -1;  // whose first feature of values is attended, and not a number
};

struct Arrays {
  static constexpr long K = 2;
  long B, R, M, page, P;
  Numbers rows, key, value, key_scale, value_scale, out, row_max, row_sum;
  std::vector<int32_t> table, first;

  explicit Arrays(const Case& c)
      : B(c.lengths.size()), R(c.group * c.T), M(c.page ? c.slots / c.page : 1),
        page(c.page ? c.page : c.slots), P(c.page ? B * M + 1 : B),
        rows(random_numbers(Stored::f32, B * K * R * c.H)),
        key(random_numbers(c.type, P * K * page * c.H)),
        value(random_numbers(c.type, P * K * page * c.h)),
        key_scale(random_numbers(Stored::f32, P * K * page)),
        value_scale(random_numbers(Stored::f32, P * K * page)),
        out(Stored::f32, B * K * R * c.h), row_max(Stored::f32, B * K * R),
        row_sum(Stored::f32, B * K * R) {
    for (long i = 0; i < B * M; i++) table.push_back(P - 1 - i);
    for (const int length : c.lengths) first.push_back(length - c.T);
  }
  // The row of the pool of a slot.
  long row(long b, long k, long slot) const {
    const long of = P > B || M > 1 ? table[b * M + slot / page] : b;
    return (of * K + k) * page + slot % page;
  }
};

bool attends(const Case& c, const Arrays& a, long b, long t, long slot) {
  const long last = c.lengths[b] - 1, newest = last % c.slots, i = a.first[b] + t;
  const long token = last - newest + slot - (slot > newest ? c.slots : 0);
  return token >= 0 && token <= i && token >= i - c.left;
}

// Slots without a token hold NaN, and one that is asked for.
void spoil(const Case& c, Arrays& a) {
  if (c.nan_slot >= 0) a.value.set_nan(a.row(0, 0, c.nan_slot) * c.h, 1);
  for (long b = 0; b < a.B; b++)
    for (long slot = c.lengths[b]; slot < c.slots; slot++)
      for (long k = 0; k < Arrays::K; k++) {
        a.key.set_nan(a.row(b, k, slot) * c.H, c.H);
        a.value.set_nan(a.row(b, k, slot) * c.h, c.h);
      }
}

std::vector<double> expected_out(const Case& c, const Arrays& a) {
  const bool scaled = c.type == Stored::s8;
  std::vector<double> found(a.out.count());
  for (long row = 0; row < a.row_max.count(); row++) {
    const long b = row / a.R / Arrays::K, k = row / a.R % Arrays::K;
    double total = 0.;
    for (long slot = 0; slot < c.slots; slot++) {
      if (!attends(c, a, b, row % c.T, slot)) continue;
      const long at = a.row(b, k, slot);
      double logit = 0.;
      for (long x = 0; x < c.H; x++) logit += a.rows.at(row * c.H + x) * a.key.at(at * c.H + x);
      if (scaled) logit *= a.key_scale.at(at);
      if (c.soft_cap != 0.f) logit = c.soft_cap * std::tanh(logit / c.soft_cap);
      const double weight = std::exp(logit);
      total += weight;
      for (long x = 0; x < c.h; x++)
        found[row * c.h + x] +=
            weight * a.value.at(at * c.h + x) * (scaled ? a.value_scale.at(at) : 1.);
    }
    for (long x = 0; x < c.h; x++) found[row * c.h + x] /= total;
  }
  return found;
}

void check(const jaxmha::Kernels& kernels, const Case& c) {
  Arrays a(c);
  for (long i = 0; i < a.rows.count(); i++) a.rows.floats()[i] *= 1.f / 16;
  for (Numbers* const scale : {&a.key_scale, &a.value_scale})
    for (long i = 0; i < scale->count(); i++) scale->floats()[i] *= 1.f / 64;
  spoil(c, a);
  jaxmha::CacheStep s{};
  s.B = a.B, s.K = Arrays::K, s.R = a.R, s.T = c.T, s.H = c.H, s.h = c.h;
  s.P = a.P, s.page = a.page, s.M = a.M, s.left = c.left, s.soft_cap = c.soft_cap;
  const bool scaled = c.type == Stored::s8;
  s.rows = a.rows.floats();
  s.key = {a.key.data(), scaled ? a.key_scale.floats() : nullptr, c.type, c.H};
  s.value = {a.value.data(), scaled ? a.value_scale.floats() : nullptr, c.type, c.h};
  s.table = c.page ? a.table.data() : nullptr;
  s.lengths = c.lengths.data(), s.first = a.first.data();
  s.out = a.out.floats(), s.row_max = a.row_max.floats(), s.row_sum = a.row_sum.floats();
  {
    Threads pool;
    kernels.attend_cache(s, pool);
  }
  for (long i = 0; i < a.out.count(); i++) s.out[i] /= s.row_sum[i / c.h];
  compare((std::string("cache_") + c.name + "/out").c_str(), a.out, expected_out(c, a));
}

}  // namespace

void check_cache(const jaxmha::Kernels& kernels) {
  constexpr long FAR = jaxmha::FAR;
  const Case cases[] = {
      {"f32", Stored::f32, 3, 1, 1201, 0, 32, 48, {1201, 7}, FAR, 0.f},
      {"bf16_paged", Stored::bf16, 1, 2, 208, 16, 64, 32, {203, 100}, FAR, 0.f},
      {"f16", Stored::f16, 2, 1, 211, 0, 64, 64, {211, 103}, FAR, 0.f},
      {"f16_odd", Stored::f16, 1, 3, 211, 0, 37, 29, {200, 103}, 50, 0.f},
      {"s8", Stored::s8, 4, 1, 1103, 0, 64, 64, {1103, 5}, FAR, 0.f},
      {"s8_paged_odd", Stored::s8, 2, 3, 208, 16, 11, 3, {203, 100}, FAR, 2.f},
      {"s8_many", Stored::s8, 3, 23, 208, 16, 20, 36, {203, 100}, FAR, 0.f},
      {"f16_many_odd", Stored::f16, 1, 67, 211, 0, 37, 29, {200, 103}, 50, 0.f},
      {"f32_wrapped", Stored::f32, 2, 1, 97, 0, 12, 20, {300, 150}, FAR, 0.f},
      {"e4m3", Stored::e4m3, 2, 1, 211, 0, 64, 64, {211, 103}, FAR, 0.f, 3},
      {"e5m2_odd", Stored::e5m2, 2, 1, 211, 0, 37, 29, {211, 103}, FAR, 0.f},
  };
  for (const Case& c : cases) check(kernels, c);
}
