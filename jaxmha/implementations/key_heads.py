"""The key/value heads that some of the query heads read."""

import jax
import jax.numpy as jnp
import numpy as np


def of_query_heads(x: jax.Array, axis: int, first: jax.Array, some: int, N: int) -> jax.Array:
    """The key/value heads of `x` that `some` query heads of N read, from `first` on, which `some` divides.

    Every key/value head of the result has as many of these query heads, as kernels need it. Where
    their groups are cut unevenly, each query head has a key/value head of its own.
    """
    K = x.shape[axis]
    G = N // K
    if G % some == 0:  # all of them read one
        return jax.lax.dynamic_slice_in_dim(x, first // G, 1, axis)
    if some % G == 0:
        return jax.lax.dynamic_slice_in_dim(x, first // G, some // G, axis)
    return jnp.take(x, (first + jnp.arange(some, dtype=np.int32)) // G, axis=axis, mode="clip")
