"""The entries that dropout keeps, block by block: those of `jaxmha.dropout.keep`."""

import jax
import jax.numpy as jnp

from jaxmha import dropout
from jaxmha.implementations.blocks import Plan
from jaxmha.implementations.pairs import Place


def kept(
    plan: Plan, rate: float, broadcast: tuple[str, ...], words: jax.Array | None, place: Place
) -> jax.Array | None:
    """Weights of a block that are kept, `cells rows keys`; `words` of a threefry key, or None."""
    if words is None:
        return None
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    full = (plan.B, plan.K * plan.G, plan.T, plan.S)
    starts = (place.b, place.n, place.t, place.s)
    sizes = (place.batches, place.heads, place.rows, place.keys)
    # Places of the entries of a block on each axis; a shared axis has one place.
    at = [
        jnp.zeros(1, jnp.uint32)
        if axis in broadcast
        else (start + jnp.arange(size)).astype(jnp.uint32)
        for axis, start, size in zip("BNTS", starts, sizes, strict=True)
    ]
    N, T = (1 if a in broadcast else n for a, n in zip("NT", full[1:3], strict=True))
    b, n, t = at[0][:, None, None], at[1][None, :, None], at[2][None, None, :]
    rows = ((b * N + n) * T + t).reshape(-1)
    drawn = dropout.draw(key, rate, rows, at[3]).reshape([x.shape[0] for x in at])
    return jnp.broadcast_to(drawn, sizes).reshape(plan.cells, plan.G * plan.rows, sizes[3])
