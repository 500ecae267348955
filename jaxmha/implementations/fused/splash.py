"""Splash attention: the TPU kernel in Pallas that comes with JAX.

Tested by lowering and in interpret mode; on a TPU it is probed before its first use. Source:
`jax.experimental.pallas.ops.tpu.splash_attention`.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmha.implementations import platforms
from jaxmha.implementations.base import EVERYTHING_LEAKS, Leaks, Request, Result
from jaxmha.implementations.fused import adapter
from jaxmha.implementations.fused.adapter import Kernel, KernelInputs, Others, OutAndLse, fill
from jaxmha.mask import Mask

DTYPES: tuple[str, ...] = ("bfloat16",)
LANES, BLOCK = 128, 512
# True: Pallas interprets the kernel, so that tests need no TPU.
INTERPRET = False


class Settings(NamedTuple):
    """Static configuration of one call: bounds as in `KernelInputs`, the soft cap of the logits
    (None: no cap), and whether Pallas interprets the kernel."""

    left: int | None
    above: int | None
    soft_cap: float | None
    interpret: bool


def unsupported_reason(request: Request) -> str | None:
    """Returns None if this implementation supports the request, else the reason why not."""
    reason = adapter.unsupported(request, name="splash attention", dtypes=DTYPES)
    if reason:
        return reason
    platform, mask = platforms.current(), request.mask
    if platform.name != "tpu" and not INTERPRET:
        return f"splash attention runs on TPU, not on {platform.device}"
    if adapter.is_dense(request):
        return "splash attention takes neither a bias nor a dense mask"
    if mask.causal_offset is not None and not isinstance(mask.causal_offset, int):
        return "the causal offset must be a Python integer"
    if request.return_lse and request.semantics.logits_soft_cap is not None:
        return "the log-sum-exp has no gradient under a soft cap"
    scale = request.scale
    if (
        request.return_lse
        and scale
        and math.frexp(scale)[0] != 0.5
        and request.query.dtype == jnp.bfloat16
    ):
        return f"scaling bfloat16 queries by {scale}, not a power of 2, would round the log-sum-exp"
    return None


def traceable() -> str | None:
    """Returns None: every machine can trace splash attention."""
    return None


def attend(request: Request, *, leaks: Leaks = EVERYTHING_LEAKS) -> Result:
    """Computes the request in its own dtype; softmax and sums are float32.

    `leaks` has no effect: unattended keys and values are always zeroed, because the kernel
    multiplies values by weights of 0, and 0 * NaN is NaN.
    """
    ids = _ids(request.mask, request.query.shape[1], request.key.shape[1])
    cap = request.semantics.logits_soft_cap
    return adapter.attend(request, lambda inputs: _run(inputs, ids, cap, lse=request.return_lse))


def _ids(mask: Mask, T: int, S: int) -> Others:
    """Segment ids of queries and keys, each replaced by its rank among the query ids of its batch
    row, so that -1 is free for keys whose id no query has. None: the mask has no segments."""
    if mask.query_segments is None or mask.key_value_segments is None:
        return None
    queries, keys = (jnp.asarray(x) for x in (mask.query_segments, mask.key_value_segments))
    b = max(queries.shape[0], keys.shape[0])
    queries, keys = jnp.broadcast_to(queries, (b, T)), jnp.broadcast_to(keys, (b, S))
    known = jnp.sort(queries, 1)
    ranks = jax.vmap(jnp.searchsorted)
    at = ranks(known, keys)
    found = jnp.take_along_axis(known, jnp.minimum(at, T - 1), 1) == keys
    return ranks(known, queries).astype(np.int32), jnp.where(found, at, -1).astype(np.int32)


def _run(inputs: KernelInputs, ids: Others, soft_cap: float | None, *, lse: bool) -> OutAndLse:
    (B, T, _, _), S = inputs.query.shape, inputs.key.shape[1]
    rows, columns = _padded(T), _padded(S)
    valid = inputs.conditions.keys
    if inputs.key_lengths is not None:
        valid = jnp.arange(S, dtype=np.int32).reshape(1, S) < inputs.key_lengths[:, None]
    if valid is None and columns > S:
        valid = jnp.ones((1, S), bool)
    if valid is not None and ids is None:
        ids = jnp.zeros((1, T), np.int32), jnp.zeros((1, S), np.int32)
    if ids is not None:
        query_ids, key_ids = (jnp.broadcast_to(x, (B, x.shape[1])) for x in ids)
        if valid is not None:
            key_ids = jnp.where(valid, key_ids, -1)
        missing = ((0, 0), (0, columns - S))
        ids = fill(query_ids, 1, rows), jnp.pad(key_ids, missing, constant_values=-1)
    query = (inputs.query.astype(np.float32) * inputs.scale).astype(inputs.query.dtype)
    query = fill(query, 1, rows)
    key, value = fill(inputs.key, 1, columns), fill(inputs.value, 1, columns)
    settings = Settings(inputs.left, inputs.above, soft_cap, INTERPRET)
    # The scale of the kernel is 1, since the queries are already scaled; JAX differentiates that.
    kernel = Kernel(_out, _out_and_lse, False, 1.0, settings)
    out, found = adapter.call(kernel, query, key, value, None, ids, lse=lse)
    return out[:, :T], None if found is None else found[:, :, :T]


def _padded(size: int) -> int:
    block = _block(size)
    return -(-size // block) * block


def _block(size: int) -> int:
    return min(BLOCK, -(-size // LANES) * LANES)


def _kernel(settings: Settings, T: int, S: int, N: int, *, residuals: bool) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    left, above = settings.left, settings.above
    mask: Any = splash.FullMask((T, S))
    if left is not None or above is not None:
        mask = splash.LocalMask((T, S), (left, above), 0)
    q, kv = _block(T), _block(S)
    sizes = splash.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )
    return splash.make_splash_mha(
        mask=splash.MultiHeadMask([mask] * N),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=residuals,
        attn_logits_soft_cap=settings.soft_cap,
        interpret=settings.interpret,
    )


def _call(
    settings: Settings,
    query: Float[jax.Array, "B T N H"],
    key: Float[jax.Array, "B S K H"],
    value: Float[jax.Array, "B S K h"],
    ids: Others,
    residuals: bool,
) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (_, T, N, _), (_, S, _, _) = query.shape, key.shape
    kernel = _kernel(settings, T, S, N, residuals=residuals)

    def batch_row(q: jax.Array, k: jax.Array, v: jax.Array, ids: Others) -> Any:
        return kernel(q, k, v, None if ids is None else splash.SegmentIds(*ids))

    q, k, v = (jnp.moveaxis(x, 2, 1) for x in (query, key, value))
    return jax.vmap(batch_row)(q, k, v, ids)


def _default_precision() -> Any:
    """A context with the matmul precision "default", the only one that Mosaic supports for
    bfloat16, instead of that of JAX's configuration."""
    return jax.default_matmul_precision("default")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _out(
    settings: Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None,
    ids: Others,
) -> jax.Array:
    with _default_precision():
        out: jax.Array = _call(settings, query, key, value, ids, residuals=False)
    return jnp.moveaxis(out, 1, 2)


def _save(
    settings: Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None,
    ids: Others,
) -> tuple[jax.Array, Any]:
    with _default_precision():
        out, pull = jax.vjp(
            lambda q, k, v: _call(settings, q, k, v, ids, residuals=False), query, key, value
        )
    return jnp.moveaxis(out, 1, 2), pull


def _pull(settings: Settings, pull: Any, d_out: jax.Array) -> tuple[Any, ...]:
    with _default_precision():
        return *pull(jnp.moveaxis(d_out, 2, 1)), None, None


_out.defvjp(_save, _pull)


def _out_and_lse(
    settings: Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None,
    ids: Others,
) -> tuple[jax.Array, jax.Array]:
    with _default_precision():
        out, (lse,) = _call(settings, query, key, value, ids, residuals=True)
    return jnp.moveaxis(out, 1, 2), lse
