"""Attention of one query per sequence over a cache, by cuDNN without a copy of the cache."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmha import implementations, sharding
from jaxmha.implementations import platforms, probe, probe_cases
from jaxmha.implementations.base import Request
from jaxmha.implementations.fused import cudnn_kernel, cudnn_paged
from jaxmha.implementations.fused.cudnn_kernel import Settings
from jaxmha.mask import Mask
from jaxmha.semantics import Semantics

NAME = "cudnn"


def attend(
    query: Float[jax.Array, "B 1 N H"],
    keys: Float[jax.Array, "B K S H"],
    values: Float[jax.Array, "B K S h"],
    lengths: Int[jax.Array, "B"],
    semantics: Semantics,
    otherwise: Callable[[], Float[jax.Array, "B 1 N h"]],
) -> Float[jax.Array, "B 1 N h"] | None:
    """Attention over the first `lengths` slots; None: cuDNN would need a copy, or cannot do it.

    `otherwise` computes the same in plain XLA, for programs lowered for other platforms.
    """
    mask = Mask.lengths(key_value=lengths)
    key, value = (jnp.swapaxes(x, 1, 2) for x in (keys, values))
    if not _takes(Request(query, key, value, None, mask, semantics, None, False)):
        return None

    def kernel() -> jax.Array:
        (B, _, _, H), S = query.shape, keys.shape[2]
        scale = H**-0.5 if semantics.scale is None else semantics.scale
        settings = Settings(scale, False, None, layout="BNTH")
        counts = jnp.ones(B, np.int32), jnp.clip(lengths, 0, S).astype(np.int32)
        out = cudnn_kernel.out(settings, jnp.swapaxes(query, 1, 2), keys, values, None, counts)
        return jnp.swapaxes(out, 1, 2)

    return _on_kernels_platform(kernel, otherwise)


def attend_pages(
    query: Float[jax.Array, "B 1 N H"],
    pools: tuple[Float[jax.Array, "P K page H"], Float[jax.Array, "P K page h"]],
    table: Int[jax.Array, "B M"],
    lengths: Int[jax.Array, "B"],
    semantics: Semantics,
    otherwise: Callable[[], Float[jax.Array, "B 1 N h"]],
) -> Float[jax.Array, "B 1 N h"] | None:
    """The same over the pages of a table."""
    page = pools[0].shape[2]
    B, S = query.shape[0], table.shape[1] * page
    if page & (page - 1):  # cuDNN takes pages of a power of two
        return None
    struct: Any = jax.ShapeDtypeStruct
    key, value = (struct((B, S, x.shape[1], x.shape[3]), x.dtype) for x in pools)
    mask = Mask.lengths(key_value=lengths)
    request = Request(query, key, value, None, mask, semantics, None, False)
    if not query.dtype == key.dtype == value.dtype or sharding.current() is not None:
        return None
    if NAME not in implementations.candidates(None, request):
        return None
    if cudnn_paged.unsupported_reason(request) or cudnn_paged.failure(query.dtype.name):
        return None

    def kernel() -> jax.Array:
        return cudnn_paged.out(query, *pools, table, lengths.clip(0, S), request.scale)

    return _on_kernels_platform(kernel, otherwise)


def _on_kernels_platform(
    kernel: Callable[[], jax.Array], otherwise: Callable[[], jax.Array]
) -> jax.Array:
    """The kernel on its platform, and `otherwise` in programs lowered for others."""

    def elsewhere() -> jax.Array:
        with platforms.lowering_for("cpu"):
            return otherwise()

    platform = implementations.KERNELS[NAME]
    found: jax.Array = jax.lax.platform_dependent(default=elsewhere, **{platform: kernel})
    return found


def _takes(request: Request) -> bool:
    """True if cuDNN can compute the request without a copy of keys or values."""
    (_, T, _, H), h = request.query.shape, request.value.shape[3]
    same = request.query.dtype == request.key.dtype == request.value.dtype
    if T != 1 or h != H or H % 8 or not same or sharding.current() is not None:
        return False
    if NAME not in implementations.candidates(None, request):
        return False
    if implementations.unsupported(request, NAME) is not None:
        return False
    return not probe.leaks(NAME, probe_cases.kind_of(request))
