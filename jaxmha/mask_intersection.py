"""Intersects two conditions that both masks of `mask & other` have in the same field."""

from typing import Any

import numpy as np

from jaxmha.arrays import Array, shapes_too
from jaxmha.integers import library


@shapes_too
def smaller(a: int | Array, b: int | Array) -> int | Array:
    """The smaller of two bounds, in each batch row."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    xp = library(a, b)
    found: Array = xp.minimum(xp.asarray(a, np.int32), xp.asarray(b, np.int32))
    return found


def narrower(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """The intersection of two windows (left, right); a side of None has no bound."""
    left, right = (
        y if x is None else x if y is None else min(x, y) for x, y in zip(a, b, strict=True)
    )
    return left, right


@shapes_too
def both(a: Array, b: Array) -> Array:
    """True where both Boolean arrays are True; the one with fewer axes gets axes of 1 on the left."""
    rank, xp = max(a.ndim, b.ndim), library(a, b)
    a, b = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (a, b))
    found: Array = xp.logical_and(a, b)
    return found


# By field of `Mask`: the function that intersects two conditions of that field.
INTERSECTION: dict[str, Any] = {
    "causal_offset": smaller,
    "window_size": narrower,
    "query_lengths": smaller,
    "key_value_lengths": smaller,
    "query_padding": both,
    "key_value_padding": both,
    "array": both,
}
