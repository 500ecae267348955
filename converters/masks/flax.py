"""Masks of flax.linen and flax.nnx attention: True (or nonzero) means attend.

Sources: flax/linen/attention.py, flax/nnx/nn/attention.py. Flax reads a mask with three axes as
(N, T, S): it refuses a (B, T, S) mask, or, if B = N, silently reads it per head. A fully masked
row returns the mean of the values. If a bias of -inf excludes every key that the mask
allows, the row returns the mean of the masked values, or NaN if the mask allows every key.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray, to_numpy
from jaxmha.converters.masks.compose import (
    array_of,
    checked,
    floating,
    is_top_left,
    only_mask,
    read_call,
    without_query_lengths,
)
from jaxmha.converters.masks.spec import MaskArg, Masks, canonical_bias, write
from jaxmha.static_checks import one_of

_AXES = ("#S", "#T #S", "#N #T #S", "#B #N #T #S")
ARGUMENTS = (
    MaskArg("mask", _AXES, other="nonzero", empty=(("", "mean"),)),
    MaskArg("bias", _AXES, other="added", empty=(("", "nan"),)),
)


def import_masks(
    *,
    mask: AnyArray | None = None,
    bias: AnyArray | None = None,
    is_causal: bool = False,
    decode: bool = False,
    num_heads: int | None = None,
    query_length: int | None = None,
    emptied_by_bias: Literal["refused", "empty"] = "refused",
) -> Masks:
    """Imports the mask arguments of flax attention.

    Args:
      mask: of `MultiHeadDotProductAttention`, `nnx.MultiHeadAttention` or the functions
        `dot_product_attention`: broadcastable to `(B, N, T, S)` from the left; nonzero attends.
        `make_attention_mask`, `make_causal_mask` and `combine_masks` return such masks.
      bias: only for the functions; added to the logits, -inf excludes.
      is_causal: of nnx; query i attends keys j <= i.
      decode: must be False, because a cache has its own masks.
      num_heads: N, checked against the shapes if given.
      query_length: T, checked likewise; if no array has the axis T either, the check of the bias
        covers every possible query position.
      emptied_by_bias: `"empty"`: a row whose keys are all excluded, by the mask or the bias, counts
        as an empty row; `"refused"` raises, since flax computes such a row differently.

    Raises:
      ValueError: a shape is not allowed; `decode` is set; or a bias of -inf excludes every key that
        the mask allows in a row.
      TypeError: the bias is not floating.

    >>> import_masks(mask=np.ones((2, 1, 3, 5)), is_causal=True)
    (Mask(causal_offset=0, array=bool[2, 1, 3, 5]), None)
    """
    if decode:
        raise ValueError(
            "decode=True: flax masks the cache by its own index, and with is_causal every step "
            "attends key 0 only; export masks of whole sequences, or mask by lengths"
        )
    one_of("emptied_by_bias", emptied_by_bias, ("refused", "empty"))
    bias = floating("bias", bias)
    structure = Mask.causal() if is_causal else Mask()
    values, sizes = {"mask": mask, "bias": bias}, {"N": num_heads, "T": query_length}
    return read_call(ARGUMENTS, values, structure, sizes, emptied_by_bias)


def export_masks(
    mask: Mask | AnyArray | None,
    bias: AnyArray | None = None,
    *,
    query_length: int,
    key_length: int,
    kind: Literal["nnx", "linen"] = "nnx",
    function: bool = False,
) -> dict[str, Any]:
    """Exports a mask and a bias as keyword arguments of flax attention.

    Args:
      mask: a `Mask`, a Boolean array broadcastable to BNTS (True = attend), or None.
      bias: broadcastable to BNTS, added to the logits.
      query_length: T.
      key_length: S.
      kind: the class that is called; linen has no `is_causal`.
      function: True for the function `dot_product_attention`, which has `bias`; layers have none.

    Raises:
      ValueError: a shape does not fit; queries beyond their length; additive values for a layer.

    >>> export_masks(Mask.causal(), query_length=3, key_length=5)
    {'is_causal': True}
    """
    one_of("kind", kind, ("nnx", "linen"))
    T, S = query_length, key_length
    sizes = {"T": T, "S": S}
    mask = without_query_lengths(checked(mask, sizes), T, "flax")
    arguments: dict[str, Any] = {}
    if function and bias is not None:
        canonical_bias(bias, sizes)
        arguments["bias"] = to_numpy(bias)
    else:
        instead = "export with function=True, and use attention_fn=partial(dot_product_attention, bias=bias)"
        mask = only_mask(mask, bias, f"a flax {kind} layer", instead, sizes)
    if kind == "nnx" and is_top_left(mask):
        arguments["is_causal"] = True
        mask = replace(mask, causal_offset=None)
    array = array_of(mask, T, S)
    if array is not None:
        if "is_causal" in arguments:  # the slow path of nnx needs full T and S axes
            array = np.broadcast_to(array, (*array.shape[:2], T, S))
        arguments["mask"] = write(ARGUMENTS[0]._replace(axes=_AXES[1:]), array, {})
    return arguments
