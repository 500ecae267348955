"""Mask arguments as tables.

An entry of the table gives the name of a framework's mask argument, the axes it may have, the
meaning of True, and the meaning of values of another dtype. Reading applies one einops pattern to
canonical axes; writing applies the reverse pattern.
"""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray, NDArray, to_numpy
from jaxmha.dims import bind, parse

Masks = tuple[Mask | None, NDArray | None]

# Fields of a `Mask` that an argument can become, with their axes.
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
      name: the framework's name for it.
      axes: the allowed axes, the smallest first, each of another rank; `#B` may have size 1.
      keep: True if True means attend.
      field: the field of `Mask` that it becomes.
      other: the meaning of values that are not Boolean: `refused`; floats are `added` to the logits
        (integers are refused); or `nonzero` counts as True.
      empty: the framework's output for a row that this argument masks fully, by code path ("" if
        all paths agree).
    """

    name: str
    axes: tuple[str, ...]
    keep: bool = True
    field: str = "array"
    other: Literal["refused", "added", "nonzero"] = "refused"
    empty: tuple[tuple[str, str], ...] = ()


def is_additive(array: NDArray) -> bool:
    """True for numbers that look like an additive mask: some are 0, some negative, none positive.

    >>> is_additive(np.array([0.0, -np.inf])), is_additive(np.array([0, 1]))
    (True, False)
    """
    if array.dtype == np.bool_ or (array > 0).any():
        return False
    return bool((array == 0).any() and (array < 0).any())


def read(argument: MaskArg, value: AnyArray, sizes: dict[str, int]) -> Masks:
    """Imports the argument as a mask, or as a bias `(#B, #N, #T, #S)` if its values are added.

    `sizes` holds the known sizes; sizes that the argument determines are added to it.

    Raises:
      ValueError: the shape is not allowed. TypeError: the dtype is not allowed.

    >>> sizes = {"N": 3}
    >>> mask, bias = read(MaskArg("blocked", ("(B N) T S",), keep=False), np.eye(2)[:1] > 0, sizes)
    Traceback (most recent call last):
    ValueError: blocked: expected axes ((B N) T S), got shape (1, 2)
    >>> mask, bias = read(MaskArg("blocked", ("T S",), keep=False), np.eye(2) > 0, sizes)
    >>> mask.array.astype(int).tolist(), bias, sizes
    ([[[[0, 1], [1, 0]]]], None, {'N': 3, 'T': 2, 'S': 2})
    """
    array = to_numpy(value, argument.name)
    boolean = array.dtype == np.bool_
    added = argument.other == "added" and jnp.issubdtype(array.dtype, jnp.floating)
    if not (boolean or added or argument.other == "nonzero"):
        remedy = "mask == 0, since 0 keeps" if is_additive(array) else "mask != 0 if it is 0/1"
        raise TypeError(
            f"{argument.name} must be Boolean (True means "
            f"{'attend' if argument.keep else 'blocked'})"
            f"{' or floating (added to the logits)' if argument.other == 'added' else ''}, got "
            f"{array.dtype}{'' if argument.other == 'added' else f': pass {remedy}'}"
        )
    target = FIELDS["array" if added else argument.field]
    array = _arrow(array, _axes(argument, array.shape, sizes), target, sizes)
    if added:
        return None, array
    return Mask(**{argument.field: array.astype(bool) == argument.keep}), None


def write(argument: MaskArg, array: NDArray, sizes: Mapping[str, int]) -> NDArray:
    """Exports a canonical array, Boolean or additive, in the smallest allowed axes that can hold it.

    Raises:
      ValueError: no axes of the argument can hold the array; the message names the axes along which
        it varies.

    >>> argument = MaskArg("blocked", ("T S", "(B N) T S"), keep=False)
    >>> write(argument, np.ones((1, 1, 1, 5), bool), {"B": 2, "N": 3, "T": 4, "S": 5}).shape
    (4, 5)
    """
    source = FIELDS[argument.field if array.ndim != 4 else "array"]
    letters = source.split()
    needed = {a for a, size in zip(letters, array.shape, strict=True) if size != 1}
    for axes in argument.axes:
        groups = parse(axes)
        letters_of = {a.removeprefix("#") for group in groups for a in group}
        if not needed <= letters_of:
            continue
        loose = {a[1:] for group in groups for a in group if a.startswith("#")}
        full = tuple(
            sizes[a] if a in letters_of and a not in loose else size
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


def canonical_bias(bias: AnyArray, sizes: Mapping[str, int]) -> NDArray:
    """Expands a bias to four axes, each of full size or 1; nothing is rounded.

    Raises:
      ValueError: its shape does not fit. TypeError: it is not floating.

    >>> canonical_bias(np.ones((3, 1, 5)), {"B": 2, "N": 3, "T": 4, "S": 5}).shape
    (1, 3, 1, 5)
    """
    array = to_numpy(bias, "bias")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"bias must be floating, got {array.dtype}: a Boolean belongs in mask")
    shape = (1,) * (4 - array.ndim) + array.shape
    bind("bias", shape, "#B #N #T #S", dict(sizes))
    return array.reshape(shape)


def exclusions(bias: NDArray) -> NDArray | None:
    """Converts a bias of only 0 and -inf to a mask, True = attend; None if it adds other values.

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
    """Rearranges an array from axes `source` to axes `target`; a letter in only one has size 1."""
    left, right = source.replace("#", ""), target.replace("#", "")
    have, want = ({a for group in parse(axes) for a in group} for axes in (left, right))
    left, right = _keep(left, want), _keep(right, have)
    split = {a: sizes[a] for group in parse(left) if len(group) > 1 for a in group}
    return to_numpy(rearrange(array, f"{left} -> {right}", **split))


def _keep(axes: str, letters: set[str]) -> str:
    return re.sub(r"\w+", lambda letter: letter[0] if letter[0] in letters else "1", axes)
