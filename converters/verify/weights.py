"""Bitwise differences between the weights of two blocks, leaf by leaf."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from jaxmha import MHAParams
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.verify import diagnosis
from jaxmha.params import leaves


class Relation(StrEnum):
    """How two arrays of different dtypes are related."""

    SAME_VALUES = "the same values"
    ROUNDED = "the second is the first, rounded"
    ROUNDED_BACK = "the first is the second, rounded"


class How(NamedTuple):
    """How two arrays differ, in words, and their relation if one is known."""

    text: str
    relation: Relation | None = None


@dataclass(frozen=True)
class Difference:
    """A leaf that differs; `index` is the first differing element, None if shape or dtype differs.

    `index` is also None if only one block has the leaf. `harmless`: True for a bias whose elements
    are zeros (of any sign) in each block that has it. `relation`: how the leaves of two dtypes are
    related, if that is known.
    """

    leaf: str
    what: str
    index: tuple[int, ...] | None = None
    a: float | None = None
    b: float | None = None
    count: int = 0
    size: int = 0
    harmless: bool = False
    relation: Relation | None = None

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
            how = of_types(x, y)
            found.append(Difference(leaf, how.text, relation=how.relation))
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
        str(one) for one in unequal if not output_differs or one.relation == Relation.SAME_VALUES
    )


def of_types(x: NDArray, y: NDArray) -> How:
    """Describes two arrays whose dtypes or shapes differ.

    >>> of_types(np.ones(2, np.float32), np.ones(2)).text
    'float32 (2,) and float64 (2,); the same values'
    """
    text = f"{x.dtype} {x.shape} and {y.dtype} {y.shape}"
    relation = _relation(x, y) if x.shape == y.shape else None
    return How(f"{text}; {relation}" if relation else text, relation)


def _relation(x: NDArray, y: NDArray) -> Relation | None:
    with np.errstate(over="ignore", invalid="ignore"):
        narrowed, widened = x.astype(y.dtype), y.astype(x.dtype)
        second = np.array_equal(narrowed, y, equal_nan=True)
        first = np.array_equal(widened, x, equal_nan=True)
    if first and second:
        return Relation.SAME_VALUES
    if second:
        return Relation.ROUNDED
    return Relation.ROUNDED_BACK if first else None
