"""Finds suspicious mask arguments of a call, and explains each with a remedy."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import numpy as np

from jaxmha import Mask, dot_product_attention, multi_head_attention
from jaxmha.checks import is_flags
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.layout.base import guess
from jaxmha.converters.masks.compose import checked
from jaxmha.converters.masks.lint_rules import CHECKS, Finding, blocked_by, given
from jaxmha.converters.masks.sdpa import causal_bias
from jaxmha.converters.masks.spec import MaskArg

FRAMEWORKS = ("jaxmha", "torch", "sdpa", "keras", "flax", "jax", "huggingface")
SIZES = {"B": "batch_size", "N": "num_heads", "T": "query_length", "S": "key_length"}
# Arguments that stand for a mask and hold no array.
FLAGS = {"is_causal", "use_causal_mask", "decode", "local_window_size", "sliding_window"}
# Arguments of each framework's call that do not concern masks.
OTHERS: dict[str, str] = {
    "jaxmha": " ".join(
        name
        for call in (dot_product_attention, multi_head_attention)
        for name in signature(call).parameters
    ),
    "torch": "query key value average_attn_weights",
    "sdpa": "query key value dropout_p scale enable_gqa",
    "keras": "query value key return_attention_scores training",
    "flax": "inputs_q inputs_k inputs_v inputs_kv query key value deterministic dropout_rng rngs "
    "sow_weights dropout_rate broadcast_dropout precision module force_fp32_for_softmax "
    "einsum_dot_general qk_attn_weights_einsum attn_weights_value_einsum promote_dtype einsum",
    "jax": "query key value scale implementation return_residual",
    "huggingface": "input_ids inputs_embeds token_type_ids position_ids past_key_values "
    "hidden_states cache_position use_cache labels output_attentions output_hidden_states "
    "return_dict logits_to_keep position_embeddings",
}


def findings(
    framework: str, arguments: dict[str, Any], sizes: Mapping[str, int], dtype: object = None
) -> list[Finding]:
    """Returns the findings of `jaxmha.converters.lint_masks`; `sizes`: B, N, T, S as far as known.

    >>> [finding.name for finding in findings("torch", {"key_padding_mask": np.eye(2) > 0}, {})]
    []
    """
    if framework not in FRAMEWORKS:
        meant = guess(str(framework), FRAMEWORKS).strip()
        raise ValueError(
            f"framework must be one of {FRAMEWORKS}, got {framework!r}{': ' * bool(meant)}{meant}"
        )
    arguments = _of_masks(framework, arguments)
    if framework == "sdpa" and (causal := causal_bias(arguments.get("attn_mask"))) is not None:
        arguments["attn_mask"] = causal[1]
    table: tuple[MaskArg, ...] = _module(framework).ARGUMENTS
    mask, made_of = arguments.pop("mask", None), None
    if isinstance(mask, Mask):
        try:
            made_of = checked(mask, sizes)
        except ValueError as error:
            return [_refused("mask", error)]
    array = mask if made_of is None else _array_of(made_of, sizes)
    arguments |= {} if array is None else {"mask": array}
    found: list[Finding] = []
    for argument in table:
        value = arguments.get(argument.name)
        source = made_of if argument.name == "mask" else None
        if value is None:
            continue
        if (
            read := given(argument, to_numpy(value, argument.name), sizes, dtype, source)
        ) is not None:
            found += [finding for check in CHECKS if (finding := check(read)) is not None]
    found += _is_causal(framework, arguments)
    found += _row_to_head(framework, arguments, sizes)
    found += _outside(arguments, made_of, sizes)
    if framework == "jaxmha" and (numbers := _numbers(arguments.get("mask"))) is not None:
        found.append(numbers)
        arguments.pop("mask")
    if made_of is not None:
        # Only the Mask, not its array, shows which queries are padding.
        arguments.pop("mask", None)
    found += _whole(framework, arguments, made_of, sizes, {finding.name for finding in found})
    return found


def _module(framework: str) -> ModuleType:
    name = {"jaxmha": "jax"}.get(framework, framework)  # jaxmha takes the arguments of jax.nn
    return import_module(f"jaxmha.converters.masks.{name}")


def _array_of(mask: Mask, sizes: Mapping[str, int]) -> NDArray | None:
    """The allowed pairs of a mask, without leading axes of size 1; None if S is not known."""
    mask = replace(mask, query_padding=None, query_lengths=None)  # padded rows may be empty
    T, S = _lengths(mask, None, sizes)
    if S is None:
        return None
    array = np.asarray(mask.to_array(T, S, np))
    while array.ndim > 2 and len(array) == 1:
        array = array[0]
    return array


def _of_masks(framework: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `import_masks` takes; TypeError for one that the framework lacks."""
    taken = signature(_module(framework).import_masks).parameters
    others = OTHERS[framework].split()
    of_masks = sorted({row.name for row in _module(framework).ARGUMENTS} | (taken.keys() & FLAGS))
    for name in arguments:
        if name not in taken and name not in others:
            raise TypeError(
                f"{framework} has no argument {name!r}: its mask arguments are "
                f"{', '.join(of_masks)}; leave out those of other calls"
            )
    return {name: value for name, value in arguments.items() if name in taken}


def _is_causal(framework: str, arguments: Mapping[str, Any]) -> Iterator[Finding]:
    name = "is_causal"
    what, fix = "", "Leave is_causal out, and put the triangle into the mask if it is wanted"
    mask = arguments.get("attention_mask" if framework == "huggingface" else "attn_mask")
    array = None if mask is None else to_numpy(mask)
    if not arguments.get(name):
        return
    if framework == "flax" and arguments.get("decode"):
        what, fix = "with decode every step attends key 0 only", "Leave is_causal out in decoding"
    elif framework == "sdpa" and array is not None:
        what = "together with attn_mask, one kernel applies both and another refuses the call"
    elif framework == "huggingface" and array is not None and array.ndim == 4:
        kept = array if array.dtype == np.bool_ else ~blocked_by(array)
        T, S = array.shape[2:]
        if S > 1 and (T == 1 or not (kept & ~np.tri(T, S, S - T, dtype=bool)).any()):
            return
        what = "a causal model leaves a mask of four axes as it is, and this one shows the future"
    elif framework == "torch" and array is None:
        what = (
            "without attn_mask torch refuses it, or ignores it on the fast path of eval: then "
            "nothing is causal"
        )
        fix = "Pass the triangle as attn_mask too"
    elif framework == "torch" and array is not None:
        blocked = array if array.dtype == np.bool_ else array == -np.inf
        triangle = bool((blocked == (np.tri(*blocked.shape[-2:]) == 0)).all())
        fused = arguments.get("need_weights", True) is False
        fused &= arguments.get("key_padding_mask") is None
        extras = arguments.get("add_bias_kv") or arguments.get("add_zero_attn")
        if fused and extras:
            what = (
                "torch's own triangle replaces attn_mask, and hides the positions of bias_k and "
                "add_zero_attn too, which attn_mask leaves visible"
            )
            fix = "Leave is_causal out, so that attn_mask alone counts"
        elif not triangle and fused:
            what = "torch drops the attn_mask given and uses the top-left triangle"
        elif not triangle:
            what = "torch ignores it, since an attn_mask that is not the triangle is given"
    if what:
        yield Finding(name, name, what, fix)


def _outside(
    arguments: Mapping[str, Any], conditions: Mask | None, sizes: Mapping[str, int]
) -> Iterator[Finding]:
    """Finds lengths below 0 or beyond the axis, in arguments of jax.nn and in a `Mask`."""
    for letter, role in (("T", "query"), ("S", "key_value")):
        values = {
            f"{role}_seq_lengths": arguments.get(f"{role}_seq_lengths"),
            "mask": getattr(conditions, f"{role}_lengths", None),
        }
        for name, value in values.items():
            if value is None:
                continue
            lengths = np.atleast_1d(to_numpy(value, name))
            rows = np.argwhere((lengths < 0) | (lengths > sizes.get(letter, np.inf)))
            if len(rows):
                limit = f"{letter}={sizes[letter]}" if letter in sizes else letter
                yield Finding(
                    "lengths",
                    name,
                    f"{len(rows)} of {lengths.size} lengths are outside [0, {limit}], the first "
                    f"{lengths[tuple(rows[0])]} in batch row {rows[0][0]}: it counts as the nearer end",
                    "Count valid positions of this call's arrays, within the length of their axis",
                )


def _numbers(mask: Any) -> Finding | None:
    """A mask of numbers: functions of jaxmha refuse it, and modules take those of at least 0."""
    array = None if mask is None else to_numpy(mask)
    if array is None or array.dtype == np.bool_:
        return None
    if is_flags(array):
        what = "modules of Flax and Haiku, and attention_fn, take it: there nonzero attends"
        fix = "Pass `mask != 0`, which both take"
    else:
        what = (
            "modules of Flax and Haiku, and attention_fn, refuse it too where its values are known, "
            "since they would invert an additive mask"
        )
        fix = "Pass `mask == 0` if 0 keeps, or pass its values as `bias`"
    what = f"functions of jaxmha take Booleans and refuse {array.dtype}; {what}"
    return Finding("refused", "mask", what, fix)


def _row_to_head(
    framework: str, arguments: Mapping[str, Any], sizes: Mapping[str, int]
) -> Iterator[Finding]:
    """Finds a (B, S) mask that Keras aligns to (N, T, S) because another mask is (B, N, T, S)."""
    mask = arguments.get("attention_mask")
    if framework != "keras" or mask is None or to_numpy(mask).ndim != 4:
        return
    for name in ("query_mask", "value_mask", "key_mask"):
        value = arguments.get(name)
        rows = 1 if value is None else len(to_numpy(value))
        if rows > 1 and rows == sizes.get("N", to_numpy(mask).shape[1]):
            yield Finding(
                "wrong axis",
                name,
                f"next to an attention_mask of four axes keras applies its row b to head b, since "
                f"B = N = {rows}",
                "Pass it within attention_mask: `attention_mask & mask[:, None, None, :]`",
            )


def _whole(
    framework: str,
    arguments: dict[str, Any],
    conditions: Mask | None,
    sizes: Mapping[str, int],
    known: set[str],
) -> Iterator[Finding]:
    """Yields findings about the arguments as a whole: `import_masks` raises, or rows are empty.

    `conditions`: the `Mask` of the call, if given. `known`: names of the findings so far.
    """
    importer = _module(framework).import_masks
    taken = signature(importer).parameters
    named = {SIZES[letter]: n for letter, n in sizes.items() if framework != "sdpa"}
    extra: dict[str, Any] = {name: n for name, n in named.items() if name in taken}
    if "emptied_by_bias" in taken:
        extra["emptied_by_bias"] = "empty"
    try:
        mask, bias = importer(**{**extra, **arguments})
    except (ValueError, TypeError) as error:
        if not known & {"is_causal", "wrong axis"}:
            yield _refused("arguments", error)
        return
    mask = (mask or Mask()) & (conditions or Mask())
    T, S = _lengths(mask, bias, sizes)
    if not T or not S or "additive cast" in known:
        return
    absent = replace(mask, query_padding=None, query_lengths=None)
    allowed = np.asarray(absent.to_array(T, S, np))
    if bias is not None:
        allowed = allowed & ~blocked_by(np.asarray(bias))
    seen = allowed.any(-1)
    empty = ~seen & (_tokens(mask, T, S) | ~seen.any(-1, keepdims=True))
    if empty.any():
        b, _, t = np.argwhere(empty)[0]
        keep = _module(framework).ARGUMENTS[0].keep
        other = "padding, as in torch" if keep else "attend, as in Keras"
        cause = f"; if True in a part of it means {other}, negate that part first"
        yield Finding(
            "empty rows",
            "arguments",
            f"{empty.sum()} of {empty.size} rows have nothing left to attend, the first at batch "
            f"row {b}, query {t}: frameworks return 0, NaN or a mean",
            "Leave each query one key, or choose the output (`fully_masked=`)"
            f"{cause * known.isdisjoint({'inverted', 'wrong axis'})}",
        )


def _refused(argument: str, error: Exception) -> Finding:
    return Finding("refused", argument, str(error).rstrip("."), "See the message")


def _lengths(mask: Mask, bias: NDArray | None, sizes: Mapping[str, int]) -> tuple[int, int | None]:
    """T and S of a call, from `sizes` or else from the arrays; S is None if neither has it.

    If neither has T: a causal mask or a window counts as self-attention, T = S; any other mask is
    the same for all queries, T = 1.
    """
    arrays = [np.shape(x) for x in (bias, mask.array) if x is not None]
    fields = {
        "T": (-2, mask.query_padding, mask.query_segments),
        "S": (-1, mask.key_value_padding, mask.key_value_segments),
    }
    found = dict(sizes)
    for letter, (axis, *ofs) in fields.items():
        own = [n for shape in arrays if (n := ((1, 1, 1, *shape))[axis]) != 1]
        own += [x.shape[-1] for x in ofs if x is not None]
        if own:
            found.setdefault(letter, own[0])
    S = found.get("S")
    ordered = mask.causal_offset is not None or mask.window_size is not None
    return found.get("T", S if ordered and S is not None else 1), S


def _tokens(mask: Mask, T: int, S: int) -> NDArray:
    """Boolean, broadcastable to `(B, 1, T)`: False for queries that the mask shows to be padding.

    With a causal mask or a window, query i is padding if the key at its position `i + offset` is.
    """
    queries = Mask(query_padding=mask.query_padding, query_lengths=mask.query_lengths)
    tokens: NDArray = np.asarray(queries.to_array(T, 1, np))[..., 0]
    offset = 0 if mask.causal_offset is None and T == S else mask.causal_offset
    ordered = mask.causal_offset is not None or mask.window_size is not None
    if mask.key_value_padding is None or offset is None or not ordered:
        return tokens
    keys = Mask(key_value_padding=mask.key_value_padding).to_array(1, S, np)
    own = np.arange(T) + np.asarray(offset).reshape(-1, 1, 1)
    valid = np.take_along_axis(np.asarray(keys)[:, :, 0], np.clip(own, 0, S - 1), -1)
    return np.asarray(tokens & valid)
