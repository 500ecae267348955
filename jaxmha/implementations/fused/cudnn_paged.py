"""cuDNN's paged attention of one query per sequence, through JAX's private functions.

JAX has `paged_attention` in the same private module; it accepts a pool of exactly B * M pages only,
so the function under it is called here, with any pool. A probe decides whether the result is right
on this machine. The call fits the signatures of JAX 0.10 to 0.12.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmha.implementations import platforms, probe, probe_cases, reference
from jaxmha.implementations.base import Request, Result
from jaxmha.implementations.fused import cudnn

NAME = "cudnn, paged"
PAGE = 16  # of the probe


def unsupported_reason(request: Request) -> str | None:
    """Returns None if the kernel can compute a request of one query per sequence.

    Keys and values of the request have the sizes of those of the pages of a sequence.
    """
    (_, T, _, H), h = request.query.shape, request.value.shape[3]
    lengths = request.mask.key_value_lengths
    if T != 1 or request.return_lse or request.bias is not None:
        return "it takes one query per sequence, without a bias, and returns no log-sum-exp"
    if h != H or H % 8:
        return f"keys and values must have the same multiple of 8 features, got {H} and {h}"
    if lengths is None:
        return "it takes lengths"
    return cudnn.unsupported_reason(request)


def failure(dtype: str) -> str | None:
    """The reason why the kernel does not work on this machine, or None."""
    if not platforms.current().present:
        return cudnn.traceable()
    kind = probe_cases.Kind(dtype)
    found = probe.failure(NAME, attend, unsupported_reason, kind)
    if found is None and probe.leaks(NAME, kind):
        return "slots beyond the lengths affect its results"
    return found


def out(
    query: Float[jax.Array, "B 1 N H"],
    key: Float[jax.Array, "P K page H"],
    value: Float[jax.Array, "P K page H"],
    table: Int[jax.Array, "B M"],
    lengths: Int[jax.Array, "B"],
    scale: float,
) -> Float[jax.Array, "B 1 N H"]:
    """Attention over the first `lengths` tokens of each sequence; entries of -1 are not read."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    call: Any = private._dot_product_attention
    version: Any = private.check_cudnn_version
    pages = jnp.clip(table, 0, key.shape[0] - 1).astype(np.int32)[:, None, :, None]
    none = jnp.zeros(0, query.dtype)
    given = {
        "query": jnp.swapaxes(query, 1, 2),
        "key": key,
        "value": value,
        "bias": none,
        "q_seqlen": jnp.ones(query.shape[0], np.int32),
        "kv_seqlen": lengths.astype(np.int32),
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
        "return_residual": False,
    }
    # JAX 0.12 has parameters of a score_mod: none.
    names = inspect.signature(call).parameters
    found: jax.Array = call(*(given.get(name, ()) for name in names))
    return jnp.swapaxes(found, 1, 2)


def attend(request: Request, *, leaks: bool = False) -> Result:
    """A request for the probe: keys and values go to pages of a pool, in another order."""

    @jax.custom_vjp
    def paged(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        lengths = jnp.asarray(request.mask.key_value_lengths)
        if leaks:  # nothing can zero the dead slots of a cache: this only finds the reason
            beyond = jnp.arange(key.shape[1])[None] >= lengths[:, None]
            key, value = (jnp.where(beyond[..., None, None], 0, x) for x in (key, value))
        keys, values, table = _in_pages(key), _in_pages(value), _table(*key.shape[:2])
        found = out(query, keys, values, table, lengths, request.scale)
        return jnp.where(lengths.reshape(-1, 1, 1, 1) > 0, found, 0)

    def exact(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return reference.attend(request._replace(query=query, key=key, value=value)).out

    def backward(heads: Any, d_out: jax.Array) -> Any:
        return jax.vjp(exact, *heads)[1](d_out)

    paged.defvjp(lambda *heads: (paged(*heads), heads), backward)
    return Result(paged(*request[:3]), None, None)


def _table(B: int, S: int) -> jax.Array:
    """Pages of each sequence: those of the pool from the last to the second."""
    M = -(-S // PAGE)
    return jnp.arange(B * M, 0, -1, dtype=np.int32).reshape(B, M)


def _in_pages(x: Float[jax.Array, "B S K H"]) -> Float[jax.Array, "P K page H"]:
    """A pool with one page more than the sequences need: the first, which holds NaN."""
    B, S, K, H = x.shape
    M = -(-S // PAGE)
    whole = jnp.pad(x, ((0, 0), (0, M * PAGE - S), (0, 0), (0, 0)))
    pages = jnp.swapaxes(whole.reshape(B * M, PAGE, K, H), 1, 2)[::-1]
    return jnp.concatenate([jnp.full_like(pages[:1], jnp.nan), pages])
