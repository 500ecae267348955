"""Keep-masks of dropout, tile by tile, equal to those of `jaxmha.dropout.keep`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmha import dropout
from jaxmha.arrays import Array
from jaxmha.implementations.base import Part
from jaxmha.implementations.tiled.block_mask import Place
from jaxmha.implementations.tiled.tiling import Plan

WORDS = 2  # seed words of a threefry key


def words_of(key: Array | None, part: Part | None) -> jax.Array | None:
    """The seed: words of a threefry key and, for a part of a larger request, its first position on
    B, N, T and S."""
    if key is None:
        return None
    words = jax.random.key_data(dropout.threefry(key))
    if part is None:
        return words
    return placed(words, part.b, part.n, 0, 0)


def placed(words: jax.Array, *starts: Any) -> jax.Array:
    """The seed with its first positions on B, N, T and S moved on by `starts`."""
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
    """Keep-mask of a tile, `cells rows keys`; None without dropout.

    `whole`: N and T of the larger request that the arrays are a part of; `words`: the seed, as
    `words_of` returns it.
    """
    if words is None:
        return None
    key = jax.random.wrap_key_data(words[:WORDS], impl="threefry2x32")
    starts = (place.b, place.n, place.t, place.s)
    sizes = (place.batches, place.heads, place.rows, place.keys)
    # Positions of the tile on each axis; an axis that shares a draw has a single position.
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
