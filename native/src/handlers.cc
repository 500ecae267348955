// The handlers that XLA calls: they check their buffers and run a kernel on XLA's own threads.
#include <algorithm>
#include <new>

#include "library.h"
#include "operands.h"

namespace jaxmha {
namespace {

struct XlaPool : Pool {
  ffi::ThreadPool& pool;
  explicit XlaPool(ffi::ThreadPool& pool) : pool(pool) {}
  long threads() override { return std::max<long>(1, pool.num_threads()); }  // 0: it has none
  void spawn(std::function<void()> task) override { pool.Schedule(std::move(task)); }
};

using Any = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

void prepare(Forward& call, Pool& pool) { find_cells(call.problem, pool); }
void prepare(Cotangents& call, Pool& pool) { find_cells(call.problem, pool); }
void prepare(const MatmulSizes&, Pool&) {}
void prepare(const CacheStep&, Pool&) {}

// Runs a kernel of the widest ISA that this CPU has.
template <class Call>
ffi::Error run(ffi::ThreadPool threads, Call& call,
               void (*Kernels::*kernel)(const Call&, Pool&)) {
  const Kernels* const usable = usable_kernels();
  if (usable == nullptr)
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "jaxmha_cpu: this CPU");
  XlaPool pool(threads);
  try {
    prepare(call, pool);
    (usable->*kernel)(call, pool);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxmha_cpu: no memory for scratch");
  }
  return ffi::Error::Success();
}

ffi::Error attend(ffi::ThreadPool threads, Any query, Any key, Any value, Any bias, Any allowed,
                  Any bits, Any rows, Any keys, Any query_ids, Any key_ids, Any offset, Result out,
                  Result row_max, Result row_sum, float scale, float rest, float soft_cap,
                  int64_t below, int64_t above, bool in_parts, bool gradient) {
  Reader reader(*out);
  Forward call{};
  call.problem = reader.problem(query, key, value,
                                {bias, allowed, bits, rows, keys, query_ids, key_ids, offset},
                                {scale, rest, soft_cap, below, above, in_parts});
  const Problem& p = call.problem;
  call.out = reader.heads("out", *out, {p.T, p.N, p.h}, true);
  call.row_max = reader.result("row_max", *row_max, {p.N, p.T});
  call.row_sum = reader.result("row_sum", *row_sum, {p.N, p.T});
  call.gradient = gradient;
  if (reader.failed()) return reader.error();
  return run(threads, call, &Kernels::attend);
}

// The operands that both gradients have before their own.
void read_cotangents(Reader& reader, Cotangents& to, Any row_max, Any row_sum, Any d_out,
                     Any d_lse) {
  const Problem& p = to.problem;
  to.row_max = reader.batched<const float>("row_max", row_max, {p.N, p.T});
  to.row_sum = reader.batched<const float>("row_sum", row_sum, {p.N, p.T});
  to.d_out = reader.heads("d_out", d_out, {p.T, p.N, p.h});
  to.d_lse = reader.batched<const float>("d_lse", d_lse, {p.N, p.T});
  if (!to.row_max) reader.fail("row_max", row_max, "row statistics");
  if (!to.row_sum) reader.fail("row_sum", row_sum, "row statistics");
}

ffi::Error attend_backward(ffi::ThreadPool threads, Any query, Any key, Any value, Any bias,
                           Any allowed, Any bits, Any rows, Any keys, Any query_ids, Any key_ids, Any offset,
                           Any row_max, Any row_sum, Any d_out, Any d_lse, Any out, Result d_query,
                           Result d_key, Result d_value, Result delta, float scale, float rest,
                           float soft_cap, int64_t below, int64_t above, bool in_parts) {
  Reader reader(*d_query);
  Backward call{};
  call.problem = reader.problem(query, key, value,
                                {bias, allowed, bits, rows, keys, query_ids, key_ids, offset},
                                {scale, rest, soft_cap, below, above, in_parts});
  const Problem& p = call.problem;
  read_cotangents(reader, call, row_max, row_sum, d_out, d_lse);
  call.out = reader.heads("out", out, {p.T, p.N, p.h});
  if (call.out.type != Float::f32) reader.fail("out", out, "float32, not another type");
  call.d_query = reader.heads("d_query", *d_query, {p.T, p.N, p.H}, true);
  call.d_key = reader.heads("d_key", *d_key, {p.S, p.K, p.H}, true);
  call.d_value = reader.heads("d_value", *d_value, {p.S, p.K, p.h}, true);
  call.delta = reader.result("delta", *delta, {p.N, p.T});
  if (reader.failed()) return reader.error();
  return run(threads, call, &Kernels::attend_backward);
}

ffi::Error bias_gradient(ffi::ThreadPool threads, Any query, Any key, Any value, Any bias,
                         Any allowed, Any bits, Any rows, Any keys, Any query_ids, Any key_ids, Any offset,
                         Any row_max, Any row_sum, Any d_out, Any d_lse, Any delta, Result d_bias,
                         float scale, float rest, float soft_cap, int64_t below, int64_t above,
                         bool in_parts) {
  Reader reader(std::vector<Any>{query, key, value, bias, allowed, bits, rows, keys, query_ids,
                                 key_ids, offset, row_max, row_sum, d_out, d_lse, delta},
                {3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 0, 2, 2, 3, 2, 2});
  BiasGradient call{};
  call.problem = reader.problem(query, key, value,
                                {bias, allowed, bits, rows, keys, query_ids, key_ids, offset},
                                {scale, rest, soft_cap, below, above, in_parts});
  const Problem& p = call.problem;
  read_cotangents(reader, call, row_max, row_sum, d_out, d_lse);
  call.delta = reader.batched<const float>("delta", delta, {p.N, p.T});
  if (!call.delta) reader.fail("delta", delta, "axes (N, T)");
  if (!p.bias) reader.fail("bias", bias, "a bias");
  call.batches = reader.parts("d_bias", *d_bias, 3);
  if (reader.failed()) return reader.error();
  const auto sizes = d_bias->dimensions();
  call.n = sizes[sizes.size() - 3], call.t = sizes[sizes.size() - 2], call.s = sizes.back();
  const bool diagonals = p.bias.t < 0;
  if ((call.n != 1) != (p.bias.n != 0) || (call.t != 1) != (p.bias.t > 0) ||
      (call.s != 1) != (p.bias.s != 0) || (diagonals && call.s != p.T + p.S - 1))
    reader.fail("d_bias", *d_bias, "the axes of the bias");
  call.d_bias = static_cast<float*>(d_bias->untyped_data());
  if (reader.failed()) return reader.error();
  return run(threads, call, &Kernels::bias_gradient);
}

// The buffers of a step over a cache, with the sizes that the first ones give.
class StepReader {
 public:
  std::string error;
  bool fits(const char* name, const ffi::AnyBuffer& x, ffi::DataType type, const Sizes& sizes) {
    const auto got = x.dimensions();
    if (x.element_type() == type && Sizes(got.begin(), got.end()) == sizes) return true;
    if (error.empty()) error = std::string(name) + ": another type or other axes";
    return false;
  }
  // A buffer without elements is absent.
  template <class E>
  const E* optional(const char* name, Any x, ffi::DataType type, const Sizes& sizes) {
    if (!x.element_count() || !fits(name, x, type, sizes)) return nullptr;
    return static_cast<const E*>(x.untyped_data());
  }
  template <class E>
  E* required(const char* name, const ffi::AnyBuffer& x, ffi::DataType type, const Sizes& sizes) {
    return fits(name, x, type, sizes) ? static_cast<E*>(x.untyped_data()) : nullptr;
  }
  Pages pages(const char* name, Any x, Any scale, const Sizes& sizes) {
    Pages found{static_cast<const char*>(x.untyped_data()), nullptr, Stored::f32, sizes[3]};
    switch (x.element_type()) {
      case ffi::F32: found.type = Stored::f32; break;
      case ffi::BF16: found.type = Stored::bf16; break;
      case ffi::F16: found.type = Stored::f16; break;
      case ffi::S8: found.type = Stored::s8; break;
      case ffi::F8E4M3FN: found.type = Stored::e4m3; break;
      case ffi::F8E5M2: found.type = Stored::e5m2; break;
      default: error = std::string(name) + ": a type that no kernel reads";
    }
    fits(name, x, x.element_type(), sizes);
    found.scale = optional<float>("scale", scale, ffi::F32, {sizes[0], sizes[1], sizes[2]});
    return found;
  }
  void allowed(CacheStep& to, Any x) {
    if (!x.element_count()) return;
    const Sizes full{to.B, to.K * (to.R / to.T), to.T, to.slots()};
    const auto got = x.dimensions();
    long steps[4] = {}, step = 1;
    bool same = got.size() == 4 && x.element_type() == ffi::PRED;
    for (int axis = 3; same && axis >= 0; step *= got[axis--]) {
      same = got[axis] == full[axis] || got[axis] == 1;
      steps[axis] = got[axis] == 1 ? 0 : step;
    }
    if (!same && error.empty()) error = "allowed: axes of (B, N, T, S) or 1";
    to.allowed = static_cast<const uint8_t*>(x.untyped_data());
    to.allowed_b = steps[0], to.allowed_n = steps[1];
    to.allowed_t = steps[2], to.allowed_s = steps[3];
  }
};

ffi::Error attend_cache(ffi::ThreadPool threads, Any rows, Any key, Any value, Any key_scale,
                        Any value_scale, Any table, Any lengths, Any first, Any allowed, Result out,
                        Result row_max, Result row_sum, float soft_cap, int64_t tokens,
                        int64_t left) {
  StepReader reader;
  const auto r = rows.dimensions(), k = key.dimensions(), v = value.dimensions();
  if (r.size() != 4 || k.size() != 4 || v.size() != 4 || !rows.element_count() ||
      !key.element_count() || !value.element_count())
    return ffi::Error::InvalidArgument("jaxmha_cpu: rows, key, value: four axes, none of size 0");
  CacheStep s{};
  s.B = r[0], s.K = r[1], s.R = r[2], s.H = r[3], s.P = k[0], s.page = k[2], s.h = v[3];
  s.T = tokens, s.left = std::clamp<long>(left, 0, FAR), s.soft_cap = soft_cap;
  if (tokens < 1 || s.R % tokens)
    return ffi::Error::InvalidArgument("jaxmha_cpu: tokens: a divisor of the rows of a head");
  const bool paged = table.element_count() > 0;
  const auto entries = table.dimensions();
  s.M = paged && entries.size() == 2 ? entries[1] : 1;
  if (!paged) s.P = s.B;
  s.rows = reader.required<const float>("rows", rows, ffi::F32, {s.B, s.K, s.R, s.H});
  s.key = reader.pages("key", key, key_scale, {s.P, s.K, s.page, s.H});
  s.value = reader.pages("value", value, value_scale, {s.P, s.K, s.page, s.h});
  if (s.key.type != s.value.type) reader.error = "value: another type than key";
  s.table = reader.optional<int32_t>("table", table, ffi::S32, {s.B, s.M});
  s.lengths = reader.required<const int32_t>("lengths", lengths, ffi::S32, {s.B});
  s.first = reader.required<const int32_t>("first", first, ffi::S32, {s.B});
  reader.allowed(s, allowed);
  s.out = reader.required<float>("out", *out, ffi::F32, {s.B, s.K, s.R, s.h});
  s.row_max = reader.required<float>("row_max", *row_max, ffi::F32, {s.B, s.K, s.R});
  s.row_sum = reader.required<float>("row_sum", *row_sum, ffi::F32, {s.B, s.K, s.R});
  if (!reader.error.empty()) return ffi::Error::InvalidArgument("jaxmha_cpu: " + reader.error);
  return run(threads, s, &Kernels::attend_cache);
}

// What matmuls of every type have; false: it does not fit.
template <class E>
bool read_matmul(Reader& reader, MatmulOf<E>& to, Any a, Any b, Any bias, Any kept) {
  const auto x = a.dimensions(), z = b.dimensions();
  if (x.size() < 2) reader.fail("a", a, "at least axes (rows, depth)");
  if (z.size() < 2) reader.fail("b", b, "at least axes (depth, columns)");
  if (reader.failed()) return false;
  to.batches = reader.batches();
  const size_t m = x.size() - 2, n = z.size() - 2;
  to.rows = x[m + to.a_transposed], to.depth = x[m + !to.a_transposed];
  to.columns = z[n + !to.b_transposed];
  Sizes of_a{to.rows, to.depth}, of_b{to.depth, to.columns};
  if (to.a_transposed) std::swap(of_a[0], of_a[1]);
  if (to.b_transposed) std::swap(of_b[0], of_b[1]);
  to.a = reader.batched<const E>("a", a, of_a);
  to.b = reader.batched<const E>("b", b, of_b);
  to.bias = reader.batched<const E>("bias", bias, {to.columns});
  to.kept = reader.batched<const uint8_t>("kept", kept, {x[m]});
  if (to.kept && to.a_transposed && to.b_transposed)
    reader.fail("kept", kept, "none, if a and b are transposed");
  if (!to.a || !to.b) reader.fail("a", a, "sizes of at least 1");
  return !reader.failed();
}

ffi::Error matmul(ffi::ThreadPool threads, Any a, Any b, Any bias, Any kept, Result y,
                  bool a_transposed, bool b_transposed) {
  Reader reader(std::vector<Any>{a, b, bias, kept}, {2, 2, 1, 1});
  if (a.element_type() == ffi::BF16) {
    Bf16Matmul call{};
    call.a_transposed = a_transposed, call.b_transposed = b_transposed;
    if (read_matmul(reader, call, a, b, bias, kept))
      call.y = reader.result("y", *y, {call.rows, call.columns}, call.type);
    return reader.failed() ? reader.error() : run(threads, call, &Kernels::matmul_bf16);
  }
  Matmul call{};
  call.a_transposed = a_transposed, call.b_transposed = b_transposed;
  if (read_matmul(reader, call, a, b, bias, kept))
    call.y = reader.result("y", *y, {call.rows, call.columns});
  return reader.failed() ? reader.error() : run(threads, call, &Kernels::matmul);
}

}  // namespace
}  // namespace jaxmha

#define JAXMHA_ANY Arg<xla::ffi::AnyBuffer>()
#define JAXMHA_PROBLEM                                                                   \
  xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY     \
      .JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY       \
      .JAXMHA_ANY
#define JAXMHA_FIVE JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY
#define JAXMHA_RESULT Ret<xla::ffi::AnyBuffer>()
#define JAXMHA_ATTRIBUTES \
  Attr<float>("scale")                                                                       \
      .Attr<float>("rest")                                                                   \
      .Attr<float>("soft_cap")                                                               \
      .Attr<int64_t>("below")                                                                \
      .Attr<int64_t>("above")                                                                \
      .Attr<bool>("in_parts")

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxmha_cpu_attend, jaxmha::attend,
    JAXMHA_PROBLEM.JAXMHA_RESULT.JAXMHA_RESULT.JAXMHA_RESULT.JAXMHA_ATTRIBUTES
        .Attr<bool>("gradient"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxmha_cpu_attend_backward, jaxmha::attend_backward,
    JAXMHA_PROBLEM.JAXMHA_FIVE.JAXMHA_RESULT.JAXMHA_RESULT.JAXMHA_RESULT.JAXMHA_RESULT
        .JAXMHA_ATTRIBUTES);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxmha_cpu_bias_gradient, jaxmha::bias_gradient,
                              JAXMHA_PROBLEM.JAXMHA_FIVE.JAXMHA_RESULT.JAXMHA_ATTRIBUTES);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxmha_cpu_matmul, jaxmha::matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_RESULT
                                  .Attr<bool>("a_transposed")
                                  .Attr<bool>("b_transposed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxmha_cpu_attend_cache, jaxmha::attend_cache,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().JAXMHA_FIVE.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY
        .JAXMHA_ANY.JAXMHA_RESULT.JAXMHA_RESULT.JAXMHA_RESULT.Attr<float>("soft_cap")
        .Attr<int64_t>("tokens")
        .Attr<int64_t>("left"));
#pragma GCC visibility pop
