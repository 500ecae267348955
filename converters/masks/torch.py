"""Imports and exports masks of torch.nn.MultiheadAttention and F.multi_head_attention_forward.

True means blocked. The effect of `is_causal` and the output of a fully masked row depend on the
code path that torch takes: `jaxmha.Semantics.torch(path)` describes each.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, overload

import numpy as np
from einops import rearrange

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray, NDArray, to_numpy
from jaxmha.converters.masks.compose import checked, is_top_left, without_query_lengths
from jaxmha.converters.masks.spec import MaskArg, Masks, canonical_bias, exclusions, read, write
from jaxmha.dims import bind
from jaxmha.extras import needed
from jaxmha.mask_arguments import as_mask
from jaxmha.static_checks import one_of

if TYPE_CHECKING:
    import torch

Path: TypeAlias = Literal["weights", "sdpa", "native"]

_EMPTY = (("weights", "nan"), ("sdpa", "zero"), ("native", "nan"))
ATTN_MASK = MaskArg("attn_mask", ("T S", "(B N) T S"), keep=False, other="added", empty=_EMPTY)
KEY_PADDING_MASK = MaskArg(
    "key_padding_mask",
    ("S", "B S"),
    keep=False,
    field="key_value_padding",
    other="added",
    empty=_EMPTY,
)
ARGUMENTS = (ATTN_MASK, KEY_PADDING_MASK)


def import_masks(
    *,
    num_heads: int | None = None,
    attn_mask: AnyArray | None = None,
    key_padding_mask: AnyArray | None = None,
    is_causal: bool = False,
    need_weights: bool = True,
    add_bias_kv: bool = False,
    add_zero_attn: bool = False,
    path: Path | None = None,
) -> Masks:
    """Imports the mask arguments of a call, for `jaxmha.multi_head_attention`.

    Args:
      num_heads: N, needed to split the first axis of a 3-D attn_mask.
      attn_mask: `(T, S)` or `(B*N, T, S)`; Boolean (True = blocked) or added to the logits.
      key_padding_mask: `(B, S)`, or `(S,)` for unbatched inputs; same values as attn_mask.
      is_causal: torch's hint. On the path `sdpa` without a key_padding_mask it *replaces* attn_mask
        by the top-left triangle, which also hides extra positions; otherwise it has no effect.
      need_weights: as in the call; it selects the path `weights` or `sdpa`.
      add_bias_kv: True if the module has `bias_k` and `bias_v`.
      add_zero_attn: True if the module has that flag.
      path: `native` if torch takes its fast path in eval mode (see `path_of`).

    Masks do not depend on `batch_first`, `average_attn_weights`, `use_separate_proj_weight`,
    `static_k` and `static_v`. A mask that torch ignores is checked nevertheless.

    Returns:
      `(mask, bias)`, each None if absent. key_padding_mask becomes padding, an attn_mask that is a
      triangle becomes causal if `is_causal`, and floats of only 0 and -inf become a mask.

    Raises:
      ValueError: a shape does not fit; torch refuses `is_causal` without attn_mask; or torch does
        not take its native path with these arguments.
      TypeError: a mask is neither Boolean nor floating.

    Source: `torch/nn/functional.py`, `torch/nn/modules/activation.py`.

    >>> blocked = np.triu(np.ones((3, 3), bool), 1)
    >>> mask, bias = import_masks(attn_mask=blocked, is_causal=True)
    >>> mask.causal_offset, mask.array, bias
    (0, None, None)
    """
    one_of("path", path, (None, "weights", "sdpa", "native"))
    path = path or ("weights" if need_weights else "sdpa")
    sizes: dict[str, int] = {} if num_heads is None else {"N": num_heads}
    padding, padding_bias = _read(KEY_PADDING_MASK, key_padding_mask, sizes)
    unbatched = key_padding_mask is not None and "B" not in sizes
    if unbatched:
        sizes["B"] = 1
    mask, bias = _read(ATTN_MASK, attn_mask, sizes)
    extra = int(add_bias_kv) + int(add_zero_attn)
    if path == "native":
        given = [array for array in (attn_mask, key_padding_mask) if array is not None]
        floating = any(to_numpy(array).dtype != np.bool_ for array in given)
        _refuse_native(sizes, floating=floating, unbatched=unbatched, extra=extra)
    elif is_causal and attn_mask is None:
        raise ValueError(
            "torch refuses is_causal=True without attn_mask: pass the triangle to both, or give "
            "jaxmha Mask.causal() yourself"
        )
    if is_causal and attn_mask is not None:
        T, S = sizes["T"], sizes["S"]
        if path == "sdpa" and key_padding_mask is None:
            triangle = Mask.dense(np.tri(T, S + extra, dtype=bool)[None, None])
            return (triangle if extra else Mask.causal()), None
        mask = _as_causal(mask, T, S)
    return _joined((mask, bias), (padding, padding_bias))


def _joined(a: Masks, b: Masks) -> Masks:
    """Joins two pairs of mask and bias: both masks must allow a key, and biases are added."""
    masks = [mask for mask, _ in (a, b) if mask is not None]
    biases = [bias for _, bias in (a, b) if bias is not None]
    return (reduce(and_, masks) if masks else None), (reduce(_sum, biases) if biases else None)


def export_masks(
    mask: Mask | AnyArray | None = None,
    bias: AnyArray | None = None,
    *,
    num_heads: int,
    query_length: int,
    key_length: int,
    batch_size: int | None = None,
    add_bias_kv: bool = False,
    add_zero_attn: bool = False,
) -> dict[str, Any]:
    """Exports a mask and a bias as `attn_mask`, `key_padding_mask` and `is_causal`.

    The arguments have the same meaning on every path. Key padding and key lengths become
    `key_padding_mask`, the rest `attn_mask`. If one of them adds values, both are floating, as
    torch requires.

    Args:
      mask: a `Mask`, or a Boolean array broadcastable to `(B, N, T, S)`, True = attend.
      bias: added to the logits; same shapes as the mask.
      num_heads, query_length, key_length: N, T, S.
      batch_size: B; None means that the inputs have no batch axis.
      add_bias_kv, add_zero_attn: as in the module; its extra positions follow the S given keys.

    Raises:
      ValueError: torch cannot express the mask; the message says why, and names the closest option.

    >>> export_masks(Mask.causal(), num_heads=2, query_length=2, key_length=2)
    {'attn_mask': array([[False,  True], [False, False]]), 'is_causal': True}
    """
    batch = () if batch_size is None else (batch_size,)
    sizes = {"B": math.prod(batch), "N": num_heads, "T": query_length, "S": key_length}
    T, S, extra = query_length, key_length, int(add_bias_kv) + int(add_zero_attn)
    mask = as_mask(
        cast("Mask | NDArray | None", mask)
    )  # at run time `Mask.dense` refuses other types
    if bias is None and extra and _is_triangle(mask, T, S + extra):
        return {"attn_mask": ~np.tri(T, S, dtype=bool), "is_causal": True, "need_weights": False}
    if mask.array is not None:
        array = _without_extras("mask", to_numpy(mask.array), S, extra)
        mask = replace(mask, array=array)
    mask = without_query_lengths(checked(mask, sizes), T, "torch")
    if mask.query_padding is not None and extra:
        raise ValueError(
            "mask has query padding, and in torch the extra positions stay visible to those "
            "rows: drop it and ignore those rows of the output"
        )
    keys = Mask(key_value_lengths=mask.key_value_lengths, key_value_padding=mask.key_value_padding)
    rest = replace(mask, key_value_lengths=None, key_value_padding=None)
    found: dict[str, NDArray] = {}
    if not rest.empty:
        found["attn_mask"] = to_numpy(rest.to_array(T, S, np))
    if not keys.empty:
        found["key_padding_mask"] = to_numpy(keys.to_array(1, S, np))[:, 0, 0]
    if bias is not None:
        found = _with_bias(
            found, canonical_bias(_without_extras("bias", to_numpy(bias), S, extra), sizes)
        )
    padding = KEY_PADDING_MASK._replace(axes=("B S",) if batch else ("S",))
    arguments: dict[str, Any] = {
        argument.name: write(argument, found[argument.name], sizes)
        for argument in (ATTN_MASK, padding)
        if argument.name in found
    }
    alone = list(arguments) == ["attn_mask"] and bias is None and not extra
    if alone and is_top_left(rest) and replace(rest, causal_offset=None).empty:
        arguments["is_causal"] = True
    return arguments


def _with_bias(found: dict[str, NDArray], bias: NDArray) -> dict[str, NDArray]:
    """Converts the masks to floats, and adds the bias to the mask that has its axes."""
    found = {name: _additive(array, bias.dtype) for name, array in found.items()}
    of_keys = bias.shape[1:3] == (1, 1)
    name, bias = ("key_padding_mask", bias[:, 0, 0]) if of_keys else ("attn_mask", bias)
    return found | {name: _sum(found[name], bias) if name in found else bias}


@overload
def path_of(
    module: "torch.nn.MultiheadAttention",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    *,
    attn_mask: "torch.Tensor | None" = None,
    key_padding_mask: "torch.Tensor | None" = None,
    need_weights: bool = True,
    why: Literal[False] = False,
) -> Path: ...


@overload
def path_of(
    module: "torch.nn.MultiheadAttention",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    *,
    attn_mask: "torch.Tensor | None" = None,
    key_padding_mask: "torch.Tensor | None" = None,
    need_weights: bool = True,
    why: Literal[True],
) -> tuple[Path, str]: ...


def path_of(
    module: "torch.nn.MultiheadAttention",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    *,
    attn_mask: "torch.Tensor | None" = None,
    key_padding_mask: "torch.Tensor | None" = None,
    need_weights: bool = True,
    why: bool = False,
) -> Path | tuple[Path, str]:
    """The code path that a `torch.nn.MultiheadAttention` takes with these tensors.

    It depends on the mode (train or eval), on whether gradients are recorded, and on the arguments.
    `why=True` also returns the reason.

    >>> import torch
    >>> module, x = torch.nn.MultiheadAttention(6, 2, batch_first=True), torch.ones(3, 5, 6)
    >>> path_of(module, x, x, x, need_weights=False, why=True)
    ('sdpa', 'the module is in training mode, and need_weights is False')
    >>> with torch.no_grad():
    ...     path_of(module.eval(), x, x, x, need_weights=False)
    'native'
    """
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    off = next(_off_native(module, query, key, value, masks), "")
    path: Path = "weights" if need_weights else "sdpa"
    if not off:
        path, reason = "native", "nothing keeps it off torch's fast path"
    else:
        reason = f"{off}, and need_weights is {need_weights}"
    return (path, reason) if why else path


def _off_native(
    module: "torch.nn.MultiheadAttention",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    masks: Sequence["torch.Tensor"],
) -> Iterator[str]:
    """Yields reasons why a call does not take the fast path, the most useful first."""
    with needed("torch"):
        import torch

    tensors = (query, *module.parameters())
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    packed = module.in_proj_weight is not None
    checks = {
        "torch.backends.mha.set_fastpath_enabled(False) was called": (
            not torch.backends.mha.get_fastpath_enabled()
        ),
        "the module is in training mode": module.training,
        "gradients are recorded": recorded,
        "query, key and value are not one tensor": not (query is key is value),
        "the input has no batch axis": query.dim() != 3,
        "the module has batch_first=False": not module.batch_first,
        "the number of heads is odd": module.num_heads % 2 == 1,
        "the projections are not packed (kdim or vdim differs)": not packed,
        "the module has no biases": module.in_proj_bias is None,
        "weights and input have different dtypes": packed
        and module.in_proj_weight.dtype != query.dtype,
        "the module has bias_k and bias_v": module.bias_k is not None or module.bias_v is not None,
        "the module has add_zero_attn=True": module.add_zero_attn,
        "a mask is additive": any(mask.is_floating_point() for mask in masks),
        "autocast is on": torch.is_autocast_enabled(),
    }
    yield from (reason for reason, holds in checks.items() if holds)


def static_heads(static: AnyArray, num_heads: int) -> NDArray:
    """`static_k` or `static_v`, `(B*N, S, H)`, as `(B, S, N, H)` of `dot_product_attention`.

    >>> static_heads(np.ones((6, 5, 4)), 3).shape
    (2, 5, 3, 4)
    """
    sizes = {"N": num_heads}
    array = to_numpy(static)
    bind("static_k or static_v", array.shape, "(B N) S H", sizes)
    return to_numpy(rearrange(array, "(B N) S H -> B S N H", N=num_heads))


def _read(argument: MaskArg, value: AnyArray | None, sizes: dict[str, int]) -> Masks:
    """Imports one argument; floats of only 0 and -inf become a Boolean mask."""
    if value is None:
        return None, None
    mask, bias = read(argument, value, sizes)
    allowed = None if bias is None else exclusions(bias)
    if allowed is None:
        return mask, bias
    if argument is KEY_PADDING_MASK:
        return Mask.padding(key_value=allowed[:, 0, 0]), None
    return Mask.dense(allowed), None


def _as_causal(mask: Mask | None, T: int, S: int) -> Mask | None:
    """Replaces a triangle, from the top-left or bottom-right corner, by a causal `Mask`."""
    for offset in (0, S - T):
        if mask is not None and np.all(mask.array == np.tri(T, S, offset, dtype=bool)):
            return Mask.causal(offset)
    return mask


def _is_triangle(mask: Mask, T: int, S: int) -> bool:
    """True if the mask has only the field `array`, and this is the top-left triangle over S keys."""
    array = mask.array
    if array is None or not replace(mask, array=None).empty or array.shape[-2:] != (T, S):
        return False
    return bool(np.all(to_numpy(array) == np.tri(T, S, dtype=bool)))


def _additive(allowed: NDArray, dtype: np.dtype[Any]) -> NDArray:
    return np.where(allowed, 0.0, -np.inf).astype(dtype)


def _sum(a: NDArray, b: NDArray) -> NDArray:
    """The sum as torch computes it: two finite constants may overflow to -inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        summed: NDArray = a + b
    return summed


def _without_extras(name: str, array: NDArray, S: int, extra: int) -> NDArray:
    """Drops the last `extra` of S + `extra` keys; raises ValueError if the array changes them."""
    if not extra or array.ndim == 0 or array.shape[-1] != S + extra:
        return array
    untouched = array[..., S:] if array.dtype == np.bool_ else array[..., S:] == 0
    if not untouched.all():
        raise ValueError(
            f"{name} decides about the {extra} extra positions, which torch's masks cannot: they "
            "are visible to every query. Give one that ends in S, or make them S + extra given "
            "keys of a module without add_bias_kv and add_zero_attn"
        )
    return array[..., :S]


def _refuse_native(sizes: dict[str, int], *, floating: bool, unbatched: bool, extra: int) -> None:
    reasons = {
        "a mask is floating": floating,
        "inputs are unbatched": unbatched,
        "there are extra positions (add_bias_kv, add_zero_attn)": extra > 0,
        "num_heads is odd": sizes.get("N", 0) % 2 == 1,
        "T differs from S": sizes.get("T") not in (None, sizes.get("S")),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"torch does not take its native path where {reason}: leave path to need_weights"
            )
