"""The entries that dropout keeps, block by block: those of `jaxmha.dropout.keep`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmha import dropout
from jaxmha.arrays import Array
from jaxmha.implementations.base import Part
from jaxmha.implementations.tiled.block_mask import Place
from jaxmha.implementations.tiled.tiling import Plan

WORDS = 2  # of a threefry key


def words_of(key: Array | None, part: Part | None) -> jax.Array | None:
    """The words of a threefry key and the first place of a request on B, N, T and S."""
    if key is None:
        return None
    words = jax.random.key_data(dropout.threefry(key))
    if part is None:
        return words
    return placed(words, part.b, part.n, 0, 0)


def placed(words: jax.Array, *starts: Any) -> jax.Array:
    """The words of a key, and these places more than it has."""
    more = jnp.stack([jnp.asarray(x).astype(jnp.uint32) for x in starts])
    before = words[WORDS:] if words.size > WORDS else jnp.zeros(4, jnp.uint32)
    return jnp.concatenate([words[:WORDS], before + more])


def kept(
    plan: Plan,
    rate: float,
    broadcast: tuple[str, ...],
    whole: tuple[int, int] | None,
    words: jax.Array | None,
    place: Place,
) -> jax.Array | None:
    """Weights of a block that are kept, `cells rows keys`.

    `whole`: N and T, where this is a part of something larger; `words` as `words_of` has them.
    """
    if words is None:
        return None
    key = jax.random.wrap_key_data(words[:WORDS], impl="threefry2x32")
    starts = (place.b, place.n, place.t, place.s)
    sizes = (place.batches, place.heads, place.rows, place.keys)
    # Places of the entries of a block on each axis; a shared axis has one place.
    first = words[WORDS:] if words.size > WORDS else (0, 0, 0, 0)
    at = [
        jnp.zeros(1, jnp.uint32)
        if axis in broadcast
        else jnp.asarray(start).astype(jnp.uint32) + jnp.arange(size, dtype=jnp.uint32) + before
        for axis, start, size, before in zip("BNTS", starts, sizes, first, strict=True)
    ]
    full = whole or (plan.K * plan.G, plan.T)
    N, T = (1 if a in broadcast else n for a, n in zip("NT", full, strict=True))
    b, n, t = at[0][:, None, None], at[1][None, :, None], at[2][None, None, :]
    rows = ((b * N + n) * T + t).reshape(-1)
    drawn = dropout.draw(key, rate, rows, at[3]).reshape([x.shape[0] for x in at])
    return jnp.broadcast_to(drawn, sizes).reshape(plan.cells, plan.G * plan.rows, sizes[3])
