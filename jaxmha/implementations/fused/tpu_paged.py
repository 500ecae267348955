"""Attention of one query per sequence over a paged cache, by JAX's own Pallas kernel for TPUs.

Keys and values are read in place. The kernel multiplies masked slots by weights of 0, so that
NaN in them would reach the output: pages beyond a sequence are read as its first page, and the
cache zeroes the slots after its last token. Tested by lowering and in interpret mode; on a TPU it
is probed before its first use. Source: `jax.experimental.pallas.ops.tpu.paged_attention`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmha.implementations import platforms, probe
from jaxmha.implementations.base import Request
from jaxmha.implementations.fused import cudnn_cached
from jaxmha.implementations.fused.cudnn_cached import Stored
from jaxmha.implementations.probe_cases import Kind

NAME = "tpu, paged"
# Features per head are a multiple of FEATURES, and tokens per page one of TOKENS, as layouts of
# bfloat16 need; one step of the kernel reads one page, or several with at most KEYS tokens
# together.
FEATURES, TOKENS, KEYS = 128, 16, 512


def unsupported_reason(request: Request) -> str | None:
    """Returns None if the kernel can compute a request with pages of some size, else the reason why
    not. Key and value of the request are `B S K _`, although the cache is paged.
    """
    (_, T, _, H), h, mask = request.query.shape, request.value.shape[3], request.mask
    semantics, softmax_dtype = request.semantics, request.semantics.softmax_dtype
    if platforms.current().name != "tpu":
        return f"it runs on TPU, not on {platforms.current().device}"
    if request.query.dtype != jnp.bfloat16:
        return f"it rounds keys and values to bfloat16, got {request.query.dtype}"
    if T != 1 or request.return_lse or request.bias is not None:
        return "it takes one query per sequence, without a bias, and returns no log-sum-exp"
    if mask.key_value_lengths is None or mask.query_lengths is not None:
        return "it takes lengths of keys"
    if mask.causal_offset is not None or mask.window_size is not None:
        return "it takes neither a causal offset nor a window"
    if semantics.logits_soft_cap is not None or softmax_dtype not in (None, np.dtype(np.float32)):
        return "softmax is in float32, without a soft cap"
    if h != H or H % FEATURES:
        return (
            f"keys and values must have the same multiple of {FEATURES} features, got {H} and {h}"
        )
    return None


def failure(request: Request, page: int) -> str | None:
    """The reason why the kernel cannot compute a request here, with pages of `page` tokens; None:
    it can. If a TPU is present, the kernel is probed."""
    reason = unsupported_reason(request)
    if reason is None and page % TOKENS:
        reason = f"pages must have a multiple of {TOKENS} tokens, got {page}"
    if reason is not None or not platforms.current().present:
        return reason or probe.disabled()
    H = request.query.shape[3]
    # Unlike cuDNN's kernels, this one may let slots after the last token affect the output, so that
    # the leaks which its probe finds do not matter: on a TPU, the cache itself zeroes these slots.
    attend = partial(cudnn_cached.attend, paged=True, one=out)
    return probe.failure(
        NAME, attend, unsupported_reason, Kind("bfloat16", heads=(H, H), queries=1)
    )


def out(
    query: Float[jax.Array, "B 1 N H"],
    stored: Stored,
    lengths: Int[jax.Array, "B"],
    scale: float,
) -> Float[jax.Array, "B 1 N H"]:
    """The output of one query per sequence over the first `lengths` tokens; undefined for length 0.
    Pages that the table lists beyond the lengths, such as -1, are not read."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    (B, _, N, H), (P, K, page, _) = query.shape, stored.keys.shape
    assert stored.table is not None
    lengths = lengths.clip(0, stored.slots).astype(np.int32)
    table = jnp.clip(stored.table, 0, P - 1).astype(np.int32)
    entries = jnp.arange(table.shape[1], dtype=np.int32)[None]
    table = jnp.where(entries * page < lengths[:, None], table, table[:, :1])
    # The kernel gets every key/value head as a sequence of its own, with the pages of that head.
    heads = jnp.arange(K, dtype=np.int32)
    pages = (table[:, None] * K + heads[None, :, None]).reshape(B * K, -1)
    pools = (x.reshape(1, P * K, page, H) for x in stored[:2])
    rows = (query.astype(np.float32) * scale).reshape(B * K, N // K, H)
    with (
        jax.default_matmul_precision("default"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        found: jax.Array = paged_attention(
            rows,
            *pools,
            jnp.repeat(lengths, K),
            pages,
            pages_per_compute_block=_pages_of_a_step(pages.shape[1], page),
        )
    return found.reshape(query.shape).astype(query.dtype)


def _pages_of_a_step(count: int, page: int) -> int:
    """The number of pages that one step of the kernel reads: the largest divisor of `count`, the
    pages of a sequence, with at most KEYS tokens at `page` tokens each; 1 if no divisor has so
    few."""
    return max(x for x in range(1, count + 1) if count % x == 0 and (x == 1 or x * page <= KEYS))
