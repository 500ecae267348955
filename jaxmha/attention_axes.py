"""Attention over any axes of features: moves them to one axis of positions, and back.

Source: argument `attention_axes` of `keras.layers.MultiHeadAttention`.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmha.arrays import Array
from jaxmha.mask import Mask


class Axes(NamedTuple):
    """Attended axes of the features `*X D` of a call: `over` counts from 0.

    `batch`, `queries` and `keys` are the sizes of the other axes, in their order, and of the
    attended axes of queries and of keys, in the order of `over`.
    """

    over: tuple[int, ...]
    batch: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def flat(self, x: Array) -> jax.Array:
        """Features as `*B T D`."""
        rank = x.ndim
        others = tuple(axis for axis in range(rank - 1) if axis not in self.over)
        moved = jnp.transpose(jnp.asarray(x), (*others, *self.over, rank - 1))
        T = math.prod(x.shape[axis] for axis in self.over)
        return moved.reshape(*self.batch, T, x.shape[-1])

    def flat_inputs(
        self, query: Array, key: Array, value: Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The three inputs as `*B T D`; inputs that are one array stay one."""
        rows = self.flat(query)
        keys = rows if key is query else self.flat(key)
        return rows, keys, keys if value is key else self.flat(value)

    def restored(self, out: jax.Array) -> jax.Array:
        """Features `*B T D` with all axes at their places."""
        rank = len(self.batch) + len(self.over) + 1
        others = [axis for axis in range(rank - 1) if axis not in self.over]
        split = out.reshape(*self.batch, *self.queries, out.shape[-1])
        order = [*others, *self.over, rank - 1]
        return jnp.transpose(split, sorted(range(rank), key=order.__getitem__))

    def pairs(self, name: str, array: Array) -> Array:
        """A mask or bias over attended axes `*B N *T *S` as `*B N T S`, by broadcasting."""
        n = len(self.over)
        given = array.shape
        if n == 1 or array.ndim == 0:
            return array
        core = (1,) * max(2 * n - len(given), 0) + given[-2 * n :]
        wanted = self.queries + self.keys
        if any(size not in (1, want) for size, want in zip(core, wanted, strict=True)):
            raise ValueError(
                f"{name}: expected axes (*B, N, *T, *S) with *T={self.queries}, *S={self.keys} (each "
                f"may be 1; axes on the left may be missing), got shape {given}"
            )
        lead = given[: max(len(given) - 2 * n, 0)]
        sides = [
            (1,) * n if all(size == 1 for size in side) else full
            for side, full in ((core[:n], self.queries), (core[n:], self.keys))
        ]
        whole = jnp.broadcast_to(jnp.reshape(array, (*lead, *core)), (*lead, *sides[0], *sides[1]))
        return whole.reshape(*lead, math.prod(sides[0]), math.prod(sides[1]))

    def mask(self, mask: Mask) -> Mask:
        """A mask whose array is over attended axes."""
        if mask.array is None:
            return mask
        return replace(mask, array=self.pairs("mask", mask.array))

    def split(self, weights: jax.Array) -> jax.Array:
        """Weights `*B N T S` as `*B N *T *S`; keys with extra positions remain one axis."""
        S = weights.shape[-1]
        keys = self.keys if math.prod(self.keys) == S else (S,)
        return weights.reshape(*weights.shape[:-2], *self.queries, *keys)


def axes_of(axes: tuple[int, ...], query: Array, key: Array, value: Array) -> Axes:
    """Checks the attended axes against the features of a call.

    Raises:
      ValueError: an axis is missing or the last, or other axes of the features differ.
    """
    rank = query.ndim
    over = tuple(axis + rank if axis < 0 else axis for axis in axes)
    if not all(0 <= axis < rank - 1 for axis in over) or len(set(over)) < len(over):
        raise ValueError(
            f"semantics.attention_axes={axes}: expected different axes before the last, of features, "
            f"got a query of shape {query.shape}"
        )
    batch = tuple(query.shape[axis] for axis in range(rank - 1) if axis not in over)
    for name, x in (("key", key), ("value", value)):
        own = tuple(x.shape[axis] for axis in range(x.ndim - 1) if axis not in over)
        attended = [x.shape[axis] for axis in over] if x.ndim == rank else []
        expected = [key.shape[axis] for axis in over] if key.ndim == rank else None
        if x.ndim != rank or own != batch or attended != expected:
            raise ValueError(
                f"{name}: expected {rank} axes, those outside attention_axes={over} as in the query "
                f"of shape {query.shape} and value as key, got shape {x.shape}"
            )
    queries, keys = (tuple(x.shape[axis] for axis in over) for x in (query, key))
    return Axes(over, batch, queries, keys)
