"""Masks joined from several arguments, and taken apart again for them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxmha import Mask
from jaxmha.axes import bind
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.masks.argument import FIELDS, MaskArg, Masks, exclusions, read

# Axes after the batch of every array field, so that each can have one batch axis.
_TAIL = {
    "causal_offset": 0,
    "query_lengths": 0,
    "key_value_lengths": 0,
    "query_padding": 1,
    "key_value_padding": 1,
    "query_segments": 1,
    "key_value_segments": 1,
}


def read_all(
    arguments: Iterable[MaskArg], values: Mapping[str, Any], sizes: dict[str, int]
) -> Masks:
    """The arguments that are there, joined: masks all have to hold, biases are added.

    `sizes` are those known; those that the arguments fix are added to them.

    Raises:
      ValueError: a shape is none of those allowed, or contradicts another argument.
      TypeError: a dtype is not allowed.

    >>> padding = MaskArg("value_mask", ("#B S",), field="key_value_padding", other="nonzero")
    >>> read_all((padding,), {"value_mask": np.array([[1, 1, 0]])}, {})[0]
    Mask(key_value_padding=bool[1, 3])
    """
    mask, bias = Mask(), None
    for argument in arguments:
        value = values.get(argument.name)
        if value is None:
            continue
        lengths = argument.field.endswith("lengths")
        part, added = (_lengths if lengths else read)(argument, value, sizes)
        field = "array" if part is None else argument.field
        array: Any = added if part is None else getattr(part, field)
        for letter, size in zip(FIELDS[field].split(), array.shape, strict=True):
            if size != 1:  # `#B` has no size by itself
                sizes.setdefault(letter, size)
        mask = mask if part is None else mask & part
        if added is not None:
            bias = added if bias is None else bias + added
    return (None if mask.empty else mask), bias


def _lengths(argument: MaskArg, value: Any, sizes: dict[str, int]) -> Masks:
    array = to_numpy(value)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{argument.name} must be integers, got {array.dtype}")
    bind(argument.name, array.shape, argument.axes[0], sizes)
    field: dict[str, Any] = {argument.field: array}
    return Mask(**field), None


def only_mask(mask: Mask, bias: NDArray | None, where: str, instead: str) -> Mask:
    """The mask that a mask and a bias of only 0 and -inf are together.

    Raises:
      ValueError: the bias adds to the logits, which `where` cannot; `instead` says what can.
    """
    if bias is None:
        return mask
    kept = exclusions(to_numpy(bias))
    if kept is None:
        raise ValueError(
            f"{where} cannot hold additive values: its masks are Boolean, and the bias has finite "
            f"values that are not 0; {instead}"
        )
    return mask & Mask(array=kept)


def array_of(mask: Mask, T: int, S: int, apart: Iterable[str] = ()) -> NDArray | None:
    """The mask as one Boolean array `(#B, #N, #T, #S)`, without the fields that go elsewhere.

    Axes along which it does not vary are of size 1. None where nothing is left.

    >>> array_of(Mask.causal() & Mask.padding(key_value=np.ones((2, 5), bool)), 3, 5).shape
    (1, 1, 3, 5)
    """
    mask = replace(mask, **dict.fromkeys(apart))
    if mask.empty:
        return None
    if mask.array is not None and mask.array.ndim > 4:
        raise ValueError(f"mask: expected axes (B, N, T, S), got shape {mask.array.shape}")
    rows: dict[str, Any] = {
        name: _one_batch(name, getattr(mask, name))
        for name in _TAIL
        if not isinstance(getattr(mask, name), int | None)
    }
    return narrowed(to_numpy(replace(mask, **rows).to_array(T, S)))


def _one_batch(name: str, value: Any) -> NDArray:
    """A field of a Mask with one batch axis, `(B,)` or `(B, length)`, its dtype checked."""
    array = to_numpy(value)
    wanted = np.bool_ if name.endswith("padding") else np.integer
    if not np.issubdtype(array.dtype, wanted):
        kind, instead = (
            ("Boolean", "pass `padding != 0`") if wanted is np.bool_ else ("integers", "cast it")
        )
        raise TypeError(f"mask: {name} must be {kind}, got {array.dtype}; {instead}")
    lead = array.ndim - _TAIL[name]
    return array.reshape(math.prod(array.shape[:lead]), *array.shape[lead:])


def narrowed(array: NDArray) -> NDArray:
    """Axes along which every entry is the same become size 1.

    >>> narrowed(np.array([[1, 0], [1, 0]]))
    array([[1, 0]])
    """
    for axis, size in enumerate(array.shape):
        first = array.take([0], axis) if size > 1 else array
        if np.array_equal(np.broadcast_to(first, array.shape), array):
            array = first
    return array


def padding_of(mask: Mask, side: str, length: int) -> NDArray | None:
    """Lengths and padding of a side, `query` or `key_value`, as one Boolean `(#B, length)`.

    >>> padding_of(Mask.lengths(key_value=np.array([1, 2])), "key_value", 2).astype(int).tolist()
    [[1, 0], [1, 1]]
    """
    names = (f"{side}_padding", f"{side}_lengths")
    padding, lengths = (
        None if value is None else _one_batch(name, value)
        for name in names
        for value in [getattr(mask, name)]
    )
    if padding is not None and padding.shape[1:] != (length,):
        raise ValueError(
            f"mask: {side}_padding must end in an axis of {length}, got shape {padding.shape}"
        )
    if lengths is None:
        return padding
    within = np.arange(length).reshape(1, -1) < lengths.reshape(-1, 1)
    return within if padding is None else np.logical_and(padding, within)


def is_top_left(mask: Mask) -> bool:
    """Whether it is causal with offset 0 for every row, known without looking at arrays."""
    return type(mask.causal_offset) is int and mask.causal_offset == 0


def floating(name: str, value: Any) -> Any:
    """The value of an argument that is added to the logits; TypeError for Booleans."""
    if value is not None and to_numpy(value).dtype == np.bool_:
        raise TypeError(f"{name} is added to the logits and must be floating, got bool: pass mask=")
    return value
