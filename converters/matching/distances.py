"""Measures how far two outputs are apart."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import mul
from typing import NamedTuple

import numpy as np

from jaxmha.converters.layout.arrays import NDArray

# No value is within _GAP powers of two below the fills: they are at least 8 times the other values.
_GAP = 3
# The values at one index of an axis, such as a feature, are compared relative to at most _SLACK times
# the largest of them, if they are _ROWS or more. Their rounding errors are those of the terms that they
# sum, and in few values larger terms may have cancelled.
_SLACK, _ROWS = 100, 8
# The least scale, relative to the largest of all values: where all terms cancel, their rounding errors
# are left, and are no difference.
_FLOOR, _NARROW_FLOOR = 1e-7, 0.1  # of float64, and of narrower dtypes
# The least scale next to fills: scores and logarithms may all be near zero there, where larger terms
# cancel, and rounding errors are relative to those.
_BY_FILLS, _NARROW_BY_FILLS = 1e-4, 1.0
# An axis, and the index to which it moves: none, length before batch, heads after length, and
# channels to the end or from there, first with a batch axis, then without.
PLACES = ((0, 0), (0, 1), (1, 2), (1, -1), (-1, 1), (0, -1), (-1, 0))


class Order(NamedTuple):
    """An order of the axes of an output of the source, and the difference in it.

    Attributes:
      axes: the axes of the source in this order, without those of size 1; () if it is unchanged.
      difference: the largest difference of two values, relative to their scale (`distances`).
    """

    axes: tuple[int, ...]
    difference: float


def distances(mine: NDArray, theirs: NDArray, *, equal_nan: bool = False) -> list[Order]:
    """Returns the difference in each order of axes of `mine` that gives the sizes of `theirs`.

    If none does, the order stays as it is; [] if the arrays are empty or differ in number of elements.
    Outputs are judged by the first order alone: the others exchange axes of equal sizes, and in one
    of them a wrong model may agree. Equal infinities do not differ. NaN differs from everything, but with
    `equal_nan` not from NaN.

    The scale is the largest value of the source, with two exceptions, because small values next to it
    would always agree. Fills of masks, such as -1e9, are compared relative to themselves, and are no scale
    for others, whose scale is then at least 1e-4 (1 in narrower dtypes than float64). A feature of small
    values, or another index of an axis, has a scale of its own.
    """
    if mine.size != theirs.size or not mine.size:
        return []
    axes = [axis for axis, size in enumerate(mine.shape) if size != 1]
    dtype = np.complex128 if np.iscomplexobj(mine) or np.iscomplexobj(theirs) else np.float64
    one, other = (np.squeeze(x).astype(dtype) for x in (mine, theirs))
    wide = all(x.real.dtype == np.float64 for x in (mine, theirs))
    floors = (_FLOOR, _BY_FILLS) if wide else (_NARROW_FLOOR, _NARROW_BY_FILLS)
    found = []
    for order in _orders(one.shape, other.shape):
        moved = tuple(axes[n] for n in order)
        turned = other.reshape([one.shape[n] for n in order])
        apart = _relative(one.transpose(order), turned, floors, equal_nan)
        found.append(Order(() if moved == tuple(axes) else moved, apart))
    return found


def are_whole(array: NDArray) -> NDArray:
    """Marks numbers that are whole or infinite, as in masks, their fills, and indices."""
    found: NDArray = (array.real == np.trunc(array.real)) & (array.imag == np.trunc(array.imag))
    return found


def _orders(shape: tuple[int, ...], wanted: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the orders of axes that turn `shape` into `wanted`; one of the two may join axes.

    Only moves of one axis (`PLACES`) are tried; if none fits, all permutations; if none of these
    fits either, the unchanged order is returned.
    """

    def fitting(orders: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [order for order in orders if _fits([shape[n] for n in order], wanted)]

    same = tuple(range(len(shape)))
    others = itertools.permutations(same) if sorted(shape) == sorted(wanted) else ()
    return fitting(dict.fromkeys(_moved(len(shape)))) or fitting(others) or [same]


def _moved(n: int) -> Iterator[tuple[int, ...]]:
    for start, end in PLACES:
        if max(start, end) < n:
            order = list(range(n))
            order.insert(end % n, order.pop(start))
            yield tuple(order)


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    if len(shape) == len(wanted):
        return tuple(shape) == tuple(wanted)
    ends, others = set(itertools.accumulate(shape, mul)), set(itertools.accumulate(wanted, mul))
    return ends <= others or others <= ends


def _relative(one: NDArray, other: NDArray, floors: tuple[float, float], equal_nan: bool) -> float:
    differ = one != other
    if equal_nan:
        differ &= ~(np.isnan(one) & np.isnan(other))
    with np.errstate(over="ignore"):
        apart = np.abs(np.subtract(one, other, out=np.zeros_like(one), where=differ))
    sizes = np.where(np.isfinite(one), np.abs(one), 0)
    found = float((apart / _scale(sizes, *floors)).max())
    return found if np.isfinite(found) else float("inf")


def _scale(sizes: NDArray, floor: float, by_fills: float) -> NDArray:
    """Returns, for each value of these sizes, the size relative to which it is compared."""
    fills = _fills(sizes)
    largest = sizes.max(where=~fills, initial=by_fills * fills.any()) or 1.0
    scale = np.full_like(sizes, largest)
    for axis, length in enumerate(sizes.shape):
        if sizes.size >= _ROWS * length:
            others = tuple(n for n in range(sizes.ndim) if n != axis)
            own = sizes.max(others, where=~fills, initial=0, keepdims=True)
            np.minimum(scale, _SLACK * own, out=scale)
    # Next to fills, terms of size 1 may cancel, as in log(exp(x) / sum).
    np.maximum(scale, floor * max(largest, float(fills.any())), out=scale)
    return np.where(fills, sizes, scale)


def _fills(sizes: NDArray) -> NDArray:
    """Marks values that masks set, or add to scores: few constants, far above 1 and all other values.

    Large values that are apart by more than twice the others, and by more than 5%, are not fills.
    """
    fills = np.zeros_like(sizes, bool)
    powers = np.maximum(np.frexp(sizes)[1], 0)
    present = np.flatnonzero(np.bincount(powers.reshape(-1)))
    for low, high in zip(present[-2::-1], present[:0:-1], strict=True):
        if high - low <= _GAP:
            continue
        above = powers >= high
        large = np.sort(sizes[above])
        near = 2 * sizes.max(where=~above, initial=1)
        constants = 1 + np.count_nonzero(np.diff(large) > near)
        if 2 * constants > large.size and large[0] < 0.95 * large[-1]:
            break
        fills = above
    return fills
