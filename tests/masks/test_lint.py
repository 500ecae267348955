"""The linter names what is wrong on constructed cases."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxmha import Mask
from jaxmha.converters import lint_masks

B, N, T, S = 2, 3, 5, 5
CAUSAL = np.tri(T, S, dtype=bool)  # True = attend
TOKENS = np.arange(S) < np.array([[3], [5]])
SAME = {"batch_size": T, "query_length": T, "key_length": S}
SQUARE = np.arange(S) < np.array([[3], [5], [2], [4], [1]])  # B = T = S
BY_HEAD = np.repeat(np.arange(S) < np.array([[3], [5], [4]]), T, 0).reshape(3, T, S)  # B = N
ORDER = np.stack([np.tri(T, S, 0, dtype=bool), np.tri(T, S, 1, dtype=bool)])
LEFT = Mask.padding(key_value=TOKENS[:, ::-1])
LOW = np.where(CAUSAL, 0.0, -1e9)

# Findings: framework, arguments, and words of the message and the fix.
FOUND: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "torch causal": ("torch", {"attn_mask": CAUSAL}, "inverted", ["blocked", "~mask"]),
    "torch padding": ("torch", {"key_padding_mask": TOKENS}, "inverted", ["longest row", "~mask"]),
    "keras causal": ("keras", {"attention_mask": ~CAUSAL}, "inverted", ["attend", "~mask"]),
    "keras padding": ("keras", {"value_mask": ~TOKENS}, "inverted", ["longest row"]),
    "flax causal": ("flax", {"mask": ~CAUSAL[None, None]}, "inverted", ["diagonal"]),
    "flax padding": ("flax", {"mask": ~TOKENS[:, None, None]}, "inverted", ["longest row"]),
    "jax causal": ("jax", {"mask": ~CAUSAL[None, None]}, "inverted", ["diagonal"]),
    "sdpa causal": ("sdpa", {"attn_mask": ~CAUSAL}, "inverted", ["diagonal"]),
    "huggingface padding": ("huggingface", {"attention_mask": (~TOKENS).astype(np.int64)},
        "inverted", ["longest row"]),
    "bottom-right causal": ("torch", {"attn_mask": np.tri(3, 5, 2, dtype=bool)}, "inverted",
        ["blocked"]),
    "0/1 into torch": ("torch", {"attn_mask": CAUSAL.astype(np.float32)}, "0/1 added",
        ["nothing is excluded", "blocked"]),
    "0/1 as a bias": ("flax", {"bias": CAUSAL.astype(np.float32)}, "0/1 added", ["logits"]),
    "additive into keras": ("keras", {"attention_mask": LOW}, "additive cast",
        ["0 would be blocked", "mask == 0"]),
    "additive into flax": ("flax", {"mask": np.where(CAUSAL, 0.0, -np.inf)}, "additive cast",
        ["mask == 0"]),
    "-1e9 in float16": ("torch", {"attn_mask": LOW, "dtype": "float16"}, "float16",
        ["does not exist", "Booleans"]),
    "-1e9 in torch.float16": ("sdpa",
        {"attn_mask": LOW.astype(np.float32), "dtype": torch.float16}, "float16",
        ["does not exist"]),
    "-1e4 added": ("torch", {"attn_mask": np.where(CAUSAL, 0.0, -1e4).astype(np.float32)},
        "constant", ["-1e+04", "as if unmasked", "-inf"]),
    "-1e4 of four axes": ("huggingface",
        {"attention_mask": np.where(CAUSAL, 0.0, -1e4)[None, None].astype(np.float16)},
        "constant", ["too small", "Booleans"]),
    "padded causal": ("torch",
        {"attn_mask": np.repeat(CAUSAL & TOKENS[:, None], N, 0), "num_heads": N}, "inverted",
        ["a causal mask whose polarity", "blocked", "~mask"]),
    "left-padded causal": ("flax", {"mask": ~(CAUSAL & TOKENS[:, None, None, ::-1])}, "inverted",
        ["a causal mask", "attend"]),
    "padded causal as floats": ("sdpa",
        {"attn_mask": np.where(CAUSAL & TOKENS[:, None, None], -np.inf, 0.0)}, "inverted",
        ["a causal mask", "np.where(mask == 0"]),
    "materialised padding": ("jax",
        {"mask": ~np.broadcast_to(TOKENS[:, None, None], (B, 1, T, S))}, "inverted",
        ["longest row"]),
    "materialised padding per head": ("torch",
        {"attn_mask": np.broadcast_to(TOKENS[:, None, None], (B, N, T, S)).reshape(-1, T, S),
        "num_heads": N}, "inverted", ["longest row"]),
    "padding of both sides": ("flax",
        {"mask": ~(TOKENS[:, None, None] & TOKENS[:, None, :, None])}, "inverted",
        ["longest row"]),
    "four axes in a causal model": ("huggingface",
        {"attention_mask": np.zeros((B, 1, T, S), np.float32), "is_causal": True}, "is_causal",
        ["leaves a mask of four axes as it is"]),
    "hint that hides extra positions": ("torch",
        {"attn_mask": ~CAUSAL, "is_causal": True, "need_weights": False, "add_zero_attn": True},
        "is_causal", ["hides the positions of bias_k and add_zero_attn"]),
    "rows as heads in keras": ("keras", {"attention_mask": np.ones((3, 1, T, S), bool),
        "value_mask": np.arange(S) < np.array([[3], [5], [4]]), "num_heads": 3}, "wrong axis",
        ["applies its row b to head b", "B = N = 3", "attention_mask & mask[:, None, None, :]"]),
    "torch padding of no full row": ("torch",
        {"key_padding_mask": np.arange(10) < np.array([[8], [5]])}, "left padding",
        ["keeps only its last", "here True means blocked", "on the right", "~mask"]),
    "flax padding of no full row": ("flax",
        {"mask": np.arange(10) >= np.array([8, 5])[:, None, None, None]}, "left padding",
        ["here True means attend"]),
    "one row of 7": ("torch", {"key_padding_mask": np.arange(10)[None] < 7}, "left padding", []),
    "flax padding of both sides, of no full row": ("flax",
        {"mask": ~np.array([np.outer(one, one) for one in np.arange(7) < [[5], [3]]])[:, None]},
        "left padding", []),
    "huggingface padding of no full row": ("huggingface",
        {"attention_mask": (np.arange(10) >= np.array([[8], [5]])).astype(int)}, "left padding",
        ["mask == 0"]),
    "padding added, of no full row": ("sdpa",
        {"attn_mask": np.where(np.arange(10) < [[[[8]]], [[[5]]]], -np.inf, 0)}, "left padding",
        ["np.where(mask == 0"]),
    "jaxmha padding": ("jaxmha", {"mask": ~TOKENS[:, None, None]}, "inverted", ["longest row"]),
    "a Mask of no full row": ("jaxmha",
        {"mask": Mask.padding(key_value=np.arange(10) >= np.array([[8], [5]]))}, "left padding",
        ["here True means attend", "`Mask.padding(key_value=~padding)`"]),
    "a causal mask transposed": ("jax", {"mask": CAUSAL.T}, "turned", ["mask.swapaxes(-1, -2)"]),
    "queries in reverse": ("sdpa", {"attn_mask": CAUSAL[::-1]}, "turned", ["mask[..., ::-1, :]"]),
    "keys in reverse": ("torch", {"attn_mask": ~CAUSAL[:, ::-1]}, "turned", ["`mask[..., ::-1]`"]),
    "a Mask transposed": ("jaxmha", {"mask": Mask.dense(CAUSAL.T)}, "turned", ["Mask.causal()"]),
    "torch padding, causal": ("jaxmha", {"mask": Mask.causal() & Mask.padding(key_value=~TOKENS)},
        "inverted", ["longest row", "`Mask.padding(key_value=~padding)`"]),
    "torch padding in a window": ("jaxmha",
        {"mask": Mask.window(2, 0) & Mask.padding(key_value=~TOKENS)}, "inverted",
        ["longest row"]),
    "torch padding as queries": ("jaxmha", {"mask": np.arange(6) >= np.array([[6], [4]])},
        "wrong axis", ["`~mask[:, None, None, :]`", "here True means attend"]),
    "nothing left": ("torch",
        {"attn_mask": np.eye(T, dtype=bool)[[0, 1, 2, 3, 3]] | (np.arange(T) == 2)[:, None]},
        "empty rows", ["1 of 5", "query 2"]),
    "left padding next to a triangle": ("jax", {"mask": (CAUSAL & (np.arange(S) > 1))[None, None]},
        "empty rows",
        ["2 of 5", "query 0", "if True in a part of it means padding, as in torch, negate"]),
    "heads before batch": ("torch",
        {"attn_mask": ~np.tile(ORDER, (N, 1, 1)), "num_heads": N, "batch_size": B}, "head order",
        ["(B N)", "np.repeat"]),
    "batch as queries in keras": ("keras", {"attention_mask": SQUARE, **SAME}, "wrong axis",
        ["read as T", "one query", "[:, None, None, :]"]),
    "batch as queries in jax": ("jax", {"mask": SQUARE, **SAME}, "wrong axis", ["read as T"]),
    "sorted batch as queries": ("jaxmha", {"mask": TOKENS}, "wrong axis", ["read as T"]),
    "left-padded batch as queries": ("sdpa", {"attn_mask": TOKENS[:, ::-1]}, "wrong axis", []),
    "batch as queries in torch": ("torch", {"attn_mask": ~TOKENS[::-1]}, "wrong axis",
        ["Pass it as `key_padding_mask`"]),
    "inverted batch as queries": ("jax", {"mask": ~SQUARE}, "wrong axis", ["read as T"]),
    "batch of a known size as queries": ("flax",
        {"mask": np.ones((B, S)), "batch_size": B, "query_length": T}, "wrong axis",
        ["read as T"]),
    "batch as an unknown number of heads": ("jax", {"mask": BY_HEAD}, "wrong axis", ["read as N"]),
    "batch as heads in flax": ("flax", {"mask": BY_HEAD, "batch_size": 3, "num_heads": 3},
        "wrong axis", ["read as N", "one head", "[:, None]"]),
    "causal alone": ("torch", {"is_causal": True}, "is_causal", ["refuses", "attn_mask"]),
    "hint that hides a mask": ("torch",
        {"attn_mask": np.eye(T, dtype=bool), "is_causal": True, "need_weights": False},
        "is_causal", ["drops the attn_mask"]),
    "hint that is ignored": ("torch", {"attn_mask": np.eye(T, dtype=bool), "is_causal": True},
        "is_causal", ["ignores it"]),
    "causal decoding": ("flax", {"is_causal": True, "decode": True}, "is_causal", ["key 0 only"]),
    "causal next to a mask": ("sdpa", {"attn_mask": np.ones((T, S), bool), "is_causal": True},
        "is_causal", ["another refuses the call"]),
    "a Mask of other sizes": ("jaxmha", {"mask": LEFT, "key_length": S + 1}, "refused",
        ["mask.key_value_padding", "S=6"]),
    "lengths beyond S": ("jaxmha",
        {"mask": Mask.lengths(key_value=np.array([3, 12])), "key_length": 10}, "lengths",
        ["mask: 1 of 2 lengths", "[0, S=10]", "12 in batch row 1"]),
    "lengths below 0": ("jax", {"query_seq_lengths": np.array([-1, 3])}, "lengths",
        ["query_seq_lengths: 1 of 2", "[0, T]", "-1 in batch row 0"]),
    "refused by torch": ("torch", {"attn_mask": np.ones((1, 1, T, S), bool)}, "refused",
        ["attn_mask", "(1, 1, 5, 5)"]),
}  # fmt: skip


@pytest.mark.parametrize("what", FOUND)
def test_is_named(what: str) -> None:
    framework, arguments, name, text = FOUND[what]
    found = {finding.name: finding for finding in lint_masks(framework, **arguments)}
    assert name in found, f"found {list(found)}"
    missing = [word for word in text if word not in str(found[name])]
    assert not missing, f"{missing} not in: {found[name]}"


@pytest.mark.parametrize("what", FOUND)
def test_its_opposite_is_not(what: str) -> None:
    """The mask put right, where it has a right form, is not accused of the same."""
    framework, arguments, name, _ = FOUND[what]
    if name in ("inverted", "left padding"):
        arguments = {k: negated(v) for k, v in arguments.items()}
    elif name == "0/1 added":
        arguments = {k: v == 0 if framework == "torch" else v - 1 for k, v in arguments.items()}
    elif name == "additive cast":
        arguments = {k: v == 0 for k, v in arguments.items()}
    elif name == "head order":
        arguments = arguments | {"attn_mask": ~np.repeat(ORDER, N, axis=0)}
    elif name == "constant":
        arguments = {k: np.where(v == 0, 0, -np.inf).astype(v.dtype) for k, v in arguments.items()}
    elif name == "wrong axis" and "value_mask" in arguments:
        arguments = {"attention_mask": arguments["value_mask"][:, None, None], "num_heads": 3}
    elif name == "wrong axis":
        key, mask = next((k, v) for k, v in arguments.items() if k.endswith("mask"))
        arguments = arguments | {key: mask[:, None, None] if mask.ndim == 2 else mask[:, None]}
    else:
        return
    assert name not in {finding.name for finding in lint_masks(framework, **arguments)}


def negated(value: Any) -> Any:
    if isinstance(value, Mask):
        return replace(value, key_value_padding=~np.asarray(value.key_value_padding))
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind == "f":
        return np.where(value == 0, -np.inf, 0.0)
    return ~value if value.dtype == bool else 1 - value


@pytest.mark.parametrize(
    "dtype", [torch.float16, jnp.float16, np.float16, "float16", np.dtype("f2")]
)
def test_dtypes_of_every_library(dtype: Any) -> None:
    found = lint_masks("torch", attn_mask=LOW.astype(np.float32), dtype=dtype)
    assert [finding.name for finding in found] == ["float16"]
    assert lint_masks("torch", attn_mask=LOW.astype(np.float32), dtype=torch.bfloat16) == []


def test_every_check_has_a_case() -> None:
    named = {name for _, _, name, _ in FOUND.values()}
    assert named == {
        "inverted", "0/1 added", "additive cast", "float16", "constant", "empty rows", "head order",
        "wrong axis", "is_causal", "refused", "left padding", "turned", "lengths",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "fix"),
    [
        (Mask.dense(TOKENS), "Pass `Mask.padding(key_value=array)`"),
        (Mask.dense(~CAUSAL), "Pass its negation (`Mask.dense(~array)`)"),
        (Mask.window(None, None) & ~CAUSAL, "Pass its negation (`Mask.dense(~array)`)"),
    ],
)
def test_remedies_of_a_mask(mask: Mask, fix: str) -> None:
    """`~` is not defined for a `Mask`."""
    assert lint_masks("jaxmha", mask=mask)[0].fix == fix


def test_unknown_framework() -> None:
    with pytest.raises(ValueError, match=r"framework must be one of .*torch.*'theano'"):
        lint_masks("theano")
