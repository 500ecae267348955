"""Arrays and parameters from NumPy: JAX would compile a program for every shape."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

import jaxmha
from jaxmha import MHAParams, latent


def to_jax(x: Any, dtype: Any = None) -> jax.Array:
    """Numbers of the host as an array: `jnp.asarray` compiles a program for every shape."""
    array: jax.Array = jax.device_put(np.array(x, dtype))  # may alias the copy
    return array


def _drawn(init: Callable[..., Any], seed: int, sizes: dict[str, Any]) -> Any:
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        summed = math.prod(leaf.shape[:-1])  # or more: products of kernels stay near 1
        return to_jax((rng.standard_normal(leaf.shape) * summed**-0.5).astype(leaf.dtype))

    return jax.tree.map(draw, jax.eval_shape(partial(init, **sizes), jax.random.key(0)))


def params(seed: int = 0, **sizes: Any) -> MHAParams:
    """The leaves of `init_params`, biases drawn too."""
    made: MHAParams = _drawn(jaxmha.init_params, seed, sizes)
    return made


def latent_params(seed: int = 0, **sizes: Any) -> latent.LatentParams:
    """The leaves of `init_latent_params`, biases and scales of norms drawn too."""
    made: latent.LatentParams = _drawn(latent.init_latent_params, seed, sizes)
    return made
