"""Bitwise differences between the weights of two blocks, leaf by leaf."""

from dataclasses import dataclass

import numpy as np

from jaxmha import MHAParams
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.verify import diagnosis
from jaxmha.params import leaves

SAME_VALUES = "the same values"
ROUNDED = "the second is the first, rounded"


@dataclass(frozen=True)
class Difference:
    """A leaf that differs; `index` is the first differing element, None if shape or dtype differs.

    `index` is also None if only one block has the leaf. `harmless`: True for a bias whose elements
    are zeros (of any sign) in each block that has it.
    """

    leaf: str
    what: str
    index: tuple[int, ...] | None = None
    a: float | None = None
    b: float | None = None
    count: int = 0
    size: int = 0
    harmless: bool = False

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.leaf}: {self.what}"
        place = ", ".join(map(str, self.index))
        return (
            f"{self.leaf}[{place}]: {self.a!r} and {self.b!r}, the first of {self.count} of "
            f"{self.size} elements that differ"
        )


def differences_of(a: MHAParams, b: MHAParams) -> list[Difference]:
    """Returns a `Difference` for every leaf that is not bit-identical."""
    found = []
    ours, theirs = (
        {name: to_numpy(leaf) for name, leaf in leaves(params).items()} for params in (a, b)
    )
    for leaf in {**ours, **theirs}:
        if leaf not in ours or leaf not in theirs:
            where = "second" if leaf not in ours else "first"
            what = f"only in the {where}"
            if harmless := diagnosis.harmless(leaf, ours.get(leaf), theirs.get(leaf)):
                what += ", and zero: it changes nothing"
            found.append(Difference(leaf, what, harmless=harmless))
            continue
        x, y = ours[leaf], theirs[leaf]
        if x.shape != y.shape or x.dtype != y.dtype:
            what = f"{x.dtype} {x.shape} and {y.dtype} {y.shape}"
            if x.shape == y.shape and (relation := rounding(x, y)):
                what += f"; {relation}"
            found.append(Difference(leaf, what))
            continue
        bits = f"u{x.dtype.itemsize}"
        where_differs = np.argwhere(
            np.ascontiguousarray(x).view(bits) != np.ascontiguousarray(y).view(bits)
        )
        if len(where_differs):
            index = tuple(int(i) for i in where_differs[0])
            values = float(x[index]), float(y[index])
            harmless = diagnosis.harmless(leaf, x, y)
            found.append(
                Difference(leaf, "differs", index, *values, len(where_differs), x.size, harmless)
            )
    return found


def stored_differently(a: MHAParams, b: MHAParams, output_differs: bool) -> tuple[str, ...]:
    """Returns descriptions of the leaves that are not bit-identical, except biases of zeros.

    If `output_differs`, only equal values of different dtypes are reported, because the factors of
    the attribution already name the values that change the output.
    """
    unequal = [one for one in differences_of(a, b) if not one.harmless]
    return tuple(
        str(one) for one in unequal if not output_differs or one.what.endswith(SAME_VALUES)
    )


def rounding(x: NDArray, y: NDArray) -> str:
    """Says which array equals the other rounded to its dtype; "" if neither does.

    >>> rounding(np.ones(2, np.float32), np.ones(2)), rounding(np.ones(2, np.float32), np.ones(2) / 3)
    ('the same values', '')
    """
    with np.errstate(over="ignore", invalid="ignore"):
        narrowed, widened = x.astype(y.dtype), y.astype(x.dtype)
        second, first = np.array_equal(narrowed, y), np.array_equal(widened, x)
    if first and second:
        return SAME_VALUES
    if second:
        return ROUNDED
    return "the first is the second, rounded" if first else ""
