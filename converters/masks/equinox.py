"""Masks of equinox.nn.MultiheadAttention: Boolean, True means attend.

Source: equinox/nn/_attention.py. A layer is called for one batch row, under `jax.vmap` for a
batch: a mask with three axes is (N, T, S), where Keras' is (B, T, S). No axis is broadcast. A fully
masked row returns the mean of the values.
"""

from typing import Any

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray
from jaxmha.converters.masks.compose import array_of, checked, only_mask, without_query_lengths
from jaxmha.converters.masks.spec import MaskArg, Masks, read, write

ARGUMENTS = (MaskArg("mask", ("T S", "N T S"), empty=(("", "mean"),)),)


def import_masks(
    *,
    mask: AnyArray | None = None,
    num_heads: int | None = None,
    query_length: int | None = None,
    key_length: int | None = None,
) -> Masks:
    """Imports the mask of an equinox layer.

    Args:
      mask: Boolean, `(T, S)` or `(N, T, S)`, of one batch row.
      num_heads: N, checked against the shape if given.
      query_length: T, checked likewise.
      key_length: S, checked likewise.

    Returns:
      the mask (None: no condition) and None, since equinox adds nothing to the logits.

    Raises:
      ValueError: the shape is not allowed.
      TypeError: the mask is not Boolean.

    >>> import numpy as np
    >>> import_masks(mask=np.ones((2, 3, 5), bool), num_heads=2)[0]
    Mask(array=bool[1, 2, 3, 5])
    """
    known = {"N": num_heads, "T": query_length, "S": key_length}
    sizes = {letter: size for letter, size in known.items() if size is not None}
    return (None, None) if mask is None else read(ARGUMENTS[0], mask, sizes)


def export_masks(
    mask: Mask | AnyArray | None,
    bias: AnyArray | None = None,
    *,
    num_heads: int,
    query_length: int,
    key_length: int,
) -> dict[str, Any]:
    """Exports a mask as the keyword argument of an equinox layer.

    Args:
      mask: a `Mask`, a Boolean array broadcastable to BNTS (True = attend), or None; the same for
        every batch row.
      bias: of 0 and -inf alone, broadcastable to BNTS.
      num_heads: N.
      query_length: T.
      key_length: S.

    Raises:
      ValueError: a shape does not fit; the mask differs between batch rows; additive values;
        queries beyond their length.

    >>> export_masks(Mask.causal(), num_heads=2, query_length=3, key_length=5)["mask"].shape
    (3, 5)
    """
    sizes = {"N": num_heads, "T": query_length, "S": key_length}
    mask = without_query_lengths(checked(mask, sizes), query_length, "equinox")
    instead = "multiply or add in process_heads, or use jaxmha.equinox.MultiheadAttention, which has bias="
    mask = only_mask(mask, bias, "an equinox layer", instead, sizes)
    array = array_of(mask, query_length, key_length)
    if array is None:
        return {}
    if len(array) > 1:
        raise ValueError(
            f"mask differs between {len(array)} batch rows, and an equinox layer is called for one: "
            "export the mask of every row, stack them, and jax.vmap over inputs and masks"
        )
    return {"mask": write(ARGUMENTS[0], array, sizes)}
