"""Splits arrays into tiles, loops over the tiles, and joins them again.

Axes in brackets, such as `[steps]`, are dropped where their size is 1: XLA would copy between
layouts that differ in such an axis.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Num, Shaped

from jaxmha.implementations.tiled.tiling import Tiling

Index: TypeAlias = jax.Array | int
# In, Out, Carry and Others are pytrees of arrays.
In = TypeVar("In")
Out = TypeVar("Out")
Carry = TypeVar("Carry")
Others = TypeVar("Others")


def to_kv_tiles(tiling: Tiling, x: Num[jax.Array, "B K S d"]) -> Num[jax.Array, "*tiles keys d"]:
    """KV tiles `[steps] [kv_tiles] [tile_heads] keys d`; S is zero-padded to whole tiles."""
    x = _padded(x, tiling.kv_tiles * tiling.keys - tiling.S, 0.0)
    d = x.shape[-1]
    x = _swap(x.reshape(tiling.steps, tiling.tile_heads, tiling.kv_tiles, tiling.keys * d))
    lead = _without_ones(tiling.steps, tiling.kv_tiles, tiling.tile_heads)
    return x.reshape(*lead, tiling.keys, d)


def from_kv_tiles(tiling: Tiling, x: Num[jax.Array, "*tiles keys d"]) -> Num[jax.Array, "B K S d"]:
    """Joins KV tiles from `to_kv_tiles` and removes the padding of S."""
    d = x.shape[-1]
    x = _swap(x.reshape(tiling.steps, tiling.kv_tiles, tiling.tile_heads, tiling.keys * d))
    return x.reshape(tiling.B, tiling.K, tiling.kv_tiles * tiling.keys, d)[:, :, : tiling.S]


def to_query_tiles(
    tiling: Tiling, x: Num[jax.Array, "B N T d"], fill: float = 0.0
) -> Num[jax.Array, "*tiles rows d"]:
    """Query tiles `[steps] [query_tiles] [tile_heads] G*rows d`; T is padded with `fill`."""
    x = _padded(x, tiling.query_tiles * tiling.rows - tiling.T, fill)
    d = x.shape[-1]
    heads = tiling.tile_heads * tiling.G
    x = _swap(x.reshape(tiling.steps, heads, tiling.query_tiles, tiling.rows * d))
    lead = _without_ones(tiling.steps, tiling.query_tiles, tiling.tile_heads)
    return x.reshape(*lead, tiling.G * tiling.rows, d)


def from_query_tiles(
    tiling: Tiling, x: Num[jax.Array, "*tiles rows d"]
) -> Num[jax.Array, "B N T d"]:
    """Joins query tiles from `to_query_tiles` and removes the padding of T."""
    d = x.shape[-1]
    heads = tiling.tile_heads * tiling.G
    x = _swap(x.reshape(tiling.steps, tiling.query_tiles, heads, tiling.rows * d))
    x = x.reshape(tiling.B, tiling.K * tiling.G, tiling.query_tiles * tiling.rows, d)
    return x[:, :, : tiling.T]


def kv_tile(tiling: Tiling, x: jax.Array, j: Index) -> jax.Array:
    """KV tile `j` of an array `[kv_tiles] ...`."""
    return x if tiling.kv_tiles == 1 else x[j]


def add_to_kv_tile(tiling: Tiling, x: jax.Array, j: Index, more: jax.Array) -> jax.Array:
    """`x` with `more` added to KV tile `j`."""
    return x + more if tiling.kv_tiles == 1 else x.at[j].add(more)


def drop_single_head(
    tiling: Tiling, x: Shaped[jax.Array, "heads r s"] | None
) -> Shaped[jax.Array, "*heads r s"] | None:
    """Drops the axis of heads of a mask if tiles have one head: query tiles then lack it too."""
    return x[0] if x is not None and tiling.tile_heads == 1 else x


def map_tiles(f: Callable[[Index, In], Out], count: int, xs: In, *, unroll: bool = False) -> Out:
    """Stacks the results `f(i, xs[i])` to `[count] ...` for arrays `[count] ...`, which lack this
    axis if `count` is 1; `unroll` unrolls the loop."""
    if count == 1:
        return f(0, xs)

    def step(_: None, x: tuple[jax.Array, In]) -> tuple[None, Out]:
        return None, f(*x)

    indices = jnp.arange(count, dtype=np.int32)
    _, stacked = jax.lax.scan(step, None, (indices, xs), unroll=count if unroll else 1)
    return stacked


def update_tiles(
    f: Callable[[Index, In, Carry, Others], tuple[In, Carry]],
    count: int,
    x: In,
    carry: Carry,
    others: Others,
) -> tuple[In, Carry]:
    """`x[i], carry = f(i, x[i], carry, others[i])` for arrays `[count] ...`, which lack this axis
    if `count` is 1. The loop overwrites `x` in place."""
    if count == 1:
        return f(0, x, carry, others)

    def step(i: Index, state: tuple[In, Carry]) -> tuple[In, Carry]:
        x, carry = state
        tile: In = jax.tree.map(lambda array: array[i], x)
        other: Others = jax.tree.map(lambda array: array[i], others)
        tile, carry = f(i, tile, carry, other)
        return jax.tree.map(lambda array, part: array.at[i].set(part), x, tile), carry

    updated: tuple[In, Carry] = jax.lax.fori_loop(np.int32(0), np.int32(count), step, (x, carry))
    return updated


def _without_ones(*counts: int) -> tuple[int, ...]:
    return tuple(count for count in counts if count > 1)


def _padded(x: Num[jax.Array, "B N T d"], missing: int, fill: float) -> Num[jax.Array, "B N T2 d"]:
    if not missing:
        return x
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)), constant_values=fill)


def _swap(x: Num[jax.Array, "a b c d"]) -> Num[jax.Array, "a c b d"]:
    """Swaps axes 1 and 2; where one has size 1 a reshape suffices, which never copies."""
    a, b = x.shape[1:3]
    return x.reshape(x.shape[0], b, a, *x.shape[3:]) if 1 in (a, b) else jnp.swapaxes(x, 1, 2)
