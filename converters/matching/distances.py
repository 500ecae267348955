"""Measures how far two outputs are apart."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import mul
from typing import NamedTuple

import numpy as np

from jaxmha.converters.layout.arrays import NDArray

FILL = 1e3  # the least size of a fill
FAR = 100  # a fill is at least this many times the other values
# The axis that moves, and where to: none, length before batch, heads after length, and channels to
# the end or from there, with a batch or without.
PLACES = ((0, 0), (0, 1), (1, 2), (1, -1), (-1, 1), (0, -1), (-1, 0))


class Order(NamedTuple):
    """An order of the axes of an output of the source, and the difference in it.

    Attributes:
      axes: the axes of a size other than 1, where they are not in order; else ().
      difference: the largest difference of two values, relative to the largest value.
    """

    axes: tuple[int, ...]
    difference: float


def distances(mine: NDArray, theirs: NDArray) -> list[Order]:
    """Returns the differences in all orders of axes that the sizes allow; none if there are none.

    The first counts for outputs. The others are no evidence: if axes of equal sizes are exchanged, a
    wrong model may agree. Equal infinities do not differ; NaN differs from everything. Fills of masks
    are compared apart: next to -1e9, all other numbers would agree.
    """
    if mine.size != theirs.size or not mine.size:
        return []
    axes = [axis for axis, size in enumerate(mine.shape) if size != 1]
    dtype = np.complex128 if np.iscomplexobj(mine) or np.iscomplexobj(theirs) else np.float64
    one, other = (np.squeeze(x).astype(dtype) for x in (mine, theirs))
    found = []
    for order in _orders(one.shape, other.shape):
        moved = tuple(axes[n] for n in order)
        apart = _relative(one.transpose(order), other.reshape([one.shape[n] for n in order]))
        found.append(Order(() if moved == tuple(axes) else moved, apart))
    return found


def is_mask(array: NDArray) -> bool:
    """True if all numbers have at most two sizes: 0, 1, infinite, or large and whole."""
    sizes = np.unique(np.abs(array.astype(np.complex128)))
    known = (sizes == 0) | (sizes == 1) | np.isinf(sizes)
    return bool(sizes.size <= 2 and (known | (sizes >= FILL) & (sizes == sizes.round())).all())


def _orders(shape: tuple[int, ...], wanted: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the orders of axes that turn `shape` into `wanted`; one of the two may join axes.

    Moves of one axis (`PLACES`) come first; if none fits, all permutations; if none of these fits,
    only the unchanged order.
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


def _relative(one: NDArray, other: NDArray) -> float:
    with np.errstate(over="ignore"):
        apart = np.abs(np.subtract(one, other, out=np.zeros_like(one), where=one != other))
    sizes = np.where(np.isfinite(one), np.abs(one), 0)
    fills = _fills(sizes)
    # Next to fills, at least 1: numbers near zero are no scale.
    largest = sizes.max(where=~fills, initial=float(fills.any())) or 1.0
    found = float((apart / np.where(fills, sizes.max(), largest)).max())
    return found if np.isfinite(found) else float("inf")


def _fills(sizes: NDArray) -> NDArray:
    """Marks values that a mask sets, such as -1e9, or -1e4 plus a score: all near one large number.

    Where two masks are added, they are near twice the number.
    """
    largest = sizes.max()
    fills: NDArray = sizes > largest / 3
    others = sizes.max(where=~fills, initial=0)
    if largest < FILL or others > sizes[fills].min() / FAR:
        return np.zeros_like(fills)
    masks = largest / sizes[fills]
    return fills if np.abs(masks - masks.round()).max() < 0.05 else np.zeros_like(fills)
