"""Masks of jax.nn.dot_product_attention: Boolean, True means attend.

Source: jax/_src/nn/functions.py. A fully masked row returns the mean of the values, or 0 beyond
a query length. If a bias of -inf excludes every key that the masks allow, the row returns the mean
of the masked values, or NaN if the masks allow every key.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxmha import Mask, checks
from jaxmha.converters.layout.arrays import AnyArray, to_numpy
from jaxmha.converters.masks.compose import (
    array_of,
    checked,
    floating,
    is_top_left,
    read_call,
)
from jaxmha.converters.masks.spec import MaskArg, Masks, canonical_bias, write
from jaxmha.static_checks import one_of

_AXES = ("#S", "#T #S", "#N #T #S", "#B #N #T #S")
ARGUMENTS = (
    MaskArg("bias", _AXES, other="added", empty=(("", "nan"),)),
    MaskArg("mask", _AXES, empty=(("", "mean"),)),
    MaskArg("query_seq_lengths", ("B",), field="query_lengths", empty=(("", "zero"),)),
    MaskArg("key_value_seq_lengths", ("B",), field="key_value_lengths", empty=(("", "mean"),)),
)


def import_masks(
    *,
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
    is_causal: bool = False,
    query_seq_lengths: AnyArray | None = None,
    key_value_seq_lengths: AnyArray | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    num_heads: int | None = None,
    query_length: int | None = None,
    emptied_by_bias: Literal["refused", "empty"] = "refused",
) -> Masks:
    """Imports the mask arguments of `jax.nn.dot_product_attention`.

    Args:
      bias: added to the logits, broadcastable to `(B, N, T, S)` from the left; -inf excludes.
      mask: Boolean, also broadcastable from the left.
      is_causal: query i attends keys j <= i.
      query_seq_lengths: `(B,)`; output rows beyond the length are 0.
      key_value_seq_lengths: `(B,)`.
      local_window_size: w or (left, right), both inclusive.
      num_heads: N, checked against the shapes if given.
      query_length: T, checked likewise; if no array has the axis T either, the check of the bias
        covers every possible query position.
      emptied_by_bias: `"empty"`: a row whose keys are all excluded, by masks or the bias, counts as
        an empty row; `"refused"` raises, since jax.nn computes such a row differently.

    Raises:
      ValueError: a shape is not allowed, or a bias of -inf excludes every key that the masks allow
        in a row.
      TypeError: the mask is not Boolean, the bias not floating, lengths are not integers.

    >>> import_masks(key_value_seq_lengths=np.array([3, 1]), local_window_size=2)[0]
    Mask(window_size=(2, 2), key_value_lengths=int32[2])
    """
    one_of("emptied_by_bias", emptied_by_bias, ("refused", "empty"))
    values = {
        "bias": floating("bias", bias),
        "mask": mask,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    structure = Mask.causal() if is_causal else Mask()
    if local_window_size is not None:
        structure &= checks.window(local_window_size)
    sizes = {"N": num_heads, "T": query_length}
    return read_call(ARGUMENTS, values, structure, sizes, emptied_by_bias)


def export_masks(
    mask: Mask | AnyArray | None,
    bias: AnyArray | None = None,
    *,
    batch_size: int,
    query_length: int,
    key_length: int,
) -> dict[str, Any]:
    """Exports a mask and a bias as keyword arguments of `jax.nn.dot_product_attention`.

    Causality, window and lengths keep their own arguments; padding and the rest become `mask`.
    Every mask that fits the sizes can be exported.

    Args:
      mask: a `Mask`, a Boolean array broadcastable to BNTS (True = attend), or None.
      bias: broadcastable to BNTS, added to the logits.
      batch_size: B.
      query_length: T.
      key_length: S.

    Raises:
      ValueError, TypeError: a mask or bias does not fit the sizes or has a wrong dtype.

    >>> mask = Mask.causal() & Mask.window(2, None)
    >>> export_masks(mask, batch_size=2, query_length=3, key_length=5)
    {'is_causal': True, 'local_window_size': (2, 5)}
    """
    B, T, S = batch_size, query_length, key_length
    sizes = {"B": B, "T": T, "S": S}
    mask = checked(mask, sizes)
    if bias is not None:
        canonical_bias(bias, sizes)
    arguments: dict[str, Any] = {} if bias is None else {"bias": to_numpy(bias)}
    if is_top_left(mask):
        arguments["is_causal"] = True
        mask = replace(mask, causal_offset=None)
    if mask.window_size is not None:
        left, right = mask.window_size
        # jax.nn has no unbounded window: T and S reach every key.
        arguments["local_window_size"] = (
            T if left is None else left,
            S if right is None else right,
        )
    apart = ["window_size"]
    for role in ("query", "key_value"):
        lengths = getattr(mask, f"{role}_lengths")
        if lengths is not None:
            arguments[f"{role}_seq_lengths"] = np.broadcast_to(lengths, (B,)).astype(np.int32)
            apart.append(f"{role}_lengths")
    array = array_of(mask, T, S, apart)
    if array is not None:
        arguments["mask"] = write(ARGUMENTS[1]._replace(axes=_AXES[1:]), array, {})
    return arguments
