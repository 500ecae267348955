"""Mask arguments as data.

A framework's mask argument is a few facts: its name, the axes it may have, what True means, and
what values of another dtype mean. Reading is one einops arrow to canonical axes, writing the same
arrow turned round.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange

from jaxmha import Mask
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.dims import bind, parse

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
      other: what values that are not Boolean mean: `refused`, floats are `added` to the logits
        (integers refused), or `nonzero` is True.
      empty: what the framework answers a row to which this argument leaves nothing, by the path
        through it ("" where all agree).
    """

    name: str
    axes: tuple[str, ...]
    keep: bool = True
    field: str = "array"
    other: Literal["refused", "added", "nonzero"] = "refused"
    empty: tuple[tuple[str, str], ...] = ()


def read(argument: MaskArg, value: Any, sizes: dict[str, int]) -> Masks:
    """The argument as a mask, or as a bias `(#B, #N, #T, #S)` where its values are added.

    `sizes` are those known; those that the argument fixes are added to them.

    Raises:
      ValueError: its shape is none of those allowed. TypeError: its dtype is not allowed.

    >>> sizes = {"N": 3}
    >>> mask, bias = read(MaskArg("blocked", ("(B N) T S",), keep=False), np.eye(2)[:1] > 0, sizes)
    Traceback (most recent call last):
    ValueError: blocked: expected axes ((B N) T S), got shape (1, 2)
    >>> mask, bias = read(MaskArg("blocked", ("T S",), keep=False), np.eye(2) > 0, sizes)
    >>> mask.array.astype(int).tolist(), bias, sizes
    ([[[[0, 1], [1, 0]]]], None, {'N': 3, 'T': 2, 'S': 2})
    """
    array = to_numpy(value)
    boolean = array.dtype == np.bool_
    added = argument.other == "added" and jnp.issubdtype(array.dtype, jnp.floating)
    if not (boolean or added or argument.other == "nonzero"):
        raise TypeError(
            f"{argument.name} must be Boolean (True means "
            f"{'attend' if argument.keep else 'blocked'})"
            f"{' or floating (added to the logits)' if argument.other == 'added' else ''}, got "
            f"{array.dtype}{'' if argument.other == 'added' else ': pass mask != 0 if it is 0/1'}"
        )
    target = FIELDS["array" if added else argument.field]
    array = _arrow(array, _axes(argument, array.shape, sizes), target, sizes)
    if added:
        return None, array
    return Mask(**{argument.field: array.astype(bool) == argument.keep}), None


def write(argument: MaskArg, array: NDArray, sizes: Mapping[str, int]) -> NDArray:
    """A canonical array, Boolean or additive, with the smallest axes that hold it.

    Raises:
      ValueError: none of the axes of the argument does; names those it varies over.

    >>> argument = MaskArg("blocked", ("T S", "(B N) T S"), keep=False)
    >>> write(argument, np.ones((1, 1, 1, 5), bool), {"B": 2, "N": 3, "T": 4, "S": 5}).shape
    (4, 5)
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


def canonical_bias(bias: Any, sizes: Mapping[str, int]) -> NDArray:
    """A bias with four axes, each of full size or 1; nothing is rounded.

    Raises:
      ValueError: its shape does not fit. TypeError: it is not floating.

    >>> canonical_bias(np.ones((3, 1, 5)), {"B": 2, "N": 3, "T": 4, "S": 5}).shape
    (1, 3, 1, 5)
    """
    array = to_numpy(bias)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"bias must be floating, got {array.dtype}: a Boolean belongs in mask")
    shape = (1,) * (4 - array.ndim) + array.shape
    bind("bias", shape, "#B #N #T #S", dict(sizes))
    return array.reshape(shape)


def exclusions(bias: NDArray) -> NDArray | None:
    """A bias of only 0 and -inf adds nothing: as a mask, True = attend. None: it does add.

    >>> exclusions(np.array([0.0, -np.inf]))
    array([ True, False])
    """
    excluded: NDArray = bias == -np.inf
    return ~excluded if bool(np.all(excluded | (bias == 0))) else None


def _axes(argument: MaskArg, shape: tuple[int, ...], sizes: dict[str, int]) -> str:
    for axes in argument.axes:
        if len(parse(axes)) == len(shape):
            bind(argument.name, shape, axes, sizes)
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
