"""Joins the masks of several arguments into one `Mask`, and splits a `Mask` for export."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray, NDArray, to_numpy
from jaxmha.converters.masks.spec import FIELDS, MaskArg, Masks, canonical_bias, exclusions, read
from jaxmha.dims import bind, parse
from jaxmha.integers import require_sizes
from jaxmha.mask_arguments import as_mask

# Axes of every array field of an exported `Mask`.
_AXES = {
    "causal_offset": "#B",
    "query_lengths": "#B",
    "key_value_lengths": "#B",
    "query_padding": "#B T",
    "key_value_padding": "#B S",
    "query_segments": "#B T",
    "key_value_segments": "#B S",
    "array": "#B #N #T #S",
}

# The arguments of the functions of masks, by the letter of their size.
_SIZES = {"B": "batch_size", "N": "num_heads", "T": "query_length", "S": "key_length"}


def read_call(
    arguments: Iterable[MaskArg],
    values: Mapping[str, Any],
    structure: Mask,
    sizes: Mapping[str, int | None],
    emptied_by_bias: str,
) -> Masks:
    """Joins mask arguments, as `read_all` does, with the `Mask` of the call's other arguments.

    `structure` is that mask, such as causality. `sizes`: letter -> size, None if unknown.
    `emptied_by_bias`: "refused" raises ValueError for rows of which the bias excludes all keys.
    """
    known = {letter: size for letter, size in sizes.items() if size is not None}
    _require_sizes(known)
    read, added = read_all(arguments, values, known)
    joined = structure if read is None else structure & read
    if emptied_by_bias == "refused":
        refuse_emptied(joined, added, known)
    return (None if joined.empty else joined), added


def read_all(
    arguments: Iterable[MaskArg], values: Mapping[str, Any], sizes: dict[str, int]
) -> Masks:
    """Joins mask arguments: a pair is allowed if every mask allows it, and biases are added.

    `sizes` holds the known sizes; sizes that the arguments determine are added to it.

    Raises:
      ValueError: a shape is not allowed, or contradicts another argument.
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
            if size != 1:  # an axis of size 1 is broadcast and does not determine the size
                sizes.setdefault(letter, size)
        mask = mask if part is None else mask & part
        if added is not None:
            bias = added if bias is None else bias + added
    return (None if mask.empty else mask), bias


def _lengths(argument: MaskArg, value: AnyArray, sizes: dict[str, int]) -> Masks:
    array = to_numpy(value)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{argument.name} must be integers, got {array.dtype}")
    bind(argument.name, array.shape, argument.axes[0], sizes)
    field: dict[str, Any] = {argument.field: array}
    return Mask(**field), None


def checked(mask: Mask | AnyArray | None, sizes: Mapping[str, int]) -> Mask:
    """Converts the mask to export to a `Mask` of NumPy arrays with one batch axis each.

    `sizes` gives the sizes of the call by letter of the dimension key.

    Raises:
      ValueError: the shape of a field does not fit, or a size is not an integer of at least 0.

    >>> checked(Mask.padding(key_value=np.ones((2, 5), bool)), {"S": 7})
    Traceback (most recent call last):
    ValueError: mask.key_value_padding: expected axes (#B, S) with S=7, got shape (2, 5): crop or \
    pad the mask to the call, or export it for the sizes that it has
    """
    _require_sizes(sizes)
    given: Mask = as_mask(
        cast("Mask | NDArray | None", mask)
    )  # at run time `Mask.dense` refuses other types
    known = dict(sizes)
    if (given.query_segments is None) != (given.key_value_segments is None):
        raise ValueError(
            "mask has segment ids for only one of queries and keys: give query_ids and key_value_ids"
        )
    fields: dict[str, Any] = {}
    for name, axes in _AXES.items():
        value = getattr(given, name)
        if value is None or type(value) is int:
            continue
        shown, array = "mask" if name == "array" else f"mask.{name}", to_numpy(value)
        shape, rank = array.shape, len(parse(axes))
        if name == "array":
            array = array.reshape((1,) * (rank - array.ndim) + shape)
        else:
            lead = max(array.ndim - rank + 1, 0)
            array = array.reshape(math.prod(shape[:lead]), *shape[lead:])
        try:
            bind(shown, array.shape, axes, known)
        except ValueError:
            expected = {a: n for a, n in known.items() if a in axes}
            sizes_known = ", ".join(f"{a}={n}" for a, n in expected.items())
            raise ValueError(
                f"{shown}: expected axes ({', '.join(axes.split())})"
                f"{f' with {sizes_known}' if expected else ''}, got shape {shape}: crop or pad the "
                "mask to the call, or export it for the sizes that it has"
            ) from None
        for letter, size in zip(axes.replace("#", "").split(), array.shape, strict=True):
            if size != 1:  # an axis of size 1 is broadcast and does not determine the size
                known.setdefault(letter, size)
        fields[name] = array
    return replace(given, **fields)


def _require_sizes(sizes: Mapping[str, int]) -> None:
    named: dict[str, Any] = {_SIZES.get(letter, letter): n for letter, n in sizes.items()}
    require_sizes(least=0, **named)


def only_mask(
    mask: Mask,
    bias: AnyArray | None,
    where: str,
    instead: str,
    sizes: Mapping[str, int] | None = None,
) -> Mask:
    """Merges a mask and a bias that holds only 0 and -inf into one mask.

    Raises:
      ValueError: the bias adds other values. The message names the framework that cannot add them
        (`where`) and the remedy (`instead`).
    """
    if bias is None:
        return mask
    kept = exclusions(canonical_bias(bias, sizes or {}))
    if kept is None:
        raise ValueError(
            f"{where} cannot hold additive values: its masks are Boolean, and the bias has finite "
            f"values that are not 0; {instead}"
        )
    return mask & Mask(array=kept)


def without_query_lengths(mask: Mask, T: int, where: str) -> Mask:
    """The mask without its query lengths, if no query is beyond its length.

    Raises:
      ValueError: a query is beyond its length: its output would be 0, and the framework (`where`)
        has no argument for that.
    """
    if mask.query_lengths is not None and np.any(to_numpy(mask.query_lengths) < T):
        raise ValueError(
            f"mask has query lengths, beyond which rows are 0, and {where} has none: drop them and "
            "zero those rows of the output, or use Mask.padding(query=np.arange(T) < "
            "lengths[:, None]), whose rows count as fully masked"
        )
    return replace(mask, query_lengths=None)


def array_of(mask: Mask, T: int, S: int, apart: Iterable[str] = ()) -> NDArray | None:
    """A checked mask as one Boolean array `(#B, #N, #T, #S)`, without the fields in `apart`.

    Axes along which the mask is constant have size 1. Returns None if no field is left.

    >>> mask = checked(Mask.causal() & Mask.padding(key_value=np.ones((2, 5), bool)), {})
    >>> array_of(mask, 3, 5).shape
    (1, 1, 3, 5)
    """
    mask = replace(mask, **dict.fromkeys(apart))
    if mask.empty:
        return None
    array: NDArray = np.asarray(mask.to_array(T, S, np))
    return narrowed(array)


def refuse_emptied(mask: Mask | None, bias: NDArray | None, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if a bias of -inf excludes every key that the mask allows in a row.

    Frameworks that fill masked logits with a finite constant return the mean of the masked values
    for such a row, or NaN if the mask allows every key. If `sizes` has no T, the check covers
    every query position for which a causal mask and window can differ.
    """
    if bias is None or not np.isneginf(bias).any():
        return
    mask, S = mask or Mask(), sizes.get("S", 1)
    left = mask.window_size[0] if mask.window_size else 0
    T = sizes["T"] if "T" in sizes else max(S + (left or 0), 1)
    allowed = np.asarray(mask.to_array(T, S, np))
    emptied = allowed.any(-1) & ~(allowed & (bias != -np.inf)).any(-1)
    if emptied.any():
        b, n, i = np.argwhere(emptied)[0]
        raise ValueError(
            f"bias of -inf excludes every key that the mask leaves to batch row {b}, head {n}, "
            f"query {i}: the framework returns the mean of the values that the mask blocks, or "
            "NaN if it blocks none, which no mask can express; leave the row a key, or pass "
            "emptied_by_bias='empty' to treat it as any fully masked row"
        )


def narrowed(array: NDArray) -> NDArray:
    """Reduces every axis along which the array is constant to size 1.

    >>> narrowed(np.array([[1, 0], [1, 0]]))
    array([[1, 0]])
    """
    for axis, size in enumerate(array.shape):
        first = array.take([0], axis) if size > 1 else array
        if np.array_equal(np.broadcast_to(first, array.shape), array):
            array = first
    return array


def padding_of(mask: Mask, role: str, length: int) -> NDArray | None:
    """Joins padding and lengths of a mask for a role, `query` or `key_value`: `(#B, length)`.

    Returns None if the mask has neither.

    >>> padding_of(Mask.lengths(key_value=np.array([1, 2])), "key_value", 2).astype(int).tolist()
    [[1, 0], [1, 1]]
    """
    padding, lengths = (getattr(mask, f"{role}_{kind}") for kind in ("padding", "lengths"))
    if lengths is None:
        return None if padding is None else np.asarray(padding)
    within: NDArray = np.arange(length).reshape(1, -1) < lengths.reshape(-1, 1)
    return within if padding is None else np.logical_and(padding, within)


def is_top_left(mask: Mask) -> bool:
    """True if the mask is causal with the static offset 0; reads no array."""
    return type(mask.causal_offset) is int and mask.causal_offset == 0


def floating(name: str, value: AnyArray | None) -> AnyArray | None:
    """Returns the value of an additive argument; raises TypeError if it is Boolean."""
    if value is not None and to_numpy(value).dtype == np.bool_:
        raise TypeError(f"{name} is added to the logits and must be floating, got bool: pass mask=")
    return value
