"""The key/value heads that some of the query heads read, such as those of one device."""

import jax
import jax.numpy as jnp
import numpy as np


def of_query_heads(x: jax.Array, axis: int, first: jax.Array, some: int, N: int) -> jax.Array:
    """Selects the key/value heads, on `axis` of `x`, that `some` of all `N` query heads read.

    These are the query heads from `first` on, a multiple of `some`. If they cover groups unevenly,
    the result has one key/value head per query head: kernels need groups of equal size.
    """
    K = x.shape[axis]
    G = N // K
    if G % some == 0:  # all these query heads read one key/value head
        return jax.lax.dynamic_slice_in_dim(x, first // G, 1, axis)
    if some % G == 0:
        return jax.lax.dynamic_slice_in_dim(x, first // G, some // G, axis)
    return jnp.take(x, (first + jnp.arange(some, dtype=np.int32)) // G, axis=axis, mode="clip")
