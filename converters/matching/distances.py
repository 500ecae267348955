"""Measures how far two outputs are apart."""

from collections.abc import Iterator

import numpy as np

from jaxmha.converters.layout.arrays import NDArray

FILL = 1e3  # the least size of a fill
FAR = 100  # how many times the other values a fill is, at least


def distance(mine: NDArray, theirs: NDArray) -> float | None:
    """Returns the largest difference, relative to the largest value; None if the sizes differ.

    It is the minimum over the orders of `_orders`. Equal infinities do not differ; NaN differs from
    everything. Fills of masks are compared apart: next to -1e9, all other numbers would agree.
    """
    if mine.size != theirs.size or not mine.size:
        return None
    one, other = (np.squeeze(x).astype(np.float64) for x in (mine, theirs))
    nearest = min(
        _relative(order, other.reshape(order.shape))
        for n, order in enumerate(_orders(one))
        if n == 0 or order.shape == other.shape or order.ndim != other.ndim
    )
    return nearest if np.isfinite(nearest) else float("inf")


def _orders(x: NDArray) -> Iterator[NDArray]:
    """Yields an array without axes of size 1 in the orders that the same values may have elsewhere.

    Unchanged, channels moved to the end or from there (with a batch, or without), length before
    batch, and heads after length.
    """
    yield x
    for axis in range(min(x.ndim - 1, 2)):
        yield np.moveaxis(x, axis, -1)
        yield np.moveaxis(x, -1, axis)
        yield np.swapaxes(x, axis, axis + 1)


def _relative(one: NDArray, other: NDArray) -> float:
    with np.errstate(over="ignore"):
        apart = np.abs(np.subtract(one, other, out=np.zeros_like(one), where=one != other))
    sizes = np.where(np.isfinite(one), np.abs(one), 0)
    fills = _fills(sizes)
    # Next to fills, at least 1: numbers near zero are no scale.
    largest = sizes.max(where=~fills, initial=float(fills.any())) or 1.0
    return float((apart / np.where(fills, sizes.max(), largest)).max())


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
