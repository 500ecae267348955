"""Masks of keras.layers.MultiHeadAttention and GroupedQueryAttention: True means attend.

Sources: keras/src/layers/attention/multi_head_attention.py and grouped_query_attention.py.
A mask of any dtype but Boolean means "nonzero attends", so an additive mask (0 keeps, -1e9 blocks)
means its opposite. A fully masked row is the mean of the values on the fused path. It is 0 if
scores are returned or the dropout rate is not 0.

The fused path sets masked logits to -2.4e38. On torch in float16 it adds -45856 to them: a fully
masked row is then the softmax of its logits, as without a mask. The path that returns scores sets
them to -1e9 (-3e4 in float16), and zeroes the masked weights after the softmax. This excludes the
keys as long as other logits are above the constant. If all of them are below it, masked keys take
the whole softmax sum, and the row becomes 0. The presets of `Semantics` exclude masked keys
instead, so that the weights of such a row still sum to 1.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray, NDArray, to_numpy
from jaxmha.converters.masks.compose import (
    array_of,
    checked,
    is_top_left,
    only_mask,
    padding_of,
    read_all,
    without_query_lengths,
)
from jaxmha.converters.masks.keras_axes import import_along
from jaxmha.converters.masks.spec import MaskArg, Masks, write
from jaxmha.static_checks import one_of

Kind = Literal["mha", "gqa"]

_EMPTY = (("fused", "mean"), ("scores", "zero"))
# Keras reads a mask with three axes as (B, T, S), flax as (N, T, S).
ARGUMENTS = tuple(
    MaskArg(name, axes, field=field, other="nonzero", empty=_EMPTY)
    for name, axes, field in (
        ("attention_mask", ("#S", "#T #S", "#B #T #S", "#B #N #T #S"), "array"),
        ("query_mask", ("#B T",), "query_padding"),
        ("value_mask", ("#B S",), "key_value_padding"),
        ("key_mask", ("#B S",), "key_value_padding"),
    )
)
_POSITIONS: tuple[MaskArg, ...] = ARGUMENTS[1:]
_WRITTEN = ARGUMENTS[0]._replace(axes=ARGUMENTS[0].axes[1:])  # Keras refuses axes (S) alone

_IGNORED = (
    "keras MultiHeadAttention ignores the argument query_mask: leave it out to get the "
    "output of Keras, pass implicit=True if the query tensor carries it, or pass "
    "attention_mask=query_mask[:, :, None] to apply it"
)


def import_masks(
    *,
    attention_mask: AnyArray | None = None,
    use_causal_mask: bool = False,
    query_mask: AnyArray | None = None,
    value_mask: AnyArray | None = None,
    key_mask: AnyArray | None = None,
    sliding_window: int | None = None,
    kind: Kind = "mha",
    implicit: bool = False,
    num_heads: int | None = None,
    attention_axes: Sequence[int] | None = None,
    input_axes: int = 3,
) -> Masks:
    """Imports the mask arguments of a Keras attention layer.

    Args:
      attention_mask: `(T, S)`, `(B, T, S)` or `(B, N, T, S)`, where any axis may have size 1; also
        `(S,)` together with another mask. True or nonzero attends.
      use_causal_mask: query i attends keys j <= i.
      query_mask: `(B, T)`.
      value_mask: `(B, S)`.
      key_mask: `(B, S)`.
      sliding_window: the setting of the layer; w allows |i - j| < w.
      kind: `"mha"` for MultiHeadAttention, `"gqa"` for GroupedQueryAttention.
      implicit: True: the query tensor carries query_mask (`mask_zero`, `Masking`). False: the
        caller passes query_mask; MultiHeadAttention ignores it then, so that `"mha"` raises.
      num_heads: N. If a four-axis mask is given together with `(B, S)` masks and B = N, Keras
        applies row b of the latter to head b, and so does the returned mask.
      attention_axes: `Semantics.attention_axes` of the layer, and input_axes: the number of axes of
        its inputs, if they are more than three. A mask then begins with B and ends with the
        attended axes, `(B, *T, *S)`; axes in between may be missing: `(B, X, *T, *S)`.

    Returns:
      the mask (None: no condition) and None, since Keras adds nothing to the logits.

    Raises:
      ValueError: a shape is not allowed; or Keras would ignore the mask, fail on it, or read it
        differently on its two paths.

    >>> mask, _ = import_masks(value_mask=np.array([[1, 1, 0]]), use_causal_mask=True)
    >>> mask.to_array(2, 3).astype(int).tolist()
    [[[[1, 0, 0], [1, 1, 0]]]]
    """
    one_of("kind", kind, ("mha", "gqa"))
    if query_mask is not None and kind == "mha" and not implicit:
        raise ValueError(_IGNORED)
    values = {"query_mask": query_mask, "value_mask": value_mask, "key_mask": key_mask}
    structure = Mask.causal() if use_causal_mask else Mask()
    if sliding_window is not None:
        structure &= Mask.window(sliding_window - 1, sliding_window - 1)
    alone = structure.empty and all(value is None for value in values.values())
    if attention_axes is not None and input_axes > 3:
        given = {**values, "attention_mask": attention_mask}
        along = import_along(tuple(attention_axes), input_axes, given, structure)
        return (None if along.empty else along), None
    sizes: dict[str, int] = {} if num_heads is None else {"N": num_heads}
    positions = _POSITIONS
    if attention_mask is not None:
        attention_mask = to_numpy(attention_mask)
        if alone:
            _one_reading(attention_mask, kind)
        elif attention_mask.ndim == 4:
            positions = tuple(_with_four_axes(row, values, num_heads) for row in _POSITIONS)
    values["attention_mask"] = attention_mask
    mask, bias = read_all((ARGUMENTS[0], *positions), values, sizes)
    joined = structure if mask is None else structure & mask
    return (None if joined.empty else joined), bias


def _one_reading(mask: NDArray, kind: Kind) -> None:
    """Raises ValueError if Keras cannot use the only mask, or reads it differently by code path."""
    if mask.ndim == 1:
        raise ValueError(
            f"attention_mask: keras fails on axes (S) without another mask, got shape {mask.shape}: "
            "pass mask[None]"
        )
    if kind == "mha" or mask.dtype == np.bool_:
        return
    half = 0.5 if np.issubdtype(mask.dtype, np.inexact) else 0
    if np.any((mask != 0) != (mask > half)):
        raise ValueError(
            f"attention_mask is {mask.dtype} with values that keras GroupedQueryAttention reads in "
            "two ways: nonzero attends on its fused path, only more than 0.5 if scores are "
            "returned or dropout is active; pass a Boolean mask, True = attend"
        )


def _with_four_axes(row: MaskArg, values: dict[str, Any], num_heads: int | None) -> MaskArg:
    """The argument of padding with axis B read as N, as Keras does next to a mask of four axes.

    Raises ValueError unless B = N or B = 1.
    """
    value = values[row.name]
    if value is None or len(to_numpy(value)) == 1:
        return row
    batch = len(to_numpy(value))
    if num_heads != batch:
        raise ValueError(
            f"{row.name} with {batch} rows next to an attention_mask of four axes: keras applies row "
            "b to head b where B = N (import that with num_heads=N), and fails elsewhere; pass it "
            "within attention_mask, as mask[:, None, None, :] (True = attend)"
        )
    return row._replace(axes=(row.axes[0].replace("#B", "N"),), field="array")


_PER_HEAD = (
    "keras documents attention_mask as (B, T, S), and this mask varies over {} heads: give one "
    "layer per mask, or, if no tensor carries a mask of its own, pass per_head=True for an "
    "attention_mask of (B, N, T, S)"
)


def export_masks(
    mask: Mask | AnyArray | None,
    bias: AnyArray | None = None,
    *,
    query_length: int,
    key_length: int,
    kind: Kind = "mha",
    per_head: bool = False,
) -> dict[str, Any]:
    """Exports a mask as keyword arguments of a Keras attention layer.

    Causality becomes `use_causal_mask`; padding and lengths of keys become `value_mask`; padding of
    queries becomes `query_mask` (GroupedQueryAttention) or part of `attention_mask`; the rest
    becomes `attention_mask`.

    Args:
      mask: a `Mask`, a Boolean array broadcastable to BNTS (True = attend), or None.
      bias: holds only 0 and -inf.
      query_length: T.
      key_length: S.
      kind: `"mha"` or `"gqa"`.
      per_head: allows `attention_mask` to have four axes. Keras documents three, but accepts four
        as long as no tensor carries a mask.

    Raises:
      ValueError: a shape does not fit; queries beyond their length; additive values; or a mask per
        head without `per_head`.

    >>> sorted(export_masks(Mask.causal() & Mask.lengths(key_value=np.array([1, 3])),
    ...                     query_length=2, key_length=3))
    ['use_causal_mask', 'value_mask']
    """
    one_of("kind", kind, ("mha", "gqa"))
    T, S = query_length, key_length
    sizes = {"T": T, "S": S}
    mask = without_query_lengths(checked(mask, sizes), T, "keras")
    instead = "use jax.nn, flax's function or torch, or leave it out"
    mask = only_mask(mask, bias, "keras", instead, sizes)
    whole, arguments = mask, dict[str, Any]()
    if is_top_left(mask):
        arguments["use_causal_mask"] = True
        mask = replace(mask, causal_offset=None)
    roles = {"value_mask": ("key_value", S)} | (
        {"query_mask": ("query", T)} if kind == "gqa" else {}
    )
    apart = [f"{role}_{what}" for role, _ in roles.values() for what in ("padding", "lengths")]
    rest = array_of(mask, T, S, apart)
    if rest is not None and rest.shape[1] > 1:
        joined = array_of(whole, T, S)
        if (
            joined is not None and joined.shape[1] == 1
        ):  # all heads are equal once causality and padding are joined
            return {"attention_mask": write(_WRITTEN, joined, {})}
        if not per_head:
            raise ValueError(_PER_HEAD.format(rest.shape[1]))
        rest = array_of(mask, T, S)  # Keras misaligns (B, S) masks with a mask of four axes
    else:
        for name, (role, length) in roles.items():
            padding = padding_of(mask, role, length)
            if padding is not None:
                arguments[name] = padding
    if rest is not None:
        arguments["attention_mask"] = write(_WRITTEN, rest, {})
    return arguments
