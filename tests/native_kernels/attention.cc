// Attention and its gradients under causality, lengths, masks, biases and soft caps.
#include <string>

#include "numbers.h"

namespace {

struct Case {
  const char* name;
  Stored type;
  long B, T, S, N, K, H, h;
  long above;                // j <= i + above
  std::vector<int> lengths;  // of keys; none: all
  char mask;                 // ' ', 'a': bytes, 'b': bits
  bool bias, gradient;
  float soft_cap;
  long nan_key = -1;  // attended, and not a number
};

using Doubles = std::vector<double>;

// The expected arrays.
struct Expected {
  Doubles out, lse, d_query, d_key, d_value, d_bias;
};

struct Arrays {
  Numbers query, key, value, d_out, d_lse, bias;
  std::vector<uint8_t> allowed, bits, keys;  // B 1 T S; B 1 T/8 S; B S

  explicit Arrays(const Case& c)
      : query(random_numbers(c.type, c.B * c.T * c.N * c.H)),
        key(random_numbers(c.type, c.B * c.S * c.K * c.H)),
        value(random_numbers(c.type, c.B * c.S * c.K * c.h)),
        d_out(random_numbers(c.type, c.B * c.T * c.N * c.h)),
        d_lse(random_numbers(Stored::f32, c.B * c.N * c.T)),
        bias(random_numbers(Stored::f32, c.N * c.T * c.S)), allowed(c.B * c.T * c.S),
        bits(c.B * ((c.T + 7) / 8) * c.S), keys(c.B * c.S) {
    for (long at = 0; at < c.B * c.T * c.S; at++) {
      const long b = at / c.S / c.T, i = at / c.S % c.T, j = at % c.S;
      allowed[at] = random_bits() % 4 && !(i >= 64 && i < 128 && j < 70);  // whole cells as well
      if (i == 2) allowed[at] = 0;                                       // and an empty row
      bits[(b * ((c.T + 7) / 8) + i / 8) * c.S + j] |= allowed[at] << i % 8;
    }
    for (long at = 0; at < c.B * c.S; at++)
      keys[at] = c.lengths.empty() || at % c.S < c.lengths[at / c.S];
    for (long at = 0; at < c.B * c.S; at++)
      if (!keys[at]) {  // what no query attends may be anything
        key.set_nan(at * c.K * c.H, c.K * c.H);
        value.set_nan(at * c.K * c.h, c.K * c.h);
      }
    if (c.nan_key >= 0) key.set_nan(c.nan_key * c.K * c.H, c.H);  // of batch row 0, head 0
  }
};

constexpr float SCALE = 0.125f, REST = 1.25f;

// One row of weights and what follows from it, in float64.
void add_row(const Case& c, const Arrays& a, long b, long i, long n, Expected& to) {
  const long kv = n / (c.N / c.K), row = (b * c.T + i) * c.N + n, at_lse = (b * c.N + n) * c.T + i;
  const auto key = [&](long j) { return ((b * c.S + j) * c.K + kv); };
  Doubles weights(c.S), bends(c.S, 1.);
  double total = 0.;
  for (long j = 0; j < c.S; j++) {
    if (j > i + c.above || !a.keys[b * c.S + j]) continue;
    if (c.mask != ' ' && !a.allowed[(b * c.T + i) * c.S + j]) continue;
    double logit = 0.;
    for (long x = 0; x < c.H; x++) logit += a.query.at(row * c.H + x) * a.key.at(key(j) * c.H + x);
    logit *= double{SCALE} * REST;
    if (c.soft_cap != 0.f) {
      const double bent = std::tanh(logit / c.soft_cap);
      logit = c.soft_cap * bent, bends[j] = 1. - bent * bent;
    }
    if (c.bias) logit += a.bias.at((n * c.T + i) * c.S + j);
    total += weights[j] = std::exp(logit);
  }
  if (total == 0.) return;
  to.lse[at_lse] = std::log(total);
  Doubles d_weights(c.S);
  double delta = 0.;
  for (long j = 0; j < c.S; j++) {
    if (weights[j] == 0.) continue;
    weights[j] /= total;
    for (long x = 0; x < c.h; x++) {
      const double d_out = a.d_out.at(row * c.h + x), value = a.value.at(key(j) * c.h + x);
      to.out[row * c.h + x] += weights[j] * value;
      to.d_value[key(j) * c.h + x] += weights[j] * d_out;
      d_weights[j] += d_out * value;
    }
    delta += weights[j] * d_weights[j];
  }
  for (long j = 0; j < c.S; j++) {
    if (weights[j] == 0.) continue;
    double d_logit = weights[j] * (d_weights[j] - delta + a.d_lse.at(at_lse));
    to.d_bias[(n * c.T + i) * c.S + j] += d_logit;
    d_logit *= bends[j] * SCALE * REST;
    for (long x = 0; x < c.H; x++) {
      to.d_query[row * c.H + x] += d_logit * a.key.at(key(j) * c.H + x);
      to.d_key[key(j) * c.H + x] += d_logit * a.query.at(row * c.H + x);
    }
  }
}

Expected expected(const Case& c, const Arrays& a) {
  Expected found{Doubles(c.B * c.T * c.N * c.h), Doubles(c.B * c.N * c.T),
                 Doubles(a.query.count()),       Doubles(a.key.count()),
                 Doubles(a.value.count()),       Doubles(a.bias.count())};
  for (long b = 0; b < c.B; b++)
    for (long i = 0; i < c.T; i++)
      for (long n = 0; n < c.N; n++) add_row(c, a, b, i, n, found);
  return found;
}

std::vector<long> starts(long B, long step) {
  std::vector<long> found;
  for (long b = 0; b < B; b++) found.push_back(b * step);
  return found;
}

jaxmha::Heads heads(Numbers& of, long B, long positions, long heads, long features) {
  jaxmha::Heads found;
  found.data = of.data();
  found.start = starts(B, positions * heads * features * jaxmha::size_of(of.type));
  found.type = static_cast<jaxmha::Float>(of.type);  // the first three types of a cache
  found.positions = positions, found.heads = heads, found.features = features;
  return found;
}

template <class E>
jaxmha::Pairs<const E> pairs(const E* data, std::vector<long> start, long n, long s) {
  jaxmha::Pairs<const E> found;
  found.data = data, found.start = std::move(start);
  found.n = n, found.t = s, found.s = 1;
  return found;
}

jaxmha::Problem problem(const Case& c, Arrays& a) {
  jaxmha::Problem p{};
  p.B = c.B, p.T = c.T, p.S = c.S, p.N = c.N, p.K = c.K, p.H = c.H, p.h = c.h;
  p.scale = SCALE, p.rest = REST, p.soft_cap = c.soft_cap;
  p.query = heads(a.query, c.B, c.T, c.N, c.H);
  p.key = heads(a.key, c.B, c.S, c.K, c.H), p.value = heads(a.value, c.B, c.S, c.K, c.h);
  if (c.bias) p.bias = pairs<float>(a.bias.floats(), starts(c.B, 0), c.T * c.S, c.S);
  jaxmha::Conditions& to = p.conditions;
  to.above = c.above;
  if (!c.lengths.empty()) to.keys = {a.keys.data(), starts(c.B, c.S)};
  if (c.mask == 'a') to.allowed = pairs<uint8_t>(a.allowed.data(), starts(c.B, c.T * c.S), 0, c.S);
  if (c.mask == 'b')
    to.bits = pairs<uint8_t>(a.bits.data(), starts(c.B, (c.T + 7) / 8 * c.S), 0, c.S);
  return p;
}

struct Results {
  Numbers out, row_max, row_sum, d_query, d_key, d_value, delta, d_bias;
  explicit Results(const Case& c)
      : out(c.gradient ? Stored::f32 : c.type, c.B * c.T * c.N * c.h),
        row_max(Stored::f32, c.B * c.N * c.T), row_sum(row_max),
        d_query(c.type, c.B * c.T * c.N * c.H), d_key(c.type, c.B * c.S * c.K * c.H),
        d_value(c.type, c.B * c.S * c.K * c.h), delta(row_max),
        d_bias(Stored::f32, c.N * c.T * c.S) {}
};

void run_backward(const jaxmha::Kernels& kernels, const Case& c, Arrays& a,
                  const jaxmha::Problem& p, Results& r, jaxmha::Pool& pool) {
  const std::vector<long> start = starts(c.B, c.N * c.T);
  jaxmha::Backward call{};
  call.problem = p;
  call.d_out = heads(a.d_out, c.B, c.T, c.N, c.h), call.out = heads(r.out, c.B, c.T, c.N, c.h);
  call.row_max = {r.row_max.floats(), start}, call.row_sum = {r.row_sum.floats(), start};
  call.d_lse = {a.d_lse.floats(), start};
  call.d_query = heads(r.d_query, c.B, c.T, c.N, c.H);
  call.d_key = heads(r.d_key, c.B, c.S, c.K, c.H);
  call.d_value = heads(r.d_value, c.B, c.S, c.K, c.h);
  call.delta = r.delta.floats();
  kernels.attend_backward(call, pool);
  if (!c.bias) return;
  jaxmha::BiasGradient gradient{};
  static_cast<jaxmha::Cotangents&>(gradient) = call;
  gradient.delta = {r.delta.floats(), start}, gradient.d_bias = r.d_bias.floats();
  gradient.n = c.N, gradient.t = c.T, gradient.s = c.S;
  gradient.batches.resize(1);  // one bias for all batch rows
  for (long b = 0; b < c.B; b++) gradient.batches[0].push_back(b);
  kernels.bias_gradient(gradient, pool);
}

void check(const jaxmha::Kernels& kernels, const Case& c) {
  Arrays a(c);
  Results r(c);
  jaxmha::Forward call{};
  call.problem = problem(c, a);
  call.out = heads(r.out, c.B, c.T, c.N, c.h), call.gradient = c.gradient;
  call.row_max = r.row_max.floats(), call.row_sum = r.row_sum.floats();
  {
    Threads pool;
    jaxmha::find_cells(call.problem, pool);
    kernels.attend(call, pool);
    if (c.gradient) run_backward(kernels, c, a, call.problem, r, pool);
  }
  Numbers lse(r.row_max);
  for (long i = 0; i < lse.count(); i++) {
    const double total = r.row_sum.at(i), most = r.row_max.at(i) * call.problem.exponent();
    lse.floats()[i] = total == 0. ? 0.f : static_cast<float>(most + std::log(total));
  }
  const Expected want = expected(c, a);
  const auto compare_array = [&](const char* name, const Numbers& got, const Doubles& right) {
    compare((std::string(c.name) + "/" + name).c_str(), got, right);
  };
  compare_array("out", r.out, want.out), compare_array("lse", lse, want.lse);
  if (!c.gradient) return;
  compare_array("d_query", r.d_query, want.d_query), compare_array("d_key", r.d_key, want.d_key);
  compare_array("d_value", r.d_value, want.d_value);
  if (c.bias) compare_array("d_bias", r.d_bias, want.d_bias);
}

}  // namespace

void check_attention(const jaxmha::Kernels& kernels) {
  constexpr long FAR = jaxmha::FAR;
  const auto f32 = Stored::f32, bf16 = Stored::bf16, f16 = Stored::f16;
  const Case cases[] = {
      {"causal", f32, 2, 131, 203, 2, 2, 37, 29, 72, {}, ' ', false, true, 0.f},
      {"lengths", f32, 2, 67, 131, 4, 2, 32, 48, FAR, {131, 5}, ' ', false, true, 0.f},
      {"empty_row", f32, 1, 131, 203, 2, 1, 20, 12, FAR, {}, 'a', false, true, 0.f},
      {"bits", f32, 2, 131, 203, 2, 2, 11, 3, FAR, {190, 203}, 'b', false, true, 0.f},
      {"bias", f32, 2, 71, 101, 2, 1, 19, 23, 30, {}, ' ', true, true, 0.f},
      {"cap", f32, 1, 71, 101, 2, 1, 19, 23, FAR, {}, 'a', true, true, 2.f},
      {"nan", f32, 1, 131, 203, 2, 2, 37, 29, 0, {}, ' ', false, false, 0.f, 3},
      {"small", f32, 3, 5, 7, 2, 1, 3, 1, 2, {7, 6, 1}, ' ', false, true, 0.f},
      {"long", f32, 1, 67, 1601, 1, 1, 16, 16, FAR, {}, ' ', false, true, 0.f},
      {"half", f16, 2, 67, 131, 2, 2, 37, 29, 64, {131, 5}, ' ', false, true, 0.f},
      {"brain", bf16, 2, 67, 131, 2, 2, 32, 16, FAR, {}, 'a', false, true, 0.f},
      {"half_out", f16, 1, 67, 131, 2, 2, 37, 29, 64, {}, ' ', false, false, 0.f},
      {"few_rows", f32, 2, 2, 1201, 6, 2, 32, 32, 1199, {1201, 600}, ' ', false, false, 0.f},
      {"few_odd", bf16, 2, 1, 701, 2, 2, 37, 29, FAR, {701, 3}, ' ', true, false, 1.5f},
  };
  for (const Case& c : cases) check(kernels, c);
}
