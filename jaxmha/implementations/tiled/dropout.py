"""Keep-masks of dropout, tile by tile, equal to those of `jaxmha.dropout.keep`."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Bool, PRNGKeyArray, UInt32

from jaxmha import dropout
from jaxmha.implementations.base import Part
from jaxmha.implementations.tiled.block_mask import TilePosition
from jaxmha.implementations.tiled.layout import Index
from jaxmha.implementations.tiled.tiling import Tiling

KEY_SIZE = 2  # number of 32-bit integers in a threefry key

# A threefry key and, for a part of a larger request, the part's first position on B, N, T and S, so
# that the part has its own entries of the larger request's keep-mask.
Seed: TypeAlias = UInt32[jax.Array, "2"] | UInt32[jax.Array, "6"]


def seed_of(key: PRNGKeyArray | None, part: Part | None) -> Seed | None:
    """The seed of a request with dropout key `key`, from the first position of `part` if it is a
    part of a larger request; None: no dropout."""
    if key is None:
        return None
    seed: jax.Array = jax.random.key_data(dropout.threefry(key))
    if part is None:
        return seed
    return shift_seed(seed, part.b, part.n, 0, 0)


def shift_seed(seed: Seed, *starts: Index) -> UInt32[jax.Array, "6"]:
    """The seed of the part that starts at positions `starts` on B, N, T and S of the request (or
    part of one) that has `seed`."""
    more = jnp.stack([jnp.asarray(x).astype(jnp.uint32) for x in starts])
    before = seed[KEY_SIZE:] if seed.size > KEY_SIZE else jnp.zeros(4, jnp.uint32)
    return jnp.concatenate([seed[:KEY_SIZE], before + more])


def keep_mask(
    tiling: Tiling,
    rate: float,
    broadcast: tuple[str, ...],
    whole: tuple[int, int] | None,
    seed: Seed | None,
    position: TilePosition,
) -> Bool[jax.Array, "heads rows keys"] | None:
    """Keep-mask of a tile, True where a weight is kept, by key/value head, row (of all query heads
    in its group) and key; None without dropout.

    `rate`: probability of dropping. `broadcast`: axes of BNTS along which weights share a draw.
    `whole`: N and T of the request of which the arrays are a part; None: those of `tiling`.
    """
    if seed is None:
        return None
    key = jax.random.wrap_key_data(seed[:KEY_SIZE], impl="threefry2x32")
    # Positions of the tile on each axis; an axis along which weights share a draw has position 0.
    first = seed[KEY_SIZE:] if seed.size > KEY_SIZE else (0, 0, 0, 0)
    at = [
        jnp.zeros(1, jnp.uint32)
        if axis in broadcast
        else jnp.asarray(start).astype(jnp.uint32) + jnp.arange(size, dtype=jnp.uint32) + before
        for axis, start, size, before in zip(
            "BNTS", position.starts, position.sizes, first, strict=True
        )
    ]
    full = whole or (tiling.K * tiling.G, tiling.T)
    N, T = (1 if a in broadcast else n for a, n in zip("NT", full, strict=True))
    b, n, t = at[0][:, None, None], at[1][None, :, None], at[2][None, None, :]
    rows = ((b * N + n) * T + t).reshape(-1)
    drawn = dropout.draw(key, rate, rows, at[3]).reshape([x.shape[0] for x in at])
    full_tile = jnp.broadcast_to(drawn, position.sizes)
    return full_tile.reshape(tiling.tile_heads, tiling.G * tiling.rows, position.keys)
