"""Mask tiles from structured conditions, which are expanded for one tile at a time.

A tile compares its positions with bounds, and segment ids with each other; slices masks of rows,
of keys and of pairs; and evaluates mask functions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Int32, Integer, Shaped

from jaxmha.arrays import Array
from jaxmha.implementations import mods
from jaxmha.implementations.mods import Extent, Mod
from jaxmha.implementations.tiled.layout import Index
from jaxmha.implementations.tiled.tiling import Tiling
from jaxmha.integers import near
from jaxmha.mask import Mask


class Conditions(NamedTuple):
    """The mask conditions of a request: query i may attend key j if all of them hold.

    None: no such condition. Batch axes `b` are B or 1.

    Attributes:
      above: causal offsets, traced or a static Python int: `j <= i + above`.
      window: static left and right bounds: `i - left <= j <= i + right`; None: no such bound.
      rows: True for valid queries.
      keys: True for valid keys.
      segments: ids of queries and of keys, which must be equal.
      array: dense mask, True for allowed pairs; each axis is full or 1.
      below: traced left bounds: `j >= i - below`.
      mod: mask function.
    """

    above: Int32[jax.Array, "b"] | int | None
    window: tuple[int | None, int | None]
    rows: Bool[jax.Array, "b T"] | None
    keys: Bool[jax.Array, "b S"] | None
    segments: tuple[Integer[jax.Array, "b T"], Integer[jax.Array, "b S"]] | None
    array: Bool[jax.Array, "b n t s"] | None
    below: Int32[jax.Array, "b"] | None = None
    mod: Mod | None = None


NO_CONDITIONS = Conditions(None, (None, None), None, None, None, None)


def from_mask(mask: Mask, T: int, S: int, mod: Mod | None = None) -> Conditions:
    """Converts a `Mask`, and a mask function `mod`, to conditions for T queries and S keys; lengths
    and padding become valid rows and keys."""
    segments = None
    if mask.query_segments is not None and mask.key_value_segments is not None:
        segments = jnp.asarray(mask.query_segments), jnp.asarray(mask.key_value_segments)
    rows = _valid(mask.query_lengths, mask.query_padding, T)
    keys = _valid(mask.key_value_lengths, mask.key_value_padding, S)
    above = None if mask.causal_offset is None else near(mask.causal_offset)
    if above is not None and not isinstance(above, int):
        above = jnp.asarray(above).reshape(-1)
    array = None if mask.array is None else jnp.asarray(mask.array)
    if array is not None:
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    window = mask.window_size or (None, None)
    return Conditions(above, window, rows, keys, segments, array, mod=mod)


def _valid(
    lengths: Integer[Array, "b"] | None, padding: Bool[Array, "#b size"] | None, size: int
) -> Bool[jax.Array, "#b size"] | None:
    """True for positions below their length where `padding`, if given, is True (valid).

    Without lengths, returns `padding`, which may be None.
    """
    valid = None if padding is None else jnp.asarray(padding)
    if lengths is None:
        return valid
    positions = jnp.arange(size, dtype=np.int32).reshape(1, size)
    within = positions < jnp.asarray(lengths).reshape(-1, 1)
    return within if valid is None else valid & within


class TilePosition(NamedTuple):
    """The position of a tile within arrays of T queries and S keys.

    Attributes:
      b, n, t, s: first batch row, query head, query and key; static or traced.
      batches, heads, rows, keys: numbers of these; `heads` are query heads.
      T, S: sizes of the arrays without padding.
      G: query heads per key/value head.
      aligned: numbers that divide t and s where these are traced: a mask function that is constant
        within blocks of such a size is then evaluated once per block.
    """

    b: Index
    batches: int
    n: Index
    heads: int
    t: Index
    rows: int
    s: Index
    keys: int
    T: int
    S: int
    G: int = 1
    aligned: tuple[int, int] = (1, 1)

    @property
    def starts(self) -> tuple[Index, Index, Index, Index]:
        """First indices of the tile along B, N, T and S."""
        return self.b, self.n, self.t, self.s

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the tile along B, N, T and S."""
        return self.batches, self.heads, self.rows, self.keys

    @property
    def extent(self) -> Extent:
        """The same position as an `Extent`, over which score and mask functions are evaluated."""
        return Extent(self.starts, self.sizes, self.T, self.S, self.G, self.aligned)


def slice_tile(
    array: Shaped[jax.Array, "b n t s"], position: TilePosition
) -> Shaped[jax.Array, "_ _ _ _"]:
    """Slices a tile out of an array padded to whole tiles, whose axes of size 1 stay 1."""
    shape = array.shape
    first = [0 if n == 1 else start for n, start in zip(shape, position.starts, strict=True)]
    size = [1 if n == 1 else m for n, m in zip(shape, position.sizes, strict=True)]
    return jax.lax.dynamic_slice(array, [jnp.asarray(x, jnp.int32) for x in first], size)


def allowed(conditions: Conditions, position: TilePosition) -> Bool[jax.Array, "_ _ _ _"] | None:
    """Mask tile: True for pairs that all conditions allow, broadcastable to `position.sizes`.

    Returns None without conditions. Their arrays are padded to whole tiles by `pad`, which also
    makes padded keys invalid.
    """
    i, j = _indices(position)
    below, above = conditions.window
    found: list[jax.Array] = []
    if below is not None:
        found.append(j >= i - below)
    if above is not None:
        found.append(j <= i + above)
    if conditions.above is not None:
        offset = jnp.asarray(conditions.above, i.dtype).reshape(-1, 1, 1, 1)
        found.append(j <= i + slice_tile(offset, position))
    if conditions.below is not None:
        found.append(j >= i - slice_tile(conditions.below.reshape(-1, 1, 1, 1), position))
    if conditions.rows is not None:
        found.append(slice_tile(conditions.rows[:, None, :, None], position))
    if conditions.keys is not None:
        found.append(slice_tile(conditions.keys[:, None, None, :], position))
    if conditions.segments is not None:
        query_ids, key_ids = conditions.segments
        found.append(
            slice_tile(query_ids[:, None, :, None], position)
            == slice_tile(key_ids[:, None, None, :], position)
        )
    if conditions.array is not None:
        found.append(slice_tile(conditions.array, position))
    if conditions.mod is not None:
        found.append(mods.allowed(conditions.mod, position.extent))
    together = None
    for condition in found:
        together = condition if together is None else together & condition
    return together


def _indices(
    position: TilePosition,
) -> tuple[Int[jax.Array, "1 1 rows 1"], Int[jax.Array, "1 1 1 keys"]]:
    """Positions i of the queries and j of the keys of a tile."""
    i, j = (
        jnp.asarray(start, np.int32) + jnp.arange(size, dtype=np.int32)
        for start, size in ((position.t, position.rows), (position.s, position.keys))
    )
    return i.reshape(1, 1, position.rows, 1), j.reshape(1, 1, 1, position.keys)


def mask_or_bias(
    conditions: Conditions,
    bias: Float[jax.Array, "b n t s"] | None,
    position: TilePosition,
    G: int,
    dtype: np.dtype[np.floating],
) -> Bool[jax.Array, "heads rows keys"] | Float[jax.Array, "heads rows keys"] | None:
    """Boolean mask tile or, with a bias, the bias tile in `dtype` with -inf in masked pairs.

    Returns None without conditions and bias. Conditions and bias are padded by `pad`. `heads` are
    the key/value heads of all batch rows of the tile, and `rows` those of the G query heads in
    their groups; either may have size 1, to broadcast.
    """
    tile = mask = allowed(conditions, position)
    if bias is not None:
        tile = slice_tile(bias, position).astype(dtype)
        if mask is not None:
            tile = jnp.where(mask, tile, -jnp.inf)
    if tile is None:
        return None
    b, n, rows, keys = tile.shape
    if keys != position.keys:
        keys = position.keys
        tile = jnp.broadcast_to(tile, (b, n, rows, keys))
    if b == n == 1 and (rows == 1 or G == 1):
        return tile.reshape(1, rows, keys)
    if n == 1 and rows == 1:
        heads = position.heads // G
        return jnp.broadcast_to(tile, (b, heads, 1, keys)).reshape(b * heads, 1, keys)
    full = jnp.broadcast_to(tile, position.sizes)
    return full.reshape(position.batches * position.heads // G, G * position.rows, keys)


def pad(
    conditions: Conditions, bias: Float[jax.Array, "b n t s"] | None, tiling: Tiling
) -> tuple[Conditions, Float[jax.Array, "b n t2 s2"] | None]:
    """Pads T and S of conditions and bias with zeros to whole tiles; axes of size 1 stay 1.

    Padded keys become invalid by `Conditions.keys`, which is added if S needs padding.
    """
    missing_T = tiling.query_tiles * tiling.rows - tiling.T
    missing_S = tiling.kv_tiles * tiling.keys - tiling.S

    def fill(x: jax.Array | None, **axes: int) -> jax.Array | None:
        if x is None:
            return None
        missing = {"T": missing_T, "S": missing_S}
        counts = {axis: missing[name] for name, axis in axes.items() if x.shape[axis] != 1}
        if not any(counts.values()):
            return x
        return jnp.pad(x, [(0, counts.get(axis, 0)) for axis in range(x.ndim)])

    keys, segments = conditions.keys, conditions.segments
    if missing_S:
        keys = fill(jnp.ones((1, tiling.S), bool) if keys is None else keys, S=1)
    if segments is not None:
        query_ids, key_ids = fill(segments[0], T=1), fill(segments[1], S=1)
        assert query_ids is not None
        assert key_ids is not None
        segments = query_ids, key_ids
    filled = conditions._replace(
        rows=fill(conditions.rows, T=1),
        keys=keys,
        segments=segments,
        array=fill(conditions.array, T=2, S=3),
    )
    return filled, fill(bias, T=2, S=3)


def without_padded_rows(conditions: Conditions, tiling: Tiling) -> Conditions:
    """Makes the rows that `pad` added invalid: gradients of keys and values are sums over all rows,
    and 0, the padded query, times an infinite key is NaN."""
    padded = tiling.query_tiles * tiling.rows
    if padded == tiling.T or conditions.rows is not None:  # which `pad` fills with False
        return conditions
    return conditions._replace(rows=(jnp.arange(padded, dtype=np.int32) < tiling.T)[None])
