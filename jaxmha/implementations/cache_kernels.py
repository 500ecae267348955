"""Attention of one step over a cache by cuDNN, or on a TPU by JAX's kernel for paged caches.

Neither kernel copies the cache or materialises T x S scores.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmha import implementations, sharding
from jaxmha.implementations import online_softmax, platforms, probe, probe_cases
from jaxmha.implementations.base import Request
from jaxmha.implementations.fused import cudnn, cudnn_cached, tpu_paged
from jaxmha.implementations.fused.cudnn_cached import Stored
from jaxmha.implementations.online_softmax import State
from jaxmha.mask import Mask
from jaxmha.semantics import Semantics

NAME = "cudnn"


def attend(
    query: Float[jax.Array, "B 1 N H"],
    stored: Stored,
    lengths: Int[jax.Array, "B"],
    semantics: Semantics,
) -> Callable[[], Float[jax.Array, "B 1 N H"]] | None:
    """Returns a function that computes attention of one query per sequence over the first `lengths`
    tokens of its cache `stored`.

    Returns None if no kernel can compute it here without a copy of the cache.
    """
    request = _request(query, stored, lengths, semantics)
    if platforms.current().name == "tpu":
        same = request.query.dtype == request.key.dtype == request.value.dtype
        if not same or stored.table is None or sharding.current() is not None:
            return None
        if tpu_paged.failure(request, stored.keys.shape[2]) is not None:
            return None
        return lambda: tpu_paged.out(query, stored, lengths, request.scale)
    if not _takes(request, stored):
        return None
    return lambda: cudnn_cached.out(query, stored, lengths, request.scale)


def shared(
    query: Float[jax.Array, "B T N H"],
    stored: Stored,
    lengths: Int[jax.Array, "B"],
    semantics: Semantics,
) -> Callable[[], State] | None:
    """Returns a function that computes the softmax state of T queries per sequence that all attend
    the first `lengths` tokens of its cache `stored`.

    Its rows `r` are the T queries of every query head of a group. Its output has been rounded to the
    dtype of the cache. Returns None if cuDNN cannot compute it here without a copy of the cache.
    """
    request = _request(query, stored, lengths, semantics)._replace(return_lse=True)
    if not _takes(request, stored):
        return None
    return lambda: _as_state(*cudnn_cached.rows(query, stored, lengths, request.scale))


def causal(
    query: Float[jax.Array, "B T N H"],
    own: Stored,
    counts: Int[jax.Array, "B"],
    semantics: Semantics,
) -> Callable[[], State] | None:
    """Returns a function that computes the softmax state of T queries over keys and values of the
    same T tokens, `own`, with a causal mask; the first `counts` tokens are valid.

    Returns None if cuDNN cannot compute it here.
    """
    key, value = (jnp.swapaxes(x, 1, 2) for x in own[:2])
    mask = Mask.causal() & Mask.lengths(key_value=counts)
    request = _request(query, own, counts, semantics)._replace(
        key=key, value=value, mask=mask, return_lse=True
    )
    if implementations.unsupported(request, NAME) is not None:
        return None

    def run() -> State:
        found = cudnn.attend(request, leaks=probe.leaks(NAME, probe_cases.kind_of(request)))
        assert found.lse is not None
        (B, K, T, h), N = own.values.shape, query.shape[2]
        out = jnp.swapaxes(found.out, 1, 2).reshape(B, K, N // K * T, h)
        return _as_state(out, found.lse.reshape(out.shape[:3]))

    return run


def on_kernels_platform(
    kernel: Callable[[], jax.Array], otherwise: Callable[[], jax.Array]
) -> jax.Array:
    """Runs `kernel` in programs lowered for the platform that is current during the trace, and
    `otherwise` in programs lowered for another one."""

    def elsewhere() -> jax.Array:
        with platforms.lowering_for("cpu"):
            return otherwise()

    platform = platforms.current().name
    found: jax.Array = jax.lax.platform_dependent(default=elsewhere, **{platform: kernel})
    return found


def _struct(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype)


def _request(query: jax.Array, stored: Stored, lengths: jax.Array, semantics: Semantics) -> Request:
    """A request for queries that all attend the first `lengths` keys, only to decide support. Its
    key and value have shapes and dtypes but no data: kernels read `stored`."""
    B, S = query.shape[0], stored.slots
    key, value = (_struct((B, S, x.shape[1], x.shape[3]), x.dtype) for x in stored[:2])
    mask, zero = Mask.lengths(key_value=lengths), replace(semantics, fully_masked="zero")
    return Request(query, key, value, None, mask, zero, None, False)


def _takes(request: Request, stored: Stored) -> bool:
    """True if cuDNN is a candidate here and can read keys and values of the request in `stored`,
    without a copy. False where `sharding.use` names a mesh."""
    if not request.query.dtype == request.key.dtype == request.value.dtype:
        return False
    page = stored.keys.shape[2]
    if stored.table is not None and page & (page - 1):  # cuDNN takes pages of 2**n tokens
        return False
    if sharding.current() is not None or NAME not in implementations.candidates(None, request):
        return False
    return cudnn_cached.failure(request, paged=stored.table is not None) is None


def _as_state(out: Float[jax.Array, "B K r H"], lse: Float[jax.Array, "B K r"]) -> State:
    return online_softmax.of_output(out, lse, lse > -jnp.inf)
