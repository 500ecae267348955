"""Tile schedule: which KV tiles each query tile visits, and which of them need no masking."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations.tiled.block_mask import Pairs
from jaxmha.implementations.tiled.tiling import Plan


class Reach(NamedTuple):
    """The schedule of every batch group `g` (or 1) and query tile.

    Attributes:
      order: `g blocks chunks`; unmasked KV tiles first (every pair allowed), then partially masked
        ones, then fully masked ones, which are dropped where the schedule is static.
      clear: `g blocks`, number of unmasked tiles.
      needed: `g blocks`, number of unmasked and partially masked tiles.
    """

    order: Any
    clear: Any
    needed: Any


def table(conditions: Pairs, plan: Plan) -> Reach | None:
    """The schedule of conditions padded by `block_mask.pad`; NumPy where they are static.

    None: every tile is unmasked.
    """
    some, every = _some_and_every(conditions, plan)
    if isinstance(every, np.ndarray) and every.all():
        return None
    every = some & every
    if every.shape[0] > 1:  # batch rows of one tile share a schedule
        some, every = (
            x.reshape(-1, plan.batches if len(x) > 1 else 1, *x.shape[1:]) for x in (some, every)
        )
        some, every = some.any(1), every.all(1)
    kind = 2 - some.astype(np.int32) - every.astype(np.int32)
    if isinstance(kind, np.ndarray):
        most = max((kind < 2).sum(-1).max(), 1)
        order: Any = np.argsort(kind, axis=-1, kind="stable")[..., :most]
    else:
        # The barrier keeps XLA from sorting a constant at compile time, which takes seconds.
        unknown: Any = jax.lax.optimization_barrier
        kind = unknown(kind)
        order = jnp.argsort(kind, axis=-1, stable=True)
    counts = ((kind < most).sum(-1).astype(np.int32) for most in (1, 2))
    return Reach(order.astype(np.int32), *counts)


def _some_and_every(conditions: Pairs, plan: Plan) -> tuple[Any, Any]:
    """Conservative flags per tile, `b blocks chunks`: some pair is allowed (may over-report), and
    every pair is allowed (may under-report)."""
    blocks, chunks = plan.blocks, plan.chunks
    i = np.arange(blocks).reshape(1, blocks, 1) * plan.rows
    j = np.arange(chunks).reshape(1, 1, chunks) * plan.keys
    last_i, last_j = np.minimum(i + plan.rows, plan.T) - 1, np.minimum(j + plan.keys, plan.S) - 1
    some: Any = np.ones((1, blocks, chunks), bool)
    every: Any = np.ones((1, blocks, chunks), bool)
    below, right = conditions.window
    if below is not None:
        some, every = some & (last_j >= i - below), every & (j >= last_i - below)
    for above in (right, conditions.above):
        if above is not None:
            offset: Any = above
            if not isinstance(above, int):
                offset = jnp.asarray(above, jnp.int32).reshape(-1, 1, 1)
            low, high = ((y - x).astype(np.int32) for x, y in ((last_i, j), (i, last_j)))
            some, every = some & (low <= offset), every & (high <= offset)
    if conditions.below is not None:
        offset = conditions.below.reshape(-1, 1, 1)
        some = some & ((i - last_j).astype(np.int32) <= offset)
        every = every & ((last_i - j).astype(np.int32) <= offset)
    if conditions.keys is not None:
        keys = conditions.keys.reshape(-1, 1, chunks, plan.keys)
        some, every = some & keys.any(-1), every & keys.all(-1)
    if conditions.rows is not None:
        some = some & conditions.rows.reshape(-1, blocks, 1, plan.rows).any(-1)
    if conditions.segments is not None:
        q = conditions.segments[0].reshape(-1, blocks, 1, plan.rows)
        k = conditions.segments[1].reshape(-1, 1, chunks, plan.keys)
        some = some & (q.min(-1) <= k.max(-1)) & (k.min(-1) <= q.max(-1))
        every = every & (q.min(-1) == k.max(-1)) & (k.min(-1) == q.max(-1))
    if conditions.array is not None:
        array = conditions.array
        b, n, t, s = array.shape
        row_blocks, rows = (blocks, plan.rows) if t > 1 else (1, 1)
        key_blocks, columns = (chunks, plan.keys) if s > 1 else (1, 1)

        # One query tile at a time: XLA reduces slowly over two axes that are not adjacent, and
        # would recompute the mask for each shape that it is reshaped to.
        def of_keys(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            part = jax.lax.dynamic_slice_in_dim(array, i * rows, rows, 2)
            return part.any(2), part.all(2)

        found = jax.lax.map(of_keys, jnp.arange(row_blocks, dtype=np.int32))
        shape = b, n, row_blocks, key_blocks, columns
        any_, all_ = (jnp.moveaxis(x, 0, 2).reshape(shape) for x in found)
        any_, all_ = any_.any(-1), all_.all(-1)
        some, every = some & any_.any(1), every & all_.all(1)
    return some, every


def visit_all(
    reached: Reach | None,
    plan: Plan,
    step: jax.Array | int,
    i: jax.Array | int,
    visit: Callable[[Any, bool, Any], Any],
    carry: Any,
) -> Any:
    """`carry = visit(j, clear, carry)` for every KV tile `j` that query tile `i` needs.

    `clear`: the tile needs no masking.
    """
    if plan.chunks == 1:
        return visit(0, reached is None, carry)
    if reached is None:
        first, last = np.int32(0), np.int32(plan.chunks)
        return jax.lax.fori_loop(first, last, lambda j, carry: visit(j, True, carry), carry)
    g = step // plan.groups if len(reached.order) > 1 else 0
    order, clear, needed = (jnp.asarray(x)[g, i] for x in reached)
    # Loops known to be empty are left out: XLA would compile them all the same.
    static = isinstance(reached.clear, np.ndarray)
    if not static or reached.clear.any():
        carry = jax.lax.fori_loop(0, clear, lambda k, carry: visit(order[k], True, carry), carry)
    if not static or (reached.needed > reached.clear).any():
        carry = jax.lax.fori_loop(
            clear, needed, lambda k, carry: visit(order[k], False, carry), carry
        )
    return carry
