"""Finds the queries and keys with an allowed pair, and the blocks of pairs under a mask function.

`zero_unattended` zeroes all other queries, keys and values, so that NaN in them reaches neither
outputs nor gradients. The blocks tell which tiles a schedule may skip or leave unmasked.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32

from jaxmha import sharding
from jaxmha.arrays import Array
from jaxmha.implementations import platforms
from jaxmha.implementations.base import allowed_pairs
from jaxmha.implementations.mods import Blocks, Grid, Mod
from jaxmha.implementations.tiled.block_mask import (
    NO_CONDITIONS,
    Conditions,
    TilePosition,
    allowed,
    from_mask,
    pad,
    slice_tile,
)
from jaxmha.implementations.tiled.layout import Index
from jaxmha.implementations.tiled.tiling import Tiling, choose_tiling
from jaxmha.mask import Mask

# `blocks_of` halves both sizes of its blocks, while these are even, until the mask function has at
# most MOST_PAIRS values for one: queries times keys, times B if it reads b, and N if it reads n.
MOST_PAIRS = 2**22


def attended_positions(
    mask: Mask,
    bias: Float[jax.Array, "b n t s"] | None,
    B: int,
    N: int,
    T: int,
    S: int,
    mod: Mod | None = None,
) -> tuple[Bool[jax.Array, "#B T"] | None, Bool[jax.Array, "#B S"] | None]:
    """True for queries (first result) and keys (second) with an allowed pair in some head.

    None instead of an array: mask, bias (-inf excludes a pair) and mask function `mod` leave none
    of them without one.
    """
    rows, keys = attended_per_head(mask, bias, B, N, T, S, mod, some_head=True)
    return None if rows is None else rows.any(1), None if keys is None else keys.any(1)


def attended_per_head(
    mask: Mask,
    bias: Float[jax.Array, "b n t s"] | None,
    B: int,
    N: int,
    T: int,
    S: int,
    mod: Mod | None = None,
    *,
    some_head: bool = False,
) -> tuple[Bool[jax.Array, "#B #N T"] | None, Bool[jax.Array, "#B #N S"] | None]:
    """True for queries (first result) and keys (second) with an allowed pair, by query head.

    None instead of an array: mask, bias (-inf excludes a pair) and mask function `mod` leave none
    of them without one. Sizes may be 0 or symbolic. `some_head`: the caller joins the results over
    heads by `any`, so that they may be joined already (size 1).
    """
    if all(isinstance(size, int) and size for size in (B, N, T, S)):
        return attended(from_mask(mask, T, S, mod), bias, B, N, T, S, some_head=some_head)
    found = allowed_pairs(mask, bias, T, S, mod, (B, N))
    return (None, None) if found is None else (found.any(3), found.any(2))


def attended(
    conditions: Conditions,
    bias: Float[jax.Array, "b n t s"] | None,
    B: int,
    N: int,
    T: int,
    S: int,
    *,
    some_head: bool = False,
) -> tuple[Bool[jax.Array, "#B #N T"] | None, Bool[jax.Array, "#B #N S"] | None]:
    """True for queries (first result) and keys (second) with an allowed pair, by query head.

    None instead of an array: conditions and bias (-inf excludes a pair) leave none of them without
    one. Sizes are positive integers, and `conditions.below` is None. `some_head`: the caller joins
    the results over heads by `any`, so that they may be joined already (size 1).
    """
    if bias is None and conditions == NO_CONDITIONS:
        return None, None
    platform = platforms.current().name
    if conditions.mod is not None:
        tiling = choose_tiling(B, N, 1, T, S, skips=True, platform=platform)
        found = blocks_of(conditions, bias, tiling)
        return jnp.asarray(found.rows), jnp.asarray(found.keys)
    if bias is None and conditions.segments is None and conditions.array is None:
        rows, keys = _attended_by_intervals(conditions, T, S)
        return _unless_all(rows), _unless_all(keys)
    tiling = choose_tiling(B, N, 1, T, S, platform=platform)
    return _attended_by_tiles(conditions, bias, tiling, some_head and platform == "cpu")


def _attended_by_intervals(
    conditions: Conditions, T: int, S: int
) -> tuple[Bool[Array, "b1 1 T"], Bool[Array, "b2 1 S"]]:
    """Attended rows and keys under at most a window, causal offsets, and valid rows and keys.

    The bounds allow each row an interval of keys, and each key an interval of rows. Counts of the
    valid positions within these intervals suffice, so that no pairs are visited. If static bounds
    are the only conditions, the results are NumPy arrays.
    """
    below, above = conditions.window
    i, j = (np.arange(size, dtype=np.int32).reshape(1, size) for size in (T, S))
    start: Array = np.zeros_like(i) if below is None else i - below
    stop: Array = np.full_like(i, S) if above is None else i + above + 1
    first: Array = np.zeros_like(j) if above is None else j - above
    last: Array = np.full_like(j, T) if below is None else j + below + 1
    if isinstance(conditions.above, int):
        stop = np.minimum(stop, i + conditions.above + 1)
        first = np.maximum(first, j - conditions.above)
    elif conditions.above is not None:
        start, stop, first, last = (jnp.asarray(x) for x in (start, stop, first, last))
        offset = jnp.asarray(conditions.above, np.int32).reshape(-1, 1)
        stop = jnp.minimum(stop, jnp.asarray(i + 1) + offset)
        first = jnp.maximum(first, jnp.asarray(j) - offset)
    rows = _any_between(conditions.keys, start, stop, S)
    keys = _any_between(conditions.rows, first, last, T)
    rows = rows if conditions.rows is None else rows & conditions.rows
    keys = keys if conditions.keys is None else keys & conditions.keys
    return rows[:, None], keys[:, None]


def _unless_all(mask: Bool[Array, "*b"]) -> Bool[jax.Array, "*b"] | None:
    """None if the mask is static (a NumPy array) and True everywhere, else the mask in JAX."""
    return None if isinstance(mask, np.ndarray) and mask.all() else jnp.asarray(mask)


def _any_between(
    valid: Bool[jax.Array, "#b size"] | None,
    start: Int32[Array, "#b n"],
    stop: Int32[Array, "#b n"],
    size: int,
) -> Bool[Array, "#b n"]:
    """True where `[start, stop)` holds a valid one of the positions 0 to `size - 1`.

    `valid`: True for valid positions; None: all are.
    """
    start, stop = start.clip(0, size), stop.clip(0, size)
    if valid is None:
        return stop > start
    start, stop = jnp.asarray(start), jnp.asarray(stop)
    counts = jnp.pad(jnp.cumsum(valid.astype(start.dtype), 1), ((0, 0), (1, 0)))
    b = max(counts.shape[0], start.shape[0], stop.shape[0])
    counts, start, stop = (jnp.broadcast_to(x, (b, x.shape[1])) for x in (counts, start, stop))
    return jnp.take_along_axis(counts, stop, 1) > jnp.take_along_axis(counts, start, 1)


def _attended_by_tiles(
    conditions: Conditions,
    bias: Float[jax.Array, "b n t s"] | None,
    tiling: Tiling,
    some_head: bool,
) -> tuple[Bool[jax.Array, "#B #N T"], Bool[jax.Array, "#B #N S"]]:
    """Attended rows and keys of any conditions and bias; there is at least one condition or a bias.

    The mask is computed for `tiling.rows` rows and all keys at a time; `tiling` has one KV tile.
    `some_head`: joins it over heads by `any` first, so that the results have size 1 there.
    """
    conditions, bias = pad(conditions, bias, tiling)
    B, N, rows = tiling.B, tiling.K * tiling.G, tiling.rows

    def tile(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        position = TilePosition(0, B, 0, N, i * rows, rows, 0, tiling.S, tiling.T, tiling.S)
        found = allowed(conditions, position)
        if bias is not None:
            finite = slice_tile(bias, position) != -jnp.inf
            found = finite if found is None else found & finite
        assert found is not None
        if some_head and found.shape[1] > 1:
            # The barrier keeps XLA from reducing over heads twice, for rows and for keys.
            found = jax.lax.optimization_barrier(found.any(1, keepdims=True))  # type: ignore[no-untyped-call]
        found = jnp.broadcast_to(found, (*found.shape[:2], rows, tiling.S))
        inside = i * rows + jnp.arange(rows, dtype=np.int32) < tiling.T
        return found.any(3), (found & inside.reshape(1, 1, rows, 1)).any(2)

    by_row, by_key = jax.lax.map(tile, jnp.arange(tiling.query_tiles, dtype=np.int32))
    by_row = jnp.moveaxis(by_row, 0, 2)
    by_row = by_row.reshape(*by_row.shape[:2], tiling.query_tiles * rows)
    return by_row[:, :, : tiling.T], by_key.any(0)


Attended: TypeAlias = tuple[Bool[jax.Array, "#B #N T"] | None, Bool[jax.Array, "#B #N S"] | None]


def with_blocks(
    conditions: Conditions, bias: Float[jax.Array, "b n t s"] | None, tiling: Tiling
) -> tuple[Attended, Conditions]:
    """Returns attended queries and keys, as `attended` does, and `conditions`.

    A mask function in these gets `blocks`: those of the pairs that all conditions and the bias
    allow, from which `make_schedule` takes the tiles to visit.
    """
    if conditions.mod is None:
        N = tiling.K * tiling.G
        return attended(conditions, bias, tiling.B, N, tiling.T, tiling.S), conditions
    blocks = blocks_of(conditions, bias, tiling)
    conditions = conditions._replace(mod=conditions.mod._replace(blocks=blocks))
    return (jnp.asarray(blocks.rows), jnp.asarray(blocks.keys)), conditions


def blocks_of(
    conditions: Conditions, bias: Float[jax.Array, "b n t s"] | None, tiling: Tiling
) -> Blocks:
    """The blocks of pairs that all conditions and the bias allow; `conditions.mod` is not None.

    If the mask function is the only condition and has `blocks`, of any size, these are returned.
    Otherwise blocks have `tiling.rows` x `tiling.keys` pairs, halved until MOST_PAIRS suffice, and
    the mask of one block is computed at a time, for all batch rows and heads.
    """
    mod = conditions.mod
    assert mod is not None
    alone = bias is None and conditions._replace(mod=None) == NO_CONDITIONS
    if mod.blocks is not None and alone:
        return mod.blocks
    B, N, T, S = tiling.B, tiling.K * tiling.G, tiling.T, tiling.S
    rows, keys = tiling.rows, tiling.keys
    heads = (B if "b" in mod.program.uses else 1) * (N if "n" in mod.program.uses else 1)
    while heads * rows * keys > MOST_PAIRS and rows % 2 == 0 and keys % 2 == 0:
        rows, keys = rows // 2, keys // 2
    counts = -(-T // rows), -(-S // keys)
    cover = Tiling(B, tiling.K, tiling.G, counts[0] * rows, counts[1] * keys, B, 1, rows, keys)
    conditions, bias = pad(conditions, bias, Tiling(B, tiling.K, tiling.G, T, S, B, 1, rows, keys))

    def block(i: Index, j: Index) -> tuple[jax.Array, ...]:
        position = TilePosition(0, B, 0, N, i * rows, rows, j * keys, keys, T, S)
        found = allowed(conditions, position)
        assert found is not None
        if bias is not None:
            found = found & (slice_tile(bias, position) != -jnp.inf)
        found = jnp.broadcast_to(found, (*found.shape[:2], rows, keys))
        # Padded positions count as masked in `found`, but as allowed in `full`, so that a block at
        # the edge may be full.
        outside = (i * rows + jnp.arange(rows, dtype=np.int32) >= T).reshape(1, 1, rows, 1)
        beyond = (j * keys + jnp.arange(keys, dtype=np.int32) >= S).reshape(1, 1, 1, keys)
        full = found | outside | beyond
        found = found & ~(outside | beyond)
        by_key = found.any(2)
        return found.any(3), by_key, by_key.any((1, 2)), full.all((1, 2, 3))

    def strip(i: Index) -> tuple[jax.Array, ...]:
        columns = jnp.arange(counts[1], dtype=np.int32)
        by_row, *rest = jax.lax.map(lambda j: block(i, j), columns)
        return by_row.any(0), *rest

    # The barrier keeps XLA from evaluating a constant mask at compile time, which takes seconds.
    strips = jax.lax.optimization_barrier(jnp.arange(counts[0], dtype=np.int32))  # type: ignore[no-untyped-call]
    by_row, by_key, some, every = jax.lax.map(strip, strips)
    by_row, by_key = jnp.moveaxis(by_row, 0, 2), jnp.moveaxis(by_key.any(0), 0, 2)
    return Blocks(
        Grid(T, S, rows, keys),
        jnp.moveaxis(some, 2, 0),
        jnp.moveaxis(every, 2, 0),
        by_row.reshape(*by_row.shape[:2], cover.T)[:, :, :T],
        by_key.reshape(*by_key.shape[:2], cover.S)[:, :, :S],
    )


def flags_per_tile(blocks: Blocks, tiling: Tiling) -> tuple[jax.Array, jax.Array]:
    """`Blocks.some` and `Blocks.every` for the tiles of `tiling`: `b query_tiles kv_tiles`.

    Where a block overlaps several tiles, a fully masked tile may have `some`, and a tile whose
    pairs are all allowed may lack `every`.
    """
    some, every = jnp.asarray(blocks.some), jnp.asarray(blocks.every)
    grid = blocks.grid
    if (grid.rows, grid.keys) == (tiling.rows, tiling.keys):
        return some, every
    ranges = []
    for tiles, tile, size, block in (
        (tiling.query_tiles, tiling.rows, tiling.T, grid.rows),
        (tiling.kv_tiles, tiling.keys, tiling.S, grid.keys),
    ):
        first = np.arange(tiles) * tile
        last = np.minimum(first + tile, size) - 1
        ranges.append((first // block, last // block + 1))
    (i0, i1), (j0, j1) = ranges

    def inside(x: jax.Array) -> jax.Array:
        sums = jnp.cumsum(jnp.cumsum(x.astype(np.int32), 1), 2)
        sums = jnp.pad(sums, ((0, 0), (1, 0), (1, 0)))
        rows = sums[:, i1] - sums[:, i0]
        return rows[:, :, j1] - rows[:, :, j0]

    area = ((i1 - i0)[:, None] * (j1 - j0))[None]
    return inside(some) > 0, inside(every) == area


def zero_unattended(
    attended: Attended,
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    value: Float[jax.Array, "B K S h"],
) -> tuple[Float[jax.Array, "B N T H"], Float[jax.Array, "B K S H"], Float[jax.Array, "B K S h"]]:
    """Zeroes queries, keys and values without any allowed pair: NaN in them, times a weight of 0,
    would reach outputs and gradients.

    `attended`: with positions in their true order, unlike heads in zig-zag order.
    """
    rows, keys = (sharding.in_order(x, 2) for x in attended)
    if rows is not None:
        query = jnp.where(rows[..., None], query, 0.0)
    if keys is not None:
        keys = _per_key_head(keys, key.shape[1])
        key, value = (jnp.where(keys[..., None], x, 0.0) for x in (key, value))
    return query, key, value


def _per_key_head(keys: Bool[jax.Array, "b n S"], K: int) -> Bool[jax.Array, "b k S"]:
    """True for keys that any query head of a group attends; n = 1 stays: all heads are alike."""
    b, n, S = keys.shape
    return keys if n == 1 else keys.reshape(b, K, n // K, S).any(2)
