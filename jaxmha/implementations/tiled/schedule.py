"""Tile schedule: which KV tiles each query tile visits, and which of them need no masking."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int32

from jaxmha.arrays import Array
from jaxmha.implementations.reverse_mode import once
from jaxmha.implementations.tiled import attended
from jaxmha.implementations.tiled.block_mask import NO_CONDITIONS, Conditions
from jaxmha.implementations.tiled.layout import Carry, Index
from jaxmha.implementations.tiled.tiling import Tiling


class Schedule(NamedTuple):
    """The KV tiles to visit, by batch group `g` and query tile `i`.

    A batch group is the batch rows of one tile; g has size 1 if no condition has a batch axis above
    1. In doubt, a tile counts as partially masked. Invalid rows (`Conditions.rows`) leave a tile
    unmasked, unless all its rows are invalid: their outputs are zeroed elsewhere.

    Attributes:
      order: indices of KV tiles: unmasked ones, then partially masked ones, then fully masked
        ones; NumPy arrays end at the largest `needed`.
      unmasked: number of unmasked tiles.
      needed: number of unmasked and partially masked tiles.
    """

    order: Int32[Array, "g i j"]
    unmasked: Int32[Array, "g i"]
    needed: Int32[Array, "g i"]


def make_schedule(conditions: Conditions, tiling: Tiling) -> Schedule | None:
    """The schedule of conditions padded by `block_mask.pad`; NumPy arrays if these are static.

    Returns None if every tile is known to be unmasked from conditions that are static (or `rows`).
    """
    some, every = _some_and_every(conditions, tiling)
    if isinstance(every, np.ndarray) and every.all():
        return None
    every = some & every
    if every.shape[0] > 1:  # batch rows of one tile share a schedule
        some, every = (
            x.reshape(-1, tiling.batches if len(x) > 1 else 1, *x.shape[1:]) for x in (some, every)
        )
        some, every = some.any(1), every.all(1)  # type: ignore[assignment]  # no scalars
    # The kind of each tile: 0: unmasked, 1: partially masked, 2: fully masked.
    kind = 2 - some.astype(np.int32) - every.astype(np.int32)
    order: Array
    if isinstance(kind, np.ndarray):
        most = max((kind < 2).sum(-1).max(), 1)
        order = np.argsort(kind, axis=-1, kind="stable")[..., :most]
    else:
        # The barrier keeps XLA from sorting a constant at compile time, which takes seconds.
        kind = jax.lax.optimization_barrier(kind)  # type: ignore[no-untyped-call]
        order = jnp.argsort(kind, axis=-1, stable=True)
    unmasked, needed = ((kind < most).sum(-1).astype(np.int32) for most in (1, 2))
    return Schedule(order.astype(np.int32), unmasked, needed)


def _some_and_every(
    conditions: Conditions, tiling: Tiling
) -> tuple[Bool[Array, "#b i j"], Bool[Array, "#b i j"]]:
    """Flags per tile: some pair is allowed (True for some fully masked tiles too), and every pair
    of valid rows is allowed (False for some unmasked tiles too)."""
    rows, columns = tiling.query_tiles, tiling.kv_tiles
    i = np.arange(rows).reshape(1, rows, 1) * tiling.rows
    j = np.arange(columns).reshape(1, 1, columns) * tiling.keys
    last_i = np.minimum(i + tiling.rows, tiling.T) - 1
    last_j = np.minimum(j + tiling.keys, tiling.S) - 1
    some: Array = np.ones((1, rows, columns), bool)
    every: Array = np.ones((1, rows, columns), bool)
    below, right = conditions.window
    if below is not None:
        some, every = some & (last_j >= i - below), every & (j >= last_i - below)
    for above in (right, conditions.above):
        if above is not None:
            offset: Array | int = above
            if not isinstance(above, int):
                offset = jnp.asarray(above, jnp.int32).reshape(-1, 1, 1)
            low, high = ((y - x).astype(np.int32) for x, y in ((last_i, j), (i, last_j)))
            some, every = some & (low <= offset), every & (high <= offset)
    if conditions.below is not None:
        offset = conditions.below.reshape(-1, 1, 1)
        some = some & ((i - last_j).astype(np.int32) <= offset)
        every = every & ((last_i - j).astype(np.int32) <= offset)
    if conditions.keys is not None:
        keys = conditions.keys.reshape(-1, 1, columns, tiling.keys)
        some, every = some & keys.any(-1), every & keys.all(-1)
    if conditions.rows is not None:
        some = some & conditions.rows.reshape(-1, rows, 1, tiling.rows).any(-1)
    if conditions.segments is not None:
        q = conditions.segments[0].reshape(-1, rows, 1, tiling.rows)
        k = conditions.segments[1].reshape(-1, 1, columns, tiling.keys)
        some = some & (q.min(-1) <= k.max(-1)) & (k.min(-1) <= q.max(-1))
        every = every & (q.min(-1) == k.max(-1)) & (k.min(-1) == q.max(-1))
    if conditions.array is not None:
        any_, all_ = _any_and_all(conditions.array, tiling)
        some, every = some & any_, every & all_
    if conditions.mod is not None:
        blocks = conditions.mod.blocks
        if blocks is None:
            alone = NO_CONDITIONS._replace(mod=conditions.mod)
            blocks = attended.blocks_of(alone, None, tiling)
        any_, all_ = attended.flags_per_tile(blocks, tiling)
        some, every = some & any_, every & all_
    return some, every


def _any_and_all(
    array: Bool[jax.Array, "b n t s"], tiling: Tiling
) -> tuple[Bool[jax.Array, "b #i #j"], Bool[jax.Array, "b #i #j"]]:
    """Flags per tile of a padded dense mask: some pair is allowed in some head, and all pairs,
    padded ones too, are allowed in all heads."""
    b, n, t, s = array.shape
    tiles_i, rows = (tiling.query_tiles, tiling.rows) if t > 1 else (1, 1)
    tiles_j, keys = (tiling.kv_tiles, tiling.keys) if s > 1 else (1, 1)

    # One query tile at a time: XLA reduces slowly over two axes that are not adjacent, and would
    # recompute the mask for each shape that it is reshaped to.
    def per_key(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = jax.lax.dynamic_slice_in_dim(array, i * rows, rows, 2)
        return part.any(2), part.all(2)

    found = jax.lax.map(per_key, jnp.arange(tiles_i, dtype=np.int32))
    shape = b, n, tiles_i, tiles_j, keys
    any_, all_ = (jnp.moveaxis(x, 0, 2).reshape(shape) for x in found)
    any_, all_ = any_.any(-1), all_.all(-1)
    return any_.any(1), all_.all(1)


def visit_all(
    schedule: Schedule | None,
    tiling: Tiling,
    step: Index,
    i: Index,
    visit: Callable[[Index, bool, Carry], Carry],
    carry: Carry,
) -> Carry:
    """`carry = visit(j, unmasked, carry)` for every KV tile `j` that query tile `i` needs, and for
    a single KV tile in any case.

    `step`: index of a set of heads (`Tiling.steps`). `unmasked`: every pair of valid rows is
    allowed. `schedule` None: this holds for all tiles.
    """
    if tiling.kv_tiles == 1:
        return visit(0, schedule is None, carry)
    found: Carry
    if schedule is None:
        first, last = np.int32(0), np.int32(tiling.kv_tiles)
        found = jax.lax.fori_loop(first, last, lambda j, carry: visit(j, True, carry), carry)
        return found
    g = step // tiling.groups if len(schedule.order) > 1 else 0
    order, unmasked, needed = (jnp.asarray(x)[g, i] for x in schedule)
    # Loops known to be empty are omitted: XLA would compile their bodies.
    static = isinstance(schedule.unmasked, np.ndarray)
    if not static or schedule.unmasked.any():
        carry = jax.lax.fori_loop(0, unmasked, lambda k, carry: visit(order[k], True, carry), carry)
    if not static or (schedule.needed > schedule.unmasked).any():
        carry = jax.lax.fori_loop(
            unmasked, needed, lambda k, carry: visit(order[k], False, carry), carry
        )
    # With traced bounds these loops are `while`, which reverse mode does not differentiate.
    return jax.tree.map(once, carry)  # type: ignore[no-any-return]
