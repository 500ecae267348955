"""Mask tiles from structured conditions, without any T x S array.

Lengths, offsets and segment ids are compared with the positions of a tile; dense arrays are sliced.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations import platforms
from jaxmha.implementations.base import allowed_pairs
from jaxmha.implementations.tiled import tiling
from jaxmha.implementations.tiled.tiling import Plan
from jaxmha.integers import near
from jaxmha.mask import Mask


class Pairs(NamedTuple):
    """The mask conditions of a request; a batch axis `b` may be 1. None: no condition.

    Attributes:
      above: `b`, traced causal offsets, or a static Python int: `j <= i + above`.
      window: static left and right bounds: `i - left <= j <= i + right`.
      rows: `b T`, valid query positions.
      keys: `b S`, valid key positions.
      segments: ids `b T` and `b S`.
      array: dense mask `b n t s`, each axis full or 1.
      below: `b`, traced left bounds: `j >= i - below`.
    """

    above: jax.Array | int | None
    window: tuple[int | None, int | None]
    rows: jax.Array | None
    keys: jax.Array | None
    segments: tuple[jax.Array, jax.Array] | None
    array: jax.Array | None
    below: jax.Array | None = None


NOTHING = Pairs(None, (None, None), None, None, None, None)


def of_mask(mask: Mask, T: int, S: int) -> Pairs:
    """Converts a `Mask` to conditions; lengths and padding become valid rows and keys."""
    there: list[jax.Array | None] = []
    for lengths, padding, size in (
        (mask.query_lengths, mask.query_padding, T),
        (mask.key_value_lengths, mask.key_value_padding, S),
    ):
        found = None if padding is None else jnp.asarray(padding)
        if lengths is not None:
            positions = jnp.arange(size, dtype=np.int32).reshape(1, size)
            within = positions < jnp.asarray(lengths).reshape(-1, 1)
            found = within if found is None else found & within
        there.append(found)
    segments = None
    if mask.query_segments is not None:
        segments = jnp.asarray(mask.query_segments), jnp.asarray(mask.key_value_segments)
    above = None if mask.causal_offset is None else near(mask.causal_offset)
    if above is not None and not isinstance(above, int):
        above = jnp.asarray(above).reshape(-1)
    array = None if mask.array is None else jnp.asarray(mask.array)
    if array is not None:
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return Pairs(above, mask.window_size or (None, None), there[0], there[1], segments, array)


def live_positions(
    mask: Mask, bias: jax.Array | None, B: int, N: int, T: int, S: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Queries `b T` and keys `b S` with an allowed pair in some head; None: all of them."""
    rows, keys = live_heads(mask, bias, B, N, T, S)
    return tuple(None if x is None else x.any(1) for x in (rows, keys))  # type: ignore[return-value]


def live_heads(
    mask: Mask, bias: jax.Array | None, B: int, N: int, T: int, S: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Queries `b n T` and keys `b n S` with an allowed pair; None: all of them.

    Sizes may be 0 or symbolic.
    """
    if all(isinstance(size, int) and size for size in (B, T, S)):
        return live(of_mask(mask, T, S), bias, B, N, T, S)
    found = allowed_pairs(mask, bias, T, S)
    return (None, None) if found is None else (found.any(3), found.any(2))


def live(
    pairs: Pairs, bias: jax.Array | None, B: int, N: int, T: int, S: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Queries `b n T` and keys `b n S` with an allowed pair, for positive sizes; None: all."""
    if bias is None and pairs == NOTHING:
        return None, None
    if bias is None and pairs.segments is None and pairs.array is None:
        rows, keys = _live_intervals(pairs, T, S)
        return _unless_all(rows), _unless_all(keys)
    plan = tiling.plan(B, N, 1, T, S, platform=platforms.current().name)
    return _live_blocks(pairs, bias, plan)


def _live_intervals(pairs: Pairs, T: int, S: int) -> tuple[Any, Any]:
    """Attended rows and keys without segment ids and dense arrays, by interval arithmetic.

    Each row attends the valid keys of an interval, and vice versa. Static conditions stay NumPy.
    """
    below, above = pairs.window
    i, j = (np.arange(size, dtype=np.int32).reshape(1, size) for size in (T, S))
    start: Any = np.zeros_like(i) if below is None else i - below
    stop: Any = np.full_like(i, S) if above is None else i + above + 1
    first: Any = np.zeros_like(j) if above is None else j - above
    last: Any = np.full_like(j, T) if below is None else j + below + 1
    if isinstance(pairs.above, int):
        stop = np.minimum(stop, i + pairs.above + 1)
        first = np.maximum(first, j - pairs.above)
    elif pairs.above is not None:
        start, stop, first, last = (jnp.asarray(x) for x in (start, stop, first, last))
        offset = jnp.asarray(pairs.above, np.int32).reshape(-1, 1)
        stop = jnp.minimum(stop, jnp.asarray(i + 1) + offset)
        first = jnp.maximum(first, jnp.asarray(j) - offset)
    rows = _any_between(pairs.keys, start, stop, S)
    keys = _any_between(pairs.rows, first, last, T)
    rows = rows if pairs.rows is None else rows & pairs.rows
    keys = keys if pairs.keys is None else keys & pairs.keys
    return rows[:, None], keys[:, None]


def _unless_all(there: Any) -> jax.Array | None:
    """None for a static array without any False entry."""
    return None if isinstance(there, np.ndarray) and there.all() else jnp.asarray(there)


def _any_between(there: jax.Array | None, start: Any, stop: Any, size: int) -> Any:
    """True if any position in `[start, stop)` is valid; `there`: the valid ones, None: all."""
    start, stop = start.clip(0, size), stop.clip(0, size)
    if there is None:
        return stop > start
    start, stop = jnp.asarray(start), jnp.asarray(stop)
    counts = jnp.pad(jnp.cumsum(there.astype(start.dtype), 1), ((0, 0), (1, 0)))
    b = max(counts.shape[0], start.shape[0], stop.shape[0])
    counts, start, stop = (jnp.broadcast_to(x, (b, x.shape[1])) for x in (counts, start, stop))
    return jnp.take_along_axis(counts, stop, 1) > jnp.take_along_axis(counts, start, 1)


def _live_blocks(pairs: Pairs, bias: jax.Array | None, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Attended rows and keys of any conditions; a tile has all heads, all keys and some rows."""
    pairs, bias = pad(pairs, bias, plan)
    B, N, rows = plan.B, plan.K * plan.G, plan.rows

    def block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        place = Place(0, B, 0, N, i * rows, rows, 0, plan.S)
        found = allowed(pairs, place)
        if bias is not None:
            finite = block_of(bias, place) != -jnp.inf
            found = finite if found is None else found & finite
        assert found is not None
        found = jnp.broadcast_to(found, (*found.shape[:2], rows, plan.S))
        inside = i * rows + jnp.arange(rows, dtype=np.int32) < plan.T
        return found.any(3), (found & inside.reshape(1, 1, rows, 1)).any(2)

    seeing, seen = jax.lax.map(block, jnp.arange(plan.blocks, dtype=np.int32))
    seeing = jnp.moveaxis(seeing, 0, 2)
    seeing = seeing.reshape(*seeing.shape[:2], plan.blocks * rows)
    return seeing[:, :, : plan.T], seen.any(0)


class Place(NamedTuple):
    """Position of a tile: starts (static or traced) and static sizes along B, N, T and S."""

    b: jax.Array | int
    batches: int
    n: jax.Array | int
    heads: int
    t: jax.Array | int
    rows: int
    s: jax.Array | int
    keys: int


def block_of(array: jax.Array, place: Place) -> jax.Array:
    """Slices the tile at `place` out of `b n t s`; axes of size 1 stay 1."""
    starts = (place.b, place.n, place.t, place.s)
    sizes = (place.batches, place.heads, place.rows, place.keys)
    first = [0 if n == 1 else start for n, start in zip(array.shape, starts, strict=True)]
    size = [1 if n == 1 else m for n, m in zip(array.shape, sizes, strict=True)]
    return jax.lax.dynamic_slice(array, [jnp.asarray(x, jnp.int32) for x in first], size)


def allowed(pairs: Pairs, place: Place, *, rows_too: bool = True) -> jax.Array | None:
    """Mask tile: the pairs that every condition allows, broadcastable to the tile; None: all.

    Args:
      pairs: the conditions, padded by `pad`.
      place: the tile.
      rows_too: also apply the condition on rows alone, which masks whole rows.
    """
    i, j = (
        jnp.asarray(start, np.int32) + jnp.arange(size, dtype=np.int32)
        for start, size in ((place.t, place.rows), (place.s, place.keys))
    )
    i, j = i.reshape(1, 1, place.rows, 1), j.reshape(1, 1, 1, place.keys)
    below, above = pairs.window
    found: list[jax.Array] = []
    if below is not None:
        found.append(j >= i - below)
    if above is not None:
        found.append(j <= i + above)
    if pairs.above is not None:
        offset = jnp.asarray(pairs.above, i.dtype).reshape(-1, 1, 1, 1)
        found.append(j <= i + block_of(offset, place))
    if pairs.below is not None:
        found.append(j >= i - block_of(pairs.below.reshape(-1, 1, 1, 1), place))
    if pairs.rows is not None and rows_too:
        found.append(block_of(pairs.rows[:, None, :, None], place))
    if pairs.keys is not None:
        found.append(block_of(pairs.keys[:, None, None, :], place))
    if pairs.segments is not None:
        query_ids, key_ids = pairs.segments
        found.append(
            block_of(query_ids[:, None, :, None], place)
            == block_of(key_ids[:, None, None, :], place)
        )
    if pairs.array is not None:
        found.append(block_of(pairs.array, place))
    together = None
    for condition in found:
        together = condition if together is None else together & condition
    return together


def mask_or_bias(
    pairs: Pairs, bias: jax.Array | None, place: Place, G: int, dtype: np.dtype[Any]
) -> jax.Array | None:
    """Boolean mask tile or, with a bias, the additive bias tile (-inf where masked); None: neither.

    Shape `cells rows keys`; the axes of cells and rows have size 1 where they broadcast. A cell has
    the rows of all G query heads of its group.
    """
    given = found = allowed(pairs, place, rows_too=bias is not None)
    if bias is not None:
        given = block_of(bias, place).astype(dtype)
        if found is not None:
            given = jnp.where(found, given, -jnp.inf)
    if given is None:
        return None
    b, n, rows, keys = given.shape
    if keys != place.keys:
        keys = place.keys
        given = jnp.broadcast_to(given, (b, n, rows, keys))
    if b == n == 1 and (rows == 1 or G == 1):
        return given.reshape(1, rows, keys)
    if n == 1 and rows == 1:
        each = place.heads // G
        return jnp.broadcast_to(given, (b, each, 1, keys)).reshape(b * each, 1, keys)
    full = jnp.broadcast_to(given, (place.batches, place.heads, place.rows, keys))
    return full.reshape(place.batches * place.heads // G, G * place.rows, keys)


def pad(pairs: Pairs, bias: jax.Array | None, plan: Plan) -> tuple[Pairs, jax.Array | None]:
    """Pads T and S of the conditions and the bias to whole tiles; padded keys are not valid."""
    missing = {"T": plan.blocks * plan.rows - plan.T, "S": plan.chunks * plan.keys - plan.S}

    def fill(x: Any, **axes: int) -> Any:
        counts = {a: missing[name] for name, a in axes.items() if x is not None and x.shape[a] != 1}
        if not any(counts.values()):
            return x
        return jnp.pad(x, [(0, counts.get(a, 0)) for a in range(x.ndim)])

    keys, segments = pairs.keys, pairs.segments
    if missing["S"]:
        keys = fill(jnp.ones((1, plan.S), bool) if keys is None else keys, S=1)
    if segments is not None:
        segments = fill(segments[0], T=1), fill(segments[1], S=1)
    filled = pairs._replace(
        rows=fill(pairs.rows, T=1), keys=keys, segments=segments, array=fill(pairs.array, T=2, S=3)
    )
    return filled, fill(bias, T=2, S=3)
