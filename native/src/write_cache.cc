// Writes new tokens to a cache in place: the result of the call is its first operand.
#include <cstring>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxmha {
namespace {

namespace ffi = xla::ffi;
using Any = ffi::AnyBuffer;
using Sizes = std::vector<int64_t>;

Sizes sizes_of(const Any& x) { return {x.dimensions().begin(), x.dimensions().end()}; }

bool are_integers(const Any& x, const Sizes& sizes) {
  return x.element_type() == ffi::S32 && sizes_of(x) == sizes;
}

// `pool P K page ..` takes `tokens B T K ..` at `pages B T` and `slots B T`, after copies of pages
// `sources` to pages `targets`, one per batch row. A place outside the pool stands for none.
ffi::Error write_cache(Any pool, Any tokens, Any pages, Any slots, Any sources, Any targets,
                       ffi::Result<Any> out) {
  const Sizes p = sizes_of(pool), t = sizes_of(tokens);
  Sizes expected;
  if (t.size() >= 3 && p.size() == t.size()) {
    expected = {t[0], t[1], p[1]};
    expected.insert(expected.end(), p.begin() + 3, p.end());
  }
  if (expected.empty() || t != expected || tokens.element_type() != pool.element_type() ||
      out->element_type() != pool.element_type() || sizes_of(*out) != p ||
      !are_integers(pages, {t[0], t[1]}) || !are_integers(slots, {t[0], t[1]}) ||
      !are_integers(sources, {t[0]}) || !are_integers(targets, {t[0]}))
    return ffi::Error::InvalidArgument("jaxmha_cpu: pool, tokens and places do not fit");
  auto* const data = static_cast<char*>(out->untyped_data());
  if (data != pool.untyped_data()) std::memcpy(data, pool.untyped_data(), pool.size_bytes());
  const int64_t K = p[1], page = p[2], P = p[0];
  if (!pool.element_count()) return ffi::Error::Success();
  const int64_t row = static_cast<int64_t>(pool.size_bytes()) / (P * K * page);
  const auto *from = static_cast<const int32_t*>(sources.untyped_data()),
             *to = static_cast<const int32_t*>(targets.untyped_data());
  for (int64_t b = 0; b < t[0]; b++)
    if (from[b] >= 0 && from[b] < P && to[b] >= 0 && to[b] < P && from[b] != to[b])
      std::memcpy(data + to[b] * K * page * row, data + from[b] * K * page * row, K * page * row);
  const auto *at = static_cast<const int32_t*>(pages.untyped_data()),
             *slot = static_cast<const int32_t*>(slots.untyped_data());
  const auto* token = static_cast<const char*>(tokens.untyped_data());
  for (int64_t i = 0; i < t[0] * t[1]; i++) {
    if (at[i] < 0 || at[i] >= P || slot[i] < 0 || slot[i] >= page) continue;
    for (int64_t k = 0; k < K; k++)
      std::memcpy(data + ((at[i] * K + k) * page + slot[i]) * row, token + (i * K + k) * row, row);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmha

#define JAXMHA_ANY Arg<xla::ffi::AnyBuffer>()
#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxmha_cpu_write_cache, jaxmha::write_cache,
    xla::ffi::Ffi::Bind().JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY.JAXMHA_ANY
        .Ret<xla::ffi::AnyBuffer>());
#pragma GCC visibility pop
