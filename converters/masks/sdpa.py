"""Imports and exports masks of torch.nn.functional.scaled_dot_product_attention.

True means attend, the opposite of torch.nn.MultiheadAttention. Queries are `(B, N, T, H)`.
`enable_gqa` needs no conversion: query head n reads key/value head `n // (N // K)` in torch and in
jaxmha. A fully masked row is 0: `jaxmha.Semantics.torch_sdpa()`.
"""

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray, NDArray, to_numpy
from jaxmha.converters.masks.compose import checked, is_top_left
from jaxmha.converters.masks.spec import MaskArg, Masks, canonical_bias, exclusions, read, write
from jaxmha.static_checks import one_of

ATTN_MASK = MaskArg(
    "attn_mask", ("#T #S", "#N #T #S", "#B #N #T #S"), other="added", empty=(("", "zero"),)
)
ARGUMENTS = (ATTN_MASK,)


def import_masks(
    *,
    attn_mask: AnyArray | None = None,
    is_causal: bool = False,
    num_heads: int | None = None,
    kernel: Literal["flash", "math"] = "flash",
) -> Masks:
    """Imports the mask arguments of a call, for `jaxmha.dot_product_attention`.

    Args:
      attn_mask: Boolean (True = attend) or added to the logits; `(T, S)`, `(N, T, S)` or
        `(B, N, T, S)`, each axis of full size or 1; or a `CausalBias` of torch.
      is_causal: query i attends keys j <= i (top-left).
      num_heads: N, to check the shape.
      kernel: torch's backend. The documentation forbids attn_mask together with `is_causal`.
        `flash`, the default on CPU, applies both; `math` refuses. Torch uses `math` for a mask with
        3 axes or with a gradient, for dropout, for value heads of another width, and if
        `sdpa_kernel` selects it.

    Returns:
      `(mask, bias)`, each None if absent; floats of only 0 and -inf become a mask.

    Raises:
      ValueError: a shape does not fit, or the kernel refuses. TypeError: an integer mask.

    >>> mask, bias = import_masks(attn_mask=np.array([[True, False]]), is_causal=True)
    >>> mask.causal_offset, mask.array.tolist(), bias
    (0, [[[[True, False]]]], None)
    """
    one_of("kernel", kernel, ("flash", "math"))
    mask = bias = None
    if (causal := causal_bias(attn_mask)) is not None:
        if is_causal:
            raise ValueError("torch refuses a CausalBias with is_causal=True: leave is_causal out")
        return Mask.causal(causal[0]), None
    if attn_mask is not None:
        attn_mask = to_numpy(attn_mask, "attn_mask")
        if is_causal and (kernel == "math" or attn_mask.ndim == 3):
            raise ValueError(
                "torch's math kernel, which alone takes a mask of 3 axes, refuses attn_mask with "
                "is_causal=True: pass one mask that is both, or kernel='flash' and a mask of 2 or "
                "4 axes, to which it applies both"
            )
        mask, bias = read(ATTN_MASK, attn_mask, {} if num_heads is None else {"N": num_heads})
        allowed = None if bias is None else exclusions(bias)
        if allowed is not None:
            mask, bias = Mask.dense(allowed), None
    if is_causal:
        mask = Mask.causal() if mask is None else mask & Mask.causal()
    return mask, bias


def causal_bias(attn_mask: object) -> tuple[int, NDArray] | None:
    """Offset and array of a `torch.nn.attention.bias.CausalBias`, Boolean `(T, S)`, True = attend;
    None for anything else.

    A `CausalBias` is a tensor whose memory is never written. `scaled_dot_product_attention` reads
    its sizes and its variant instead.
    """
    module = "torch.nn.attention.bias"
    if not any(base.__module__ == module for base in type(attn_mask).__mro__):
        return None
    bias: Any = attn_mask
    T, S = bias.seq_len_q, bias.seq_len_kv
    offset = S - T if bias.variant.name == "LOWER_RIGHT" else 0
    return offset, np.tri(T, S, offset, dtype=bool)


def export_masks(
    mask: Mask | AnyArray | None = None,
    bias: AnyArray | None = None,
    *,
    num_heads: int,
    query_length: int,
    key_length: int,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Exports a mask and a bias as `attn_mask` and `is_causal`, with one meaning in every kernel.

    Args:
      mask: a `Mask`, or a Boolean array broadcastable to `(B, N, T, S)`, True = attend.
      bias: added to the logits; same shapes as the mask.
      num_heads, query_length, key_length: N, T, S.
      batch_size: B; None means that queries are `(N, T, H)`.

    Raises:
      ValueError, TypeError: a mask or bias does not fit the sizes or has a wrong dtype.

    >>> export_masks(Mask.causal(), num_heads=2, query_length=3, key_length=5)
    {'is_causal': True}
    >>> lengths = Mask.lengths(key_value=np.array([3, 2]))
    >>> export_masks(lengths, num_heads=2, query_length=3, key_length=5, batch_size=2)[
    ...     "attn_mask"
    ... ].shape
    (2, 1, 3, 5)
    """
    batch = () if batch_size is None else (batch_size,)
    sizes = {"B": math.prod(batch), "N": num_heads, "T": query_length, "S": key_length}
    mask = checked(mask, sizes)
    if bias is None and mask.empty:
        return {}
    if bias is None and is_top_left(mask) and replace(mask, causal_offset=None).empty:
        return {"is_causal": True}
    array = None if mask.empty else to_numpy(mask.to_array(query_length, key_length, np))
    if bias is not None:
        added = canonical_bias(bias, sizes)
        low = np.asarray(-np.inf, added.dtype)
        array = added if array is None else np.where(array, added, low)
    assert array is not None
    return {"attn_mask": write(ATTN_MASK, array, sizes)}
