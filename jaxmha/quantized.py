"""Storage of keys and values in one byte per number, with a scale per token and head."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmha import checks
from jaxmha.arrays import DTypeLike, as_dtype
from jaxmha.implementations.base import accumulation_dtype


def storage_dtype(dtype: DTypeLike, name: str = "dtype") -> np.dtype[np.generic]:
    """Converts `dtype` to a NumPy dtype; raises TypeError unless it is floating or int8."""
    found = as_dtype(name, dtype)
    if found == np.int8:
        return found
    if not jnp.issubdtype(found, np.floating):
        raise TypeError(f"{name} must be floating or int8, got {found}")
    return checks.floating_dtype(found, name)


def unscaled_dtype(dtype: DTypeLike) -> np.dtype[np.floating]:
    """Converts the `dtype` of a cache without scales; raises TypeError unless it is floating."""
    if as_dtype("dtype", dtype) == np.int8:
        raise TypeError(
            "dtype must be floating, got int8, which needs a scale per token: use a paged cache"
        )
    return checks.floating_dtype(dtype)


def is_scaled(dtype: np.dtype[np.generic]) -> bool:
    """True if vectors of this dtype are stored with a scale: int8 and float8."""
    return dtype.itemsize == 1


def quantize(
    x: Float[jax.Array, "*B H"], dtype: np.dtype[np.generic]
) -> tuple[jax.Array, Float[jax.Array, "*B"]]:
    """Rounds each vector x of H numbers to `q * scale`, where scale = max |x| / max |dtype|.

    A float32 scale is at least 2**-126. int8: q is the nearest integer, ties to even, so that
    `|x - q * scale| <= max |x| / 254` unless max |x| is below 127 * 2**-126. float8: q is the
    nearest float8. A vector with NaN or an infinity has a NaN scale; a vector of zeros, scale 1.

    Returns:
      q and the scale, in float32 (float64 for float64 inputs).
    """
    wide = accumulation_dtype(x.dtype)
    x = x.astype(wide)
    largest = 127.0 if dtype == np.int8 else float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    size = jnp.abs(x).max(-1, initial=0.0)
    # A subnormal scale would lose digits, and its inverse would overflow.
    scale = jnp.where(size > 0, jnp.maximum(size / largest, float(np.finfo(wide.name).tiny)), 1.0)
    scale = jnp.where(jnp.isfinite(size), scale, jnp.nan)
    q = x / scale[..., None]
    if dtype == np.int8:
        q = jnp.where(jnp.isnan(q), 0.0, jnp.clip(jnp.round(q), -largest, largest))
    return q.astype(dtype), scale
