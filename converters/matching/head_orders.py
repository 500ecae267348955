"""Finds the order in which the lines of a plan put the features of heads of queries and keys.

A plan may reorder features for another kind of rotation, so rotations are compared in this order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np

from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.matching.plan import Line
from jaxmha.converters.matching.terms import meaning
from jaxmha.converters.matching.trees import Array, Tree

Order = tuple[int, ...]  # for each feature of a head of the target: its index in the source's head
Jobs = Mapping[str, tuple[Line, Sequence[str]]]
Value = Callable[[Line, Sequence[str], Tree, Array], NDArray]


def of_heads(
    jobs: Jobs, source: Tree, target: Tree, value: Value
) -> Callable[[Iterable[str], int], set[Order]]:
    """Returns a function of names of target arrays and H, which returns orders of a head's features.

    An order is returned if all lines that fill queries and keys among these arrays may have it, and
    no order if there are no such lines. Several may be returned if the number of inputs is a multiple
    of H too: nothing shows which axis has the heads. `value` computes an array (`loading.value`).
    """

    def orders(names: Iterable[str], H: int) -> set[Order]:
        found = [
            _orders(*jobs[name], source, target.arrays[name], H, value)
            for name in names
            if {"query", "key"} & meaning(target.arrays[name].path)
        ]
        return set.intersection(*found) if found else set()

    return orders


def _orders(
    line: Line, names: Sequence[str], source: Tree, target: Array, H: int, value: Value
) -> set[Order]:
    if line.fill:
        return set()
    shape = source.arrays[names[0]].shape
    numbers = replace(source, load=lambda _: np.arange(prod(shape)).reshape(shape))
    made = value(line, names, numbers, target)
    before, after = np.unravel_index(made, shape), np.indices(made.shape, sparse=True)
    axes = [[n for n, size in enumerate(x) if size % H == 0] for x in (shape, made.shape)]
    found = set[Order]()
    for i, j in product(*axes):
        pairs = np.unique(after[j] % H * H + before[i] % H)
        if len(pairs) == H:
            found.add(tuple(int(n) for n in pairs % H))
    return found
