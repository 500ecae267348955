"""Splits arrays into tiles, loops over the tiles, and joins them again.

An axis with a single tile is dropped: XLA would copy between layouts that differ in such an axis.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations.tiled.tiling import Plan


def chunks(plan: Plan, x: jax.Array) -> jax.Array:
    """`B K S d` as KV tiles `[steps] [chunks] [cells] keys d`; S is zero-padded to whole tiles."""
    x = _filled(x, plan.chunks * plan.keys - plan.S, 0.0)
    d = x.shape[-1]
    x = _swapped(x.reshape(plan.steps, plan.cells, plan.chunks, plan.keys * d))
    return x.reshape(*_counts(plan.steps, plan.chunks, plan.cells), plan.keys, d)


def unchunked(plan: Plan, x: jax.Array) -> jax.Array:
    """The inverse of `chunks`."""
    d = x.shape[-1]
    x = _swapped(x.reshape(plan.steps, plan.chunks, plan.cells, plan.keys * d))
    return x.reshape(plan.B, plan.K, plan.chunks * plan.keys, d)[:, :, : plan.S]


def tiles(plan: Plan, x: jax.Array, fill: float = 0.0) -> jax.Array:
    """`B N T d` as query tiles `[steps] [blocks] [cells] G*rows d`; T is padded with `fill`."""
    x = _filled(x, plan.blocks * plan.rows - plan.T, fill)
    d = x.shape[-1]
    x = _swapped(x.reshape(plan.steps, plan.cells * plan.G, plan.blocks, plan.rows * d))
    return x.reshape(*_counts(plan.steps, plan.blocks, plan.cells), plan.G * plan.rows, d)


def rows(plan: Plan, x: jax.Array) -> jax.Array:
    """The inverse of `tiles`."""
    d = x.shape[-1]
    x = _swapped(x.reshape(plan.steps, plan.blocks, plan.cells * plan.G, plan.rows * d))
    x = x.reshape(plan.B, plan.K * plan.G, plan.blocks * plan.rows, d)
    return x[:, :, : plan.T]


def part(plan: Plan, x: jax.Array, j: jax.Array | int) -> jax.Array:
    """KV tile `j` of `[chunks] ...`."""
    return x if plan.chunks == 1 else x[j]


def add(plan: Plan, x: jax.Array, j: jax.Array | int, more: jax.Array) -> jax.Array:
    """`x` with `more` added to KV tile `j`."""
    return x + more if plan.chunks == 1 else x.at[j].add(more)


def cells(plan: Plan, x: jax.Array | None) -> jax.Array | None:
    """Drops the leading axis of cells where the plan has a single cell, as the tiles do."""
    return x[0] if x is not None and plan.cells == 1 else x


def each(f: Callable[[Any, Any], Any], count: int, xs: Any, *, unroll: bool = False) -> Any:
    """`f(i, tile)` for every tile of `[count] ...`, stacked; `unroll` unrolls the loop."""
    if count == 1:
        return f(0, xs)
    _, found = jax.lax.scan(
        lambda _, x: (None, f(*x)),
        None,
        (jnp.arange(count, dtype=np.int32), xs),
        unroll=count if unroll else 1,
    )
    return found


def refine(f: Callable[..., Any], count: int, x: Any, carry: Any, others: Any) -> tuple[Any, Any]:
    """`x[i], carry = f(i, x[i], carry, others[i])` for every tile of `[count] ...`, in place."""
    if count == 1:
        found: tuple[Any, Any] = f(0, x, carry, others)
        return found

    def step(i: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        x, carry = state
        mine, its = (jax.tree.map(lambda array: array[i], tree) for tree in (x, others))
        mine, carry = f(i, mine, carry, its)
        return jax.tree.map(lambda array, part: array.at[i].set(part), x, mine), carry

    refined: tuple[Any, Any] = jax.lax.fori_loop(np.int32(0), np.int32(count), step, (x, carry))
    return refined


def _counts(*counts: int) -> tuple[int, ...]:
    return tuple(count for count in counts if count > 1)


def _filled(x: jax.Array, missing: int, fill: float) -> jax.Array:
    if not missing:
        return x
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)), constant_values=fill)


def _swapped(x: jax.Array) -> jax.Array:
    """Swaps axes 1 and 2; where one has size 1 a reshape suffices, which never copies."""
    a, b = x.shape[1:3]
    return x.reshape(x.shape[0], b, a, *x.shape[3:]) if 1 in (a, b) else jnp.swapaxes(x, 1, 2)
