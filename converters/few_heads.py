"""Outputs of attention blocks in files, a few heads at a time: heads know nothing of each other."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxmha.converters import sides, verify
from jaxmha.converters.arrays import NDArray
from jaxmha.converters.sides import BlockSide
from jaxmha.converters.slices import Slices
from jaxmha.converters.stored import Stored, cast
from jaxmha.params import CANONICAL, from_leaves

MOST = 16 << 20  # bytes of parameters that run at once; one head always does
Errors = dict[str, tuple[float, float]]  # by mask


class Outputs(NamedTuple):
    """What running both sides showed.

    Attributes:
      differences: of behaviour and outputs, in words.
      errors: mask -> RMS error of either side against float64 in rounding floors of the output;
        the largest of all groups of heads.
      notes: what could not be run.
    """

    differences: list[str]
    errors: Errors
    notes: list[str]


def compare(a: Stored, b: Stored, name: str) -> Outputs:
    """Runs two blocks with the same leaves, every layer of stacked ones; their files are mapped."""
    found = Outputs([], {}, [])
    x, y = Views(a), Views(b)
    lead = x.leaves["query.kernel"].shape[:-3]
    for index in np.ndindex(lead):
        differences, errors, bad = _layer(x, y, index)
        layer = f"{name}{list(index) if lead else ''}"
        found.differences.extend(x for x in differences if x not in found.differences)
        if bad:
            what = f"{', '.join(bad)} holds NaN or infinity: no outputs were compared"
            found.notes.append(f"{layer or '(top)'}: {what}")
        else:
            more = f"{list(index)} " if lead else ""
            found.errors.update({f"{more}{mask}": pair for mask, pair in errors.items()})
    return found


class Views:
    """The leaves of a block, of which nothing is read until a part of them is."""

    def __init__(self, side: Stored) -> None:
        self.side, self._slices = side, Slices(side.file, list(side.tensors))
        self.leaves: dict[str, NDArray] = {}
        for name, unpack in side.tensors.items():
            self.leaves |= unpack(self._slices.views[name])

    def groups(self, index: tuple[int, ...]) -> Iterator[BlockSide]:
        """One layer, a few heads at a time."""
        views = {leaf: view[index] for leaf, view in self.leaves.items()}
        for box in _boxes(views):
            arrays = {leaf: self._read(leaf, view, box) for leaf, view in views.items()}
            yield sides.of_params("", "", from_leaves(dict(arrays)), self.side.semantics)

    def _read(self, leaf: str, view: NDArray, box: Mapping[str, slice]) -> NDArray:
        cut = view[tuple(box.get(letter, slice(None)) for letter in CANONICAL[leaf].split())]
        return cast(self._slices.read(cut), self.side.dtype)


def _layer(a: Views, b: Views, index: tuple[int, ...]) -> tuple[list[str], Errors, list[str]]:
    """Differences and errors of one layer, and its leaves that are not finite."""
    differences: dict[str, None] = {}
    bad: dict[str, None] = {}
    errors: Errors = {}
    for x, y in zip(a.groups(index), b.groups(index), strict=True):
        if held := verify.not_finite(x.params):
            bad |= dict.fromkeys(held)
            continue
        compared = verify.compare_blocks(x, y)
        if not compared.same:
            differences |= dict.fromkeys([*compared.behaviour, *filter(None, [compared.departs])])
        for mask, pair in compared.errors.items():
            before = errors.get(mask, (0.0, 0.0))
            errors[mask] = max(before[0], pair[0]), max(before[1], pair[1])
    return list(differences), errors, list(bad)


def _boxes(views: Mapping[str, NDArray]) -> Iterator[dict[str, slice]]:
    """Equal parts of the heads, N and K of them, of at most so many bytes."""
    N, K = views["query.kernel"].shape[-2], views["key.kernel"].shape[-2]
    size = sum(view.nbytes for view in views.values())
    count = next((n for n in range(1, K + 1) if not K % n and size <= MOST * n), K)
    for i in range(count):
        yield {
            "N": slice(i * N // count, (i + 1) * N // count),
            "K": slice(i * K // count, (i + 1) * K // count),
        }
