"""Masks of Hugging Face transformers: (B, S) of 1 and 0, or (B, N, T, S), additive or Boolean.

Source: transformers/masking_utils.py; https://huggingface.co/docs/transformers, "attention_mask".
A (B, S) mask attends at 1. Floats in four axes are added to the logits: 0 attends, and the smallest
finite number of the dtype blocks. Booleans in four axes attend at True under `sdpa`; `eager` adds
True as 1. A fully masked row is the mean of the values if numbers are added, and 0 under `sdpa`
for a mask of two axes or a Boolean one.
"""

from dataclasses import replace
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jaxmha import Mask
from jaxmha.arrays import to_dtype
from jaxmha.converters.layout.arrays import AnyArray, NDArray, to_numpy
from jaxmha.converters.masks.aligned import aligned_window
from jaxmha.converters.masks.compose import array_of, checked, padding_of, without_query_lengths
from jaxmha.converters.masks.spec import MaskArg, Masks, canonical_bias, exclusions, read
from jaxmha.integers import require_sizes
from jaxmha.static_checks import one_of

PADDING = MaskArg(
    "attention_mask",
    ("#B S",),
    field="key_value_padding",
    other="nonzero",
    empty=(("eager", "mean"), ("sdpa", "zero")),
)
SCORES = MaskArg(
    "attention_mask",
    ("#B #N #T #S",),
    other="added",
    empty=(("floats", "mean"), ("Booleans under sdpa", "zero")),
)
ARGUMENTS = (PADDING, SCORES)

# Values that block a pair: the smallest finite number of any dtype, since masks may have been cast.
_CONSTANTS = tuple(
    float(ml_dtypes.finfo(dtype).min)  # type: ignore[no-untyped-call]
    for dtype in ("float16", "bfloat16", "float32", "float64")
)


def import_masks(
    *,
    attention_mask: AnyArray | None = None,
    is_causal: bool = False,
    query_length: int | None = None,
    key_length: int | None = None,
    attn_implementation: Literal["eager", "sdpa"] | None = None,
    num_heads: int | None = None,
    sliding_window: int | None = None,
) -> Masks:
    """Imports the attention_mask of a transformers model.

    Args:
      attention_mask: `(B, S)`, 1 or True attends; or `(B, N, T, S)`: floats are added to the
        logits, and under `"sdpa"` True attends.
      is_causal: the model is causal (a decoder): it adds a causal mask to a mask of two axes, the
        last query aligned to the last key. It does not change a mask of four axes.
      query_length: T, for a causal model whose keys begin with a cache; default S.
      key_length: S including cached keys; required with query_length if there is no mask, and
        checked against the mask if there is one.
      attn_implementation: from the model's config.
      num_heads: N, checked against the shape if given.
      sliding_window: from the config, for the layers of a causal model that have a window; w allows
        i - j < w. It does not change a mask of four axes. A model may have layers of several kinds,
        or chunks instead: `jaxmha.converters.masks_of` reads the mask of each layer.

    Returns:
      the mask and the bias. A pair that holds the smallest number of its dtype, or -inf, is
      excluded; this is exact if the row has another key. A fully masked row is the mean of the
      values: evaluate with `fully_masked="mean"` to reproduce it. If such a row mixes constants,
      transformers averages only over the largest; then the mask is None and all values are bias.

    Raises:
      ValueError: a shape is not allowed; a (B, S) mask holds numbers other than 0 and 1; or the
        model is causal and T is given without S; or it has a window and is not causal.
      TypeError: integers in four axes, or Booleans unless under `"sdpa"`.

    >>> import_masks(attention_mask=np.array([[1, 1, 0]]), is_causal=True)[0]
    Mask(causal_offset=0, key_value_padding=bool[1, 3])
    """
    given = {"N": num_heads, "T": query_length, "S": key_length}
    sizes = {letter: size for letter, size in given.items() if size is not None}
    array = None if attention_mask is None else to_numpy(attention_mask)
    if array is not None and array.ndim != 2:
        if array.dtype == np.bool_ and array.ndim == 4 and attn_implementation != "sdpa":
            raise TypeError(
                "attention_mask of four axes is Boolean: True attends under attn_implementation="
                "'sdpa' (say so if it is), and under 'eager' it is added to the logits as 1, which "
                "masks nothing; pass np.where(mask, 0, np.finfo(dtype).min)"
            )
        mask, bias = read(SCORES, array, sizes)
        return (mask, None) if bias is None else _additive(bias)
    keys = key_length if array is None else array.shape[1]
    structure = _own(is_causal, sliding_window, query_length, keys)
    if array is not None:
        if not np.all((array == 0) | (array == 1)):
            raise ValueError(
                "attention_mask of axes (B, S) must hold 1 (attend) and 0, since what other numbers "
                f"mean differs between versions, got {array.dtype} with others: an additive mask "
                "has four axes, as mask[:, None, None, :]"
            )
        read_mask, _ = read(PADDING, array, sizes)
        structure = structure if read_mask is None else structure & read_mask
    return (None if structure.empty else structure), None


def _own(is_causal: bool, sliding_window: int | None, T: int | None, S: int | None) -> Mask:
    """The mask that a model adds to one of two axes, the last query aligned to the last key."""
    if not is_causal:
        if sliding_window is not None:
            raise ValueError(
                f"sliding_window={sliding_window} is of a causal model, and is_causal=False: pass "
                "is_causal=True, or join Mask.window(left, right) of the model to the mask"
            )
        return Mask()
    if S is None and T is not None:
        raise ValueError(
            f"a causal model with query_length={T} and no attention_mask: without key_length=, the "
            "number of keys with those in the cache, the offset of the triangle is unknown; give "
            "key_length (query_length again if there is no cache)"
        )
    T, S = (0, 0) if T is None or S is None else (T, S)
    causal = Mask.causal(S - T)
    if sliding_window is None:
        return causal
    require_sizes(least=1, sliding_window=sliding_window)
    return causal & aligned_window(sliding_window - 1, None, T, S)


def _additive(bias: NDArray) -> Masks:
    """Splits additive values: blocking constants become a mask, the rest stays a bias."""
    blocked = np.isin(bias.astype(np.float64), _CONSTANTS) | np.isneginf(bias)
    lowest = np.where(blocked, bias, 0).min(-1, keepdims=True, initial=0)
    uneven = blocked.all(-1, keepdims=True) & (bias != lowest)
    if uneven.any():
        return None, bias
    rest = np.where(blocked, np.zeros((), bias.dtype), bias)
    return (Mask.dense(~blocked) if blocked.any() else None), (rest if rest.any() else None)


def export_masks(
    mask: Mask | AnyArray | None,
    bias: AnyArray | None = None,
    *,
    batch_size: int,
    query_length: int,
    key_length: int,
    is_causal: bool = False,
    form: Literal["auto", "padding", "scores"] = "auto",
    dtype: DTypeLike = np.float32,
    sliding_window: int | None = None,
) -> dict[str, Any]:
    """Exports a mask and a bias as the attention_mask of a transformers model.

    Args:
      mask: a `Mask`, a Boolean array broadcastable to BNTS (True = attend), or None.
      bias: broadcastable to BNTS.
      batch_size: B.
      query_length: T.
      key_length: S.
      is_causal: the model is causal and adds a causal mask to a mask of two axes. To import the
        result again, pass the same query_length and key_length.
      form: `"padding"` for `(B, S)` integers; `"scores"` for `(B, #N, T, S)` of 0 and the smallest
        number of the dtype, plus the bias; `"auto"` for the first form that can hold the mask.
      dtype: the dtype of the model.
      sliding_window: as in `import_masks`. A mask without this window gets the form `"scores"`.

    Raises:
      ValueError: form `"padding"` and the mask is more than padding; a causal model and a mask that
        fits two axes but is not causal; a window without a causal model; queries beyond their
        length; a finite bias outside the range of the dtype (-inf is an exclusion, and becomes the smallest number).

    >>> mask = Mask.lengths(key_value=np.array([1, 3]))
    >>> export_masks(mask, batch_size=2, query_length=3, key_length=3)["attention_mask"].tolist()
    [[1, 0, 0], [1, 1, 1]]
    """
    one_of("form", form, ("auto", "padding", "scores"))
    if not jnp.issubdtype(to_dtype(dtype), np.floating):
        raise TypeError(f"dtype must be the floating dtype of the model, got {to_dtype(dtype)}")
    B, T, S = batch_size, query_length, key_length
    sizes = {"B": B, "T": T, "S": S}
    mask = without_query_lengths(checked(mask, sizes), T, "transformers")
    wide = None if bias is None else canonical_bias(bias, sizes)
    kept = None if wide is None else exclusions(wide)
    if kept is not None:
        mask, wide = mask & Mask(array=kept), None
    added = None if wide is None else _narrow(wide, to_dtype(dtype))
    pairs = replace(mask, key_value_padding=None, key_value_lengths=None)
    own = _own(is_causal, sliding_window, T, S)
    if form != "scores" and added is None and (pairs == own or _same_pairs(pairs, own, T, S)):
        valid = padding_of(mask, "key_value", S)
        if valid is None:
            return {}
        return {"attention_mask": np.broadcast_to(valid, (B, S)).astype(np.int64)}
    if form == "padding":
        raise ValueError(
            "attention_mask of axes (B, S) holds padding of keys"
            f"{' next to causal attention aligned to the last key' if is_causal else ''}, and this "
            "mask holds more: use form='scores'"
        )
    scores = _scores(array_of(mask, T, S), added, to_dtype(dtype))
    return {"attention_mask": np.array(np.broadcast_to(scores, (B, scores.shape[1], T, S)))}


def _same_pairs(one: Mask, other: Mask, T: int, S: int) -> bool:
    """True if two masks allow the same pairs of T queries and S keys."""
    return bool(np.all(one.to_array(T, S, np) == other.to_array(T, S, np)))


def _scores(allowed: NDArray | None, added: NDArray | None, dtype: np.dtype[Any]) -> NDArray:
    """Additive values of four axes: the smallest number of the dtype blocks."""
    scores = np.zeros((1, 1, 1, 1), dtype) if added is None else added
    lowest = np.asarray(ml_dtypes.finfo(dtype).min, dtype)  # type: ignore[no-untyped-call]
    scores = np.where(np.isneginf(scores), lowest, scores)
    return scores if allowed is None else np.where(allowed, scores, lowest)


def _narrow(bias: NDArray, dtype: np.dtype[Any]) -> NDArray:
    """Casts the bias to `dtype`, -inf unchanged; raises ValueError if a finite value overflows."""
    with np.errstate(over="ignore"):
        narrow: NDArray = bias.astype(dtype)
    lost = np.isfinite(bias) & ~np.isfinite(narrow)
    if lost.any():
        low, high = (float(end(bias[lost])) for end in (np.min, np.max))
        raise ValueError(
            f"bias holds finite values that {dtype} cannot, from {low:.3g} to {high:.3g}: if they "
            "stand for exclusion pass them as -inf or a Boolean mask, else export in a wider dtype"
        )
    return narrow
