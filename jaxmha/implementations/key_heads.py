"""Selects the key/value heads that one device's query heads read."""

import jax
import jax.numpy as jnp
import numpy as np


def of_query_heads(x: jax.Array, axis: int, first: jax.Array, some: int, N: int) -> jax.Array:
    """Selects the key/value heads of `x` that query heads `first` to `first + some - 1` read.

    `first` is a multiple of `some`. Kernels need equally many query heads per key/value head: if
    these query heads divide groups unevenly, the result has one key/value head per query head.
    """
    K = x.shape[axis]
    G = N // K
    if G % some == 0:  # all these query heads read one key/value head
        return jax.lax.dynamic_slice_in_dim(x, first // G, 1, axis)
    if some % G == 0:
        return jax.lax.dynamic_slice_in_dim(x, first // G, some // G, axis)
    return jnp.take(x, (first + jnp.arange(some, dtype=np.int32)) // G, axis=axis, mode="clip")
