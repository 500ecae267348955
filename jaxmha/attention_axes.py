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
    """Attended axes and batch axes of the features of a call.

    `over`: indices of the attended axes. `batch`: sizes of the batch axes. `queries`, `keys`: sizes
    of the attended axes of queries and of keys, in the order of `over`.
    """

    over: tuple[int, ...]
    batch: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def flat(self, x: Array) -> jax.Array:
        """Transposes features to `*B T D`: the attended axes become one axis T."""
        rank = x.ndim
        others = tuple(axis for axis in range(rank - 1) if axis not in self.over)
        moved = jnp.transpose(jnp.asarray(x), (*others, *self.over, rank - 1))
        T = math.prod(x.shape[axis] for axis in self.over)
        return moved.reshape(*self.batch, T, x.shape[-1])

    def flat_inputs(
        self, query: Array, key: Array, value: Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns `flat` of the three inputs; for inputs that are the same array, one array."""
        rows = self.flat(query)
        keys = rows if key is query else self.flat(key)
        return rows, keys, keys if value is key else self.flat(value)

    def restored(self, out: jax.Array) -> jax.Array:
        """Undoes `flat` for an output `*B T D`."""
        rank = len(self.batch) + len(self.over) + 1
        others = [axis for axis in range(rank - 1) if axis not in self.over]
        split = out.reshape(*self.batch, *self.queries, out.shape[-1])
        order = [*others, *self.over, rank - 1]
        return jnp.transpose(split, sorted(range(rank), key=order.__getitem__))

    def pairs(self, name: str, array: Array) -> Array:
        """Reshapes a mask or bias `*B N *T *S` to `*B N T S`; ValueError if a size does not fit.

        `name`: its name in the message. Axes may be 1 or, from the left, missing.
        """
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
        """Returns the mask with its array reshaped by `pairs`."""
        if mask.array is None:
            return mask
        return replace(mask, array=self.pairs("mask", mask.array))

    def split(self, weights: jax.Array) -> jax.Array:
        """Reshapes weights `*B N T S` to `*B N *T *S`; if S has extra positions, it stays one axis."""
        S = weights.shape[-1]
        keys = self.keys if math.prod(self.keys) == S else (S,)
        return weights.reshape(*weights.shape[:-2], *self.queries, *keys)


def axes_of(axes: tuple[int, ...], query: Array, key: Array, value: Array) -> Axes:
    """Returns the axes of a call whose attended axes are `axes` (negative: from the end).

    Raises:
      ValueError: an attended axis is missing, repeated or the last, or the batch axes differ.
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
