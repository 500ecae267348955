"""The output of fully masked rows, by the policy `Semantics.fully_masked`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxmha import sharding
from jaxmha.implementations.base import Request, accumulation_dtype


def apply(
    request: Request, out: Float[jax.Array, "B T N h"], masked: Bool[jax.Array, "B T N"]
) -> Float[jax.Array, "B T N h"]:
    """Replaces the rows of `out` where `masked` is True according to `semantics.fully_masked`.

    Rows beyond a query length keep `out` under every policy, and so do all under "zero": there `out`
    must be 0 already.
    """
    policy, (T, N) = request.semantics.fully_masked, out.shape[1:3]
    if policy == "zero":
        return out
    lengths = request.mask.query_lengths
    if lengths is not None:
        positions = jnp.arange(T, dtype=np.int32).reshape(1, T, 1)
        within = positions < jnp.asarray(lengths).reshape(-1, 1, 1)
        masked &= sharding.in_order(within, 1)
    if policy == "mean" and request.value.shape[1]:
        values = request.value.astype(accumulation_dtype(request.value.dtype))
        # The division comes before the sum, which could overflow otherwise.
        mean = (values / values.shape[1]).sum(1, keepdims=True)
        mean = jnp.repeat(mean, N // values.shape[2], 2)
        return jnp.where(masked[..., None], mean.astype(out.dtype), out)
    # NaN replaces results after all other steps, so that no gradient passes through it.
    return jnp.where(masked[..., None], jnp.nan, out) if policy == "nan" else out
