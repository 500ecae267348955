"""Mask arguments as data.

A framework's mask argument is a few facts: its name, the axes it may have, what True means, and
what values of another dtype mean. Reading is one einops arrow to canonical axes, writing the same
arrow turned round.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from einops import rearrange

from jaxmha import Mask
from jaxmha.axes import bind, parse
from jaxmha.converters.arrays import NDArray, to_numpy

Masks = tuple[Mask | None, NDArray | None]

# Axes of the fields of a `Mask` that an argument can be.
FIELDS = {
    "array": "B N T S",
    "query_padding": "B T",
    "key_value_padding": "B S",
    "query_lengths": "B",
    "key_value_lengths": "B",
}


class MaskArg(NamedTuple):
    """One argument of a framework.

    Attributes:
      name: as the framework calls it.
      axes: what it may have, the smallest first, no two of one rank; `#B` may be of size 1.
      keep: whether True means attend.
      field: of `Mask`, what it says.
      other: what values that are not Boolean mean: `refused`, `added` to the logits, or
        `nonzero` is True.
    """

    name: str
    axes: tuple[str, ...]
    keep: bool = True
    field: str = "array"
    other: Literal["refused", "added", "nonzero"] = "refused"


def read(argument: MaskArg, value: Any, sizes: Mapping[str, int]) -> Masks:
    """The argument as a mask, or as a bias `(#B, #N, #T, #S)` where its values are added.

    Raises:
      ValueError: its shape is none of those allowed. TypeError: its dtype is not allowed.
    """
    array = to_numpy(value)
    boolean = array.dtype == np.bool_
    if not boolean and argument.other == "refused":
        raise TypeError(
            f"{argument.name} must be Boolean (True means "
            f"{'attend' if argument.keep else 'blocked'}), got {array.dtype}"
        )
    added = not boolean and argument.other == "added"
    target = FIELDS["array" if added else argument.field]
    array = _arrow(array, _axes(argument, array.shape, sizes), target, sizes)
    if added:
        return None, array
    return Mask(**{argument.field: array.astype(bool) == argument.keep}), None


def write(argument: MaskArg, array: NDArray, sizes: Mapping[str, int]) -> NDArray:
    """A canonical array, Boolean or additive, with the smallest axes that hold it.

    Raises:
      ValueError: none of the axes of the argument does; names those it varies over.
    """
    source = FIELDS[argument.field if array.ndim != 4 else "array"]
    letters = source.split()
    needed = {a for a, size in zip(letters, array.shape, strict=True) if size != 1}
    for axes in argument.axes:
        groups = parse(axes)
        there = {a.removeprefix("#") for group in groups for a in group}
        if not needed <= there:
            continue
        loose = {a[1:] for group in groups for a in group if a.startswith("#")}
        full = tuple(
            sizes[a] if a in there and a not in loose else size
            for a, size in zip(letters, array.shape, strict=True)
        )
        array = np.broadcast_to(array, full)
        if array.dtype == np.bool_:
            array = array == argument.keep
        return _arrow(array, source, axes, sizes)
    raise ValueError(
        f"{argument.name} cannot hold a mask that varies over {' and '.join(sorted(needed))}: its "
        f"axes are {' or '.join(f'({axes})' for axes in argument.axes)}"
    )


def _axes(argument: MaskArg, shape: tuple[int, ...], sizes: Mapping[str, int]) -> str:
    for axes in argument.axes:
        if len(parse(axes)) == len(shape):
            bind(argument.name, shape, axes, dict(sizes))
            return axes
    raise ValueError(
        f"{argument.name}: expected axes {' or '.join(f'({axes})' for axes in argument.axes)}, "
        f"got shape {shape}"
    )


def _arrow(array: NDArray, source: str, target: str, sizes: Mapping[str, int]) -> NDArray:
    """Rearranges; letters that only one side has are axes of size 1."""
    left, right = source.replace("#", ""), target.replace("#", "")
    have, want = ({a for group in parse(axes) for a in group} for axes in (left, right))
    left, right = _keep(left, want), _keep(right, have)
    split = {a: sizes[a] for group in parse(left) if len(group) > 1 for a in group}
    return to_numpy(rearrange(array, f"{left} -> {right}", **split))


def _keep(axes: str, letters: set[str]) -> str:
    return re.sub(r"\w+", lambda letter: letter[0] if letter[0] in letters else "1", axes)
