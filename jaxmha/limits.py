"""Range checks of scale, soft cap and bias near the limits of float32: they stay finite, or are
rejected.

Values are not checked. All implementations but `reference` and `few_queries` add the values of all
keys before they divide by the row sum, so values beyond the largest number of the accumulation
dtype by S (3.4e38 / S in float32) may give an infinite output and gradients that are not finite.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.arrays import is_rounded
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.semantics import Semantics

# With a larger cap, the quotient of a logit of size 1 and the cap would be subnormal.
LARGEST_CAP: dict[str, float] = {"float32": 1e30, "float64": 1e290}


def check(semantics: Semantics, dtype: np.dtype[np.floating]) -> None:
    """Checks that scale and soft cap fit the accumulation dtype of heads of `dtype`.

    Raises:
      ValueError: the scale or the soft cap is too large, or so small that it counts as 0.
      TypeError: softmax_dtype is float64, and x64 is off.
    """
    accumulate = accumulation_dtype(dtype)
    for name, given, most in (
        ("scale", semantics.scale, float(np.finfo(accumulate).max)),
        ("logits_soft_cap", semantics.logits_soft_cap, LARGEST_CAP[accumulate.name]),
    ):
        if given is not None and abs(given) > most:
            raise ValueError(
                f"{name} of {accumulate} logits must be at most {most:.3g}, got {given}"
            )
        least = float(np.finfo(accumulate).tiny)  # a smaller one counts as 0 on CPUs
        if given and abs(given) < least:
            expected = f"{'0 or ' * (name == 'scale')}at least {least:.3g} in size"
            raise ValueError(f"{name} of {accumulate} logits must be {expected}, got {given}")
    if semantics.softmax_dtype is not None and is_rounded(semantics.softmax_dtype):
        raise TypeError(
            "softmax_dtype is float64, which JAX would round to float32: call "
            "jax.config.update('jax_enable_x64', True), or leave it out"
        )


def clipped(bias: jax.Array | None, dtype: np.dtype[np.floating]) -> jax.Array | None:
    """Casts a float64 bias to the accumulation dtype of heads of `dtype`.

    Finite entries beyond its range are clipped to it, so that they do not become infinite.
    """
    accumulate = accumulation_dtype(dtype)
    if bias is None or bias.dtype != np.float64 or accumulate == np.float64:
        return bias
    most = float(np.finfo(accumulate).max)
    beyond = jnp.isfinite(bias) & (jnp.abs(bias) > most)
    nearest = jnp.sign(bias) * most + (bias - jax.lax.stop_gradient(bias))  # keeps the gradient
    return jnp.where(beyond, nearest, bias).astype(accumulate)
