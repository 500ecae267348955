"""cuDNN's fused attention over a cache, which it reads in place; through JAX's private functions.

Tokens of one step are causal among themselves, but cuDNN aligns its causal mask at the first key.
So this module only computes attention of queries that all attend the same keys. JAX's private
`paged_attention` accepts only a pool of exactly B * M pages (M per sequence), so this module calls
the function that it wraps, which accepts any pool. If a GPU is present, a probe decides whether the
results are right on it. The calls fit the signatures of JAX 0.10 to 0.12.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Int32

from jaxmha.implementations import partitioned, platforms, probe, probe_cases, reference
from jaxmha.implementations.base import Leaks, Request, Result
from jaxmha.implementations.fused import cudnn, cudnn_kernel
from jaxmha.implementations.fused.cudnn_kernel import Settings

NAME, PAGED = "cudnn, cache", "cudnn, paged"
PROBE_PAGE = 16
OutAndLse: TypeAlias = tuple[jax.Array, jax.Array | None]


class Stored(NamedTuple):
    """Keys and values of a cache, `B K S _`, or with a `table` a pool of P pages, `P K page _`.

    Row b of the table lists the M pages of sequence b, with -1 for pages that it does not have.
    """

    keys: Float[jax.Array, "P K s H"]
    values: Float[jax.Array, "P K s H"]
    table: Int[jax.Array, "B M"] | None = None

    @property
    def slots(self) -> int:
        """S, the number of tokens that a sequence has room for."""
        size = self.keys.shape[2]
        return size if self.table is None else size * self.table.shape[1]


def unsupported_reason(request: Request) -> str | None:
    """Returns None if the kernel can compute a request without a copy of keys and values, else the
    reason why not. Key and value of the request are `B S K _`, even if the cache is paged.
    """
    (_, T, _, H), h, mask = request.query.shape, request.value.shape[3], request.mask
    if mask.key_value_lengths is None or mask.query_lengths is not None:
        return "it takes lengths of keys"
    if mask.causal_offset is not None or mask.window_size is not None:
        return "all queries attend the same keys"
    if request.bias is not None or (T > 1 and not request.return_lse):
        return "it takes no bias, and one query per sequence, or returns the log-sum-exp"
    if h != H or H % 8:
        return f"keys and values must have the same multiple of 8 features, got {H} and {h}"
    return cudnn.unsupported_reason(request)


def failure(request: Request, *, paged: bool) -> str | None:
    """The reason why cuDNN cannot compute a request here without a copy of the cache; None: it can.
    If a GPU is present, the kernel for this cache (`paged`: of pages) is probed."""
    reason = unsupported_reason(request)
    if reason is not None:
        return reason
    if not platforms.current().present:
        return probe.disabled() or cudnn.traceable()
    name, kind = PAGED if paged else NAME, probe_cases.kind_of(request)
    reason = probe.failure(name, partial(attend, paged=paged), unsupported_reason, kind)
    if reason is None and probe.leaks(name, kind).output:
        return "slots beyond the lengths affect its results"
    return reason


def out(
    query: Float[jax.Array, "B 1 N H"],
    stored: Stored,
    lengths: Int[jax.Array, "B"],
    scale: float,
) -> Float[jax.Array, "B 1 N H"]:
    """The output of one query per sequence over the first `lengths` tokens; undefined for length 0.
    Table entries of -1, all beyond the lengths, stand for page 0, whose slots are masked there."""
    queries, keys = (
        jnp.ones(query.shape[0], np.int32),
        lengths.clip(0, stored.slots).astype(np.int32),
    )
    found, _ = _call(jnp.swapaxes(query, 1, 2), stored, (queries, keys), scale, lse=False)
    return jnp.swapaxes(found, 1, 2)


def rows(
    query: Float[jax.Array, "B T N H"],
    stored: Stored,
    lengths: Int[jax.Array, "B"],
    scale: float,
) -> tuple[Float[jax.Array, "B K r H"], Float[jax.Array, "B K r"]]:
    """Output and log-sum-exp of T queries over the first `lengths` tokens: 0 and -inf for length 0.

    The N / K query heads of a group become r = N / K * T rows of their key head, in the order of
    heads, then queries, so that each key is read once instead of N / K times.
    """
    (B, T, N, H), K = query.shape, stored.keys.shape[1]
    r = N // K * T
    keys = lengths.clip(0, stored.slots).astype(np.int32)
    queries = jnp.where(keys > 0, np.int32(r), np.int32(0))
    together = jnp.swapaxes(query, 1, 2).reshape(B, K, r, H)
    found, lse = _call(together, stored, (queries, keys), scale, lse=True)
    assert lse is not None
    return found, jnp.where(keys[:, None, None] > 0, lse, -jnp.inf)


def _call(
    query: Float[jax.Array, "B N T H"],
    stored: Stored,
    counts: tuple[Int32[jax.Array, "B"], Int32[jax.Array, "B"]],
    scale: float,
    *,
    lse: bool,
) -> OutAndLse:
    keys, values, table = stored
    if table is None:
        settings = Settings(scale, False, None, layout="BNTH")
        if lse:
            return cudnn_kernel.out_and_lse(settings, query, keys, values, None, counts)
        return cudnn_kernel.out(settings, query, keys, values, None, counts), None
    # JAX's own partitioning rule would shard pages like batch rows, but a sequence may list any.
    found: OutAndLse = partitioned.run(
        partial(_of_pages, scale=scale, lse=lse),
        (query, keys, values, table, *counts),
        ("bn..", ".k..", ".k..", "b.", "b", "b"),
        lambda _: ("bn..", "bn." if lse else None),
    )
    return found


def _of_pages(
    query: Float[jax.Array, "B N T H"],
    keys: Float[jax.Array, "P K page H"],
    values: Float[jax.Array, "P K page H"],
    table: Int[jax.Array, "B M"],
    queries: Int32[jax.Array, "B"],
    lengths: Int32[jax.Array, "B"],
    *,
    scale: float,
    lse: bool,
) -> OutAndLse:
    from jax._src.cudnn import fused_attention_stablehlo as private

    call: Any = private._dot_product_attention
    version: Any = private.check_cudnn_version
    pages = jnp.clip(table, 0, keys.shape[0] - 1).astype(np.int32)[:, None, :, None]
    none = jnp.zeros(0, query.dtype)
    given = {
        "query": query,
        "key": keys,
        "value": values,
        "bias": none,
        "q_seqlen": queries,
        "kv_seqlen": lengths,
        "q_offsets": none,
        "kv_offsets": none,
        "page_table_k": pages,
        "page_table_v": pages,
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": private.MaskType.PADDING,
        "layout": private.AttentionLayout.BNTH.value,
        "sliding_window_length": None,
        "cudnn_version": version(),
        "return_residual": lse,
    }
    # JAX 0.12 also has parameters for a score_mod; they stay empty.
    names = inspect.signature(call).parameters
    found: OutAndLse = call(*(given.get(name, ()) for name in names))
    return found if lse else (found, None)  # type: ignore[return-value]


def attend(
    request: Request,
    *,
    leaks: Leaks = Leaks(),
    paged: bool = False,
    one: Callable[..., jax.Array] = out,
) -> Result:
    """Computes a test case of the probe with its keys and values in a cache, of pages if `paged`.

    Gradients are those of `reference`, so that the probe judges output and log-sum-exp alone.
    `leaks`: if its `output` is not 0, slots beyond the lengths are zeroed. `one`: the kernel for
    cases without log-sum-exp, which have one query; `rows` computes the others.
    """
    lengths = jnp.asarray(request.mask.key_value_lengths)
    (B, T, N, _), h = request.query.shape, request.value.shape[3]

    def stored(*heads: jax.Array) -> Stored:
        # If NaN beyond the lengths reaches the output, the probe tries the case again with zeros
        # there. In users' calls nothing zeroes these slots for cuDNN, so that `failure` declines it
        # then; for the TPU's kernel, the cache has written zeros into them.
        if leaks.output:
            beyond = jnp.arange(heads[0].shape[1])[None] >= lengths[:, None]
            heads = tuple(jnp.where(beyond[..., None, None], 0, x) for x in heads)
        if paged:
            keys, values = map(_in_pages, heads)
            return Stored(keys, values, _table(*heads[0].shape[:2]))
        return Stored(*(jnp.swapaxes(x, 1, 2) for x in heads))

    def call(query: jax.Array, *heads: jax.Array) -> OutAndLse:
        if not request.return_lse:
            found = one(query, stored(*heads), lengths, request.scale)
            return jnp.where(lengths.reshape(-1, 1, 1, 1) > 0, found, 0), None
        found, lse = rows(query, stored(*heads), lengths, request.scale)
        return jnp.swapaxes(found.reshape(B, N, T, h), 1, 2), lse.reshape(B, N, T)

    def exact(query: jax.Array, key: jax.Array, value: jax.Array) -> OutAndLse:
        found = reference.attend(request._replace(query=query, key=key, value=value))
        return found.out, found.lse if request.return_lse else None

    with_gradient: Callable[..., OutAndLse] = _with_gradient_of(exact, call)
    output, lse = with_gradient(*request[:3])
    return Result(output, None, lse)


def _with_gradient_of(
    exact: Callable[..., OutAndLse], call: Callable[..., OutAndLse]
) -> Callable[..., OutAndLse]:
    found: Any = jax.custom_vjp(call)

    def backward(heads: tuple[jax.Array, ...], cotangents: OutAndLse) -> tuple[jax.Array, ...]:
        gradients: tuple[jax.Array, ...] = jax.vjp(exact, *heads)[1](cotangents)
        return gradients

    found.defvjp(lambda *heads: (call(*heads), heads), backward)
    wrapped: Callable[..., OutAndLse] = found
    return wrapped


def _table(B: int, S: int) -> jax.Array:
    """The page table of the probe for S tokens: the first entry is the last page, and so on down to
    page 1, so that a kernel that does not follow the table fails."""
    M = -(-S // PROBE_PAGE)
    return jnp.arange(B * M, 0, -1, dtype=np.int32).reshape(B, M)


def _in_pages(x: Float[jax.Array, "B S K H"]) -> Float[jax.Array, "P K page H"]:
    """Keys or values of the probe as a pool of pages, in the order of `_table`.

    Page 0 belongs to no sequence and holds NaN, so that results show if a kernel has read it.
    """
    B, S, K, H = x.shape
    M = -(-S // PROBE_PAGE)
    whole = jnp.pad(x, ((0, 0), (0, M * PROBE_PAGE - S), (0, 0), (0, 0)))
    pages = jnp.swapaxes(whole.reshape(B * M, PROBE_PAGE, K, H), 1, 2)[::-1]
    return jnp.concatenate([jnp.full_like(pages[:1], jnp.nan), pages])
