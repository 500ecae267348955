"""Names and initialisers of parameters, equal to those of flax."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from jaxmha.arrays import DTypeLike
from jaxmha.params import CANONICAL

Initializer: TypeAlias = Callable[..., Any]

# Path of every leaf of MHAParams in flax's parameter trees.
PATHS: dict[str, tuple[str, ...]] = {
    **{leaf: tuple(leaf.split(".")) for leaf in CANONICAL},
    "query_norm": ("query_ln", "scale"),
    "key_norm": ("key_ln", "scale"),
}


def flat_init(init: Initializer, contracted: int) -> Initializer:
    """Draws a kernel, whose first `contracted` axes are inputs, as a matrix (as a vector if 0).

    flax draws its kernels in the same way; initialisers compute their fans from the matrix.
    """

    def draw(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike) -> PyTree:
        axes = shape[:contracted], shape[contracted:]
        flat = tuple(math.prod(x) for x in axes[contracted == 0 :])
        # tree.map: partitioning metadata boxes the array in a pytree.
        return jax.tree.map(lambda x: jnp.reshape(x, shape), init(key, flat, dtype))

    return draw


def bias_kv_init(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Xavier-normal on `(1, 1, K * H)`, where both fans are `K * H`, as torch draws bias_k."""
    return jax.nn.initializers.normal(math.prod(shape) ** -0.5)(key, shape, dtype)
