"""Traced scale: an array, such as a learned temperature, with a gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import sharding
from jaxmha.arrays import Array, reject_foreign
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.implementations.mods import Mod
from jaxmha.implementations.tiled import attended
from jaxmha.mask import Mask
from jaxmha.mod_arguments import Mods, checked


def split(scale: float | Array | None) -> tuple[float | None, jax.Array | None]:
    """Splits a scale into (static, traced): a JAX array gives (1.0, array), else traced is None.

    Raises:
      ValueError: the array has a shape other than ().
      TypeError: the array is not of real numbers.
    """
    reject_foreign("scale", scale)
    if not isinstance(scale, jax.Array | np.ndarray):
        return scale, None
    if scale.shape != ():
        raise ValueError(
            f"scale must be one number, or an array of shape (), got shape {scale.shape}: multiply the "
            "query where heads or features have scales of their own"
        )
    real = jnp.issubdtype(scale.dtype, np.floating) or jnp.issubdtype(scale.dtype, np.integer)
    if not real:
        raise TypeError(f"scale must be a real number, got {scale.dtype}")
    return (1.0, scale) if isinstance(scale, jax.Array) else (scale.item(), None)


def scaled(
    scale: Array,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    bias: jax.Array | None,
    mask: Mask,
    mask_mod: Mod | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Heads `B T N H`, `B S K H` and `B S K h` in the accumulation dtype, with scaled queries.

    Half precision would round the product, and with it the gradient of the scale. Fully masked
    queries are zeroed: they may hold NaN, and the gradient of the scale sums over all queries.
    """
    accumulate = accumulation_dtype(heads[0].dtype)
    query, key, value = (x.astype(accumulate) for x in heads)
    (B, T, N, _), S = query.shape, key.shape[1]
    checked(Mods(mask=mask_mod), {"B": B, "T": T, "N": N, "S": S})
    rows, _ = attended.attended_per_head(mask, bias, B, N, T, S, mask_mod)
    if rows is not None:
        rows = jnp.moveaxis(sharding.in_order(rows, 2), 1, 2)[..., None]
        query = jnp.where(rows, query, 0.0)
    return query * jnp.asarray(scale).astype(accumulate), key, value
