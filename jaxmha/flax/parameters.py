"""Parameters as flax names and draws them."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxmha.params import CANONICAL

Initializer: TypeAlias = Callable[..., Any]

# Where flax's trees hold every leaf.
PATHS: dict[str, tuple[str, ...]] = {
    **{leaf: tuple(leaf.split(".")) for leaf in CANONICAL},
    "query_norm": ("query_ln", "scale"),
    "key_norm": ("key_ln", "scale"),
}


def flat_init(init: Initializer, contracted: int) -> Initializer:
    """Draws an array whose first `contracted` axes are inputs as a matrix, or as a vector if 0.

    So flax draws its kernels; an initialiser that looks at fans sees those of the whole map.
    """

    def draw(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        sides = shape[:contracted], shape[contracted:]
        flat = tuple(math.prod(side) for side in sides[contracted == 0 :])
        # A box of partitioning metadata is a pytree of one array.
        return jax.tree.map(lambda x: jnp.reshape(x, shape), init(key, flat, dtype))

    return draw


def bias_kv_init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Xavier-normal on `(1, 1, K * H)`, of which both fans are `K * H`, as torch draws bias_k."""
    return jax.nn.initializers.normal(math.prod(shape) ** -0.5)(key, shape, dtype)
