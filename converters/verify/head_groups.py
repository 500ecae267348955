"""Compares outputs of blocks in files, one group of heads at a time, to limit memory."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxmha.converters.verify import comparands, comparison
from jaxmha.converters.verify.comparands import ComparedBlock
from jaxmha.converters.verify.streaming import FileLayer, Views
from jaxmha.params import CANONICAL, from_leaves

MOST = 16 << 20  # most bytes of parameters in one group of heads, unless one head is larger
Errors = dict[str, tuple[float, float]]  # mask -> (error of a, error of b)
Index = tuple[int, ...]
Box = dict[str, slice]  # letter of an axis -> slice of it


class Outputs(NamedTuple):
    """The result of running both blocks.

    Attributes:
      differences: descriptions of differing behaviour and outputs.
      errors: mask -> RMS error of each block against float64, in rounding floors of the output; the
        largest over all groups of heads.
      notes: descriptions of parts that could not be run.
    """

    differences: list[str]
    errors: Errors
    notes: list[str]


def compare(a: FileLayer, b: FileLayer, name: str) -> Outputs:
    """Compares the outputs of two blocks with identical leaves; stacked blocks layer by layer."""
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


def _layer(a: Views, b: Views, index: Index) -> tuple[list[str], Errors, list[str]]:
    """Returns differences and errors of one layer, and the names of its non-finite leaves."""
    differences: dict[str, None] = {}
    bad: dict[str, None] = {}
    errors: Errors = {}
    for box in boxes(a, index):
        x, y = group(a, index, box), group(b, index, box)
        if held := comparison.not_finite(x.params):
            bad |= dict.fromkeys(held)
            continue
        compared = comparison.compare_blocks(x, y)
        if not compared.same:
            differences |= dict.fromkeys([*compared.behaviour, *filter(None, [compared.departs])])
        for mask, pair in compared.errors.items():
            before = errors.get(mask, (0.0, 0.0))
            errors[mask] = max(before[0], pair[0]), max(before[1], pair[1])
    return list(differences), errors, list(bad)


def group(views: Views, index: Index, box: Box) -> ComparedBlock:
    """Reads the heads in `box` of one layer as a block."""
    arrays = {}
    for leaf in views.leaves:
        slices = (box.get(letter, slice(None)) for letter in CANONICAL[leaf].split())
        arrays[leaf] = views.read(leaf, (*index, *slices))
    return comparands.of_params("", "", from_leaves(dict(arrays)), views.layer.semantics)


def boxes(views: Views, index: Index) -> Iterator[Box]:
    """Yields equal groups of the N query heads, with the key/value heads that they use."""
    N, K = (views.leaves[f"{role}.kernel"].shape[-2] for role in ("query", "key"))
    size = sum(view[index].nbytes for view in views.leaves.values())
    counts = (n for n in range(1, N + 1) if not N % n and (not K % n or not n % K))
    count = next((n for n in counts if size <= MOST * n), N)
    for i in range(count):
        first, last = i * N // count, (i + 1) * N // count
        yield {"N": slice(first, last), "K": slice(first * K // N, -(-last * K // N))}
