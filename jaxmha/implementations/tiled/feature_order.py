"""Exchanges the feature with the largest terms with the last one, so that logits round less.

The matmul of XLA:CPU adds the terms of a sum one by one, and rounds every partial sum. In many
trained models one feature has far larger terms than all others: each partial sum from that term on
is as large as the term, and its rounding error grows with it. If the term comes last, only the last
sum is as large.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmha.implementations.tiled.tiling import Tiling

Arrays = TypeVar("Arrays", bound=tuple[jax.Array, ...])
# Features are exchanged only if T and S are at least LEAST: the exchange then takes less than 3 %
# of the gradient's time.
LEAST = 1024


def largest_feature(
    tiling: Tiling,
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    platform: str,
) -> Int[jax.Array, "B K"] | None:
    """The index of the feature whose largest magnitudes in the queries of a group and in the keys
    have the largest product, by key/value head.

    Returns None, to keep the order, on platforms other than CPUs, if T or S is below LEAST, or with
    several KV tiles, whose logits must round as in the forward pass.
    """
    if platform != "cpu" or tiling.kv_tiles > 1 or min(tiling.T, tiling.S) < LEAST:
        return None
    queries = jnp.abs(query).max(2).reshape(tiling.B, tiling.K, tiling.G, -1).max(2)
    return (queries * jnp.abs(key).max(2)).argmax(-1)


def exchanged(feature: Int[jax.Array, "B K"] | None, arrays: Arrays) -> Arrays:
    """Exchanges `feature` with the last feature of arrays `B N T H` or `B K S H`.

    If `feature` is None, returns the arrays unchanged. A second exchange restores the order.
    """
    if feature is None:
        return arrays
    return tuple(_exchanged(feature, x) for x in arrays)  # type: ignore[return-value]


def _exchanged(feature: Int[jax.Array, "B K"], x: jax.Array) -> jax.Array:
    (B, K), H = feature.shape, x.shape[-1]
    grouped = x.reshape(B, K, -1, *x.shape[2:])
    at = feature.reshape(B, K, 1, 1, 1)
    found = jnp.take_along_axis(grouped, at, -1)
    index = np.arange(H).reshape(1, 1, 1, 1, H)
    moved = jnp.where(index == at, grouped[..., -1:], jnp.where(index == H - 1, found, grouped))
    return moved.reshape(x.shape)
