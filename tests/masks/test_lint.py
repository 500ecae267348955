"""The linter names what is wrong on constructed cases, and is silent on correct masks."""

from typing import Any

import numpy as np
import pytest

from jaxmha import Mask
from jaxmha.converters import lint_masks
from jaxmha.converters.masks import lint

B, N, T, S = 2, 3, 5, 5
CAUSAL = np.tri(T, S, dtype=bool)  # True = attend
TOKENS = np.arange(S) < np.array([[3], [5]])
SAME = {"batch_size": T, "query_length": T, "key_length": S}
SQUARE = np.arange(S) < np.array([[3], [5], [2], [4], [1]])  # B = T = S
BY_HEAD = np.repeat(np.arange(S) < np.array([[3], [5], [4]]), T, 0).reshape(3, T, S)  # B = N
ORDER = np.stack([np.tri(T, S, 0, dtype=bool), np.tri(T, S, 1, dtype=bool)])
LOW = np.where(CAUSAL, 0.0, -1e9)

# What is to be found: framework, arguments, and words of the message and the fix.
FOUND: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "torch causal": ("torch", {"attn_mask": CAUSAL}, "inverted", ["blocked", "~mask"]),
    "torch padding": ("torch", {"key_padding_mask": TOKENS}, "inverted", ["longest row", "~mask"]),
    "keras causal": ("keras", {"attention_mask": ~CAUSAL}, "inverted", ["attend", "~mask"]),
    "keras padding": ("keras", {"value_mask": ~TOKENS}, "inverted", ["longest row"]),
    "flax causal": ("flax", {"mask": ~CAUSAL[None, None]}, "inverted", ["diagonal"]),
    "flax padding": ("flax", {"mask": ~TOKENS[:, None, None]}, "inverted", ["longest row"]),
    "jax causal": ("jax", {"mask": ~CAUSAL[None, None]}, "inverted", ["diagonal"]),
    "sdpa causal": ("sdpa", {"attn_mask": ~CAUSAL}, "inverted", ["diagonal"]),
    "huggingface padding": (
        "huggingface",
        {"attention_mask": (~TOKENS).astype(np.int64)},
        "inverted",
        ["longest row"],
    ),
    "bottom-right causal": (
        "torch",
        {"attn_mask": np.tri(3, 5, 2, dtype=bool)},
        "inverted",
        ["blocked"],
    ),
    "0/1 into torch": (
        "torch",
        {"attn_mask": CAUSAL.astype(np.float32)},
        "0/1 added",
        ["nothing is excluded", "blocked"],
    ),
    "0/1 as a bias": ("flax", {"bias": CAUSAL.astype(np.float32)}, "0/1 added", ["logits"]),
    "additive into keras": (
        "keras",
        {"attention_mask": LOW},
        "additive cast",
        ["0 would be blocked", "mask == 0"],
    ),
    "additive into flax": (
        "flax",
        {"mask": np.where(CAUSAL, 0.0, -np.inf)},
        "additive cast",
        ["mask == 0"],
    ),
    "-1e9 in float16": (
        "torch",
        {"attn_mask": LOW, "dtype": "float16"},
        "float16",
        ["does not exist", "Booleans"],
    ),
    "lowest of float16": (
        "torch",
        {"attn_mask": np.where(CAUSAL, 0, -65504).astype(np.float16)},
        "float16",
        ["-6.55e+04", "Booleans"],
    ),
    "nothing left": (
        "torch",
        {"attn_mask": np.eye(T, dtype=bool)[[0, 1, 2, 3, 3]] | (np.arange(T) == 2)[:, None]},
        "empty rows",
        ["1 of 5", "query 2"],
    ),
    "left padding beside a triangle": (
        "jax",
        {"mask": (CAUSAL & (np.arange(S) > 1))[None, None]},
        "empty rows",
        ["2 of 5", "query 0"],
    ),
    "heads before batch": (
        "torch",
        {"attn_mask": ~np.tile(ORDER, (N, 1, 1)), "num_heads": N, "batch_size": B},
        "head order",
        ["(B N)", "np.repeat"],
    ),
    "batch as queries in keras": (
        "keras",
        {"attention_mask": SQUARE, **SAME},
        "wrong axis",
        ["read as T", "one query", "[:, None, None, :]"],
    ),
    "batch as queries in jax": ("jax", {"mask": SQUARE, **SAME}, "wrong axis", ["read as T"]),
    "batch as heads in flax": (
        "flax",
        {"mask": BY_HEAD, "batch_size": 3, "num_heads": 3},
        "wrong axis",
        ["read as N", "one head", "[:, None]"],
    ),
    "causal alone": ("torch", {"is_causal": True}, "is_causal", ["refuses", "attn_mask"]),
    "hint that hides a mask": (
        "torch",
        {"attn_mask": np.eye(T, dtype=bool), "is_causal": True, "need_weights": False},
        "is_causal",
        ["drops the attn_mask"],
    ),
    "hint that is ignored": (
        "torch",
        {"attn_mask": np.eye(T, dtype=bool), "is_causal": True},
        "is_causal",
        ["ignores it"],
    ),
    "causal decoding": (
        "flax",
        {"is_causal": True, "decode": True},
        "is_causal",
        ["key 0 only"],
    ),
    "causal beside a mask": (
        "sdpa",
        {"attn_mask": np.ones((T, S), bool), "is_causal": True},
        "is_causal",
        ["refused by another"],
    ),
    "refused by torch": (
        "torch",
        {"attn_mask": np.ones((1, 1, T, S), bool)},
        "refused",
        ["attn_mask", "(1, 1, 5, 5)"],
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_is_named(what: str) -> None:
    framework, arguments, name, words = FOUND[what]
    found = {finding.name: finding for finding in lint_masks(framework, **arguments)}
    assert name in found, f"found {list(found)}"
    missing = [word for word in words if word not in str(found[name])]
    assert not missing, f"{missing} not in: {found[name]}"


@pytest.mark.parametrize("what", FOUND)
def test_its_opposite_is_not(what: str) -> None:
    """The mask put right, where it has a right form, is not accused of the same."""
    framework, arguments, name, _ = FOUND[what]
    if name == "inverted":
        arguments = {k: 1 - v if v.dtype != bool else ~v for k, v in arguments.items()}
    elif name == "0/1 added":
        arguments = {k: v == 0 if framework == "torch" else v - 1 for k, v in arguments.items()}
    elif name == "additive cast":
        arguments = {k: v == 0 for k, v in arguments.items()}
    elif name == "head order":
        arguments = arguments | {"attn_mask": ~np.repeat(ORDER, N, axis=0)}
    elif name == "wrong axis":
        key, mask = next((k, v) for k, v in arguments.items() if k.endswith("mask"))
        arguments = arguments | {key: mask[:, None, None] if mask.ndim == 2 else mask[:, None]}
    else:
        return
    assert name not in {finding.name for finding in lint_masks(framework, **arguments)}


def test_every_check_has_a_case() -> None:
    named = {name for _, _, name, _ in FOUND.values()}
    assert named == {
        "inverted", "0/1 added", "additive cast", "float16", "empty rows", "head order",
        "wrong axis", "is_causal", "refused",
    }  # fmt: skip


def correct(rng: np.random.Generator, sizes: tuple[int, int, int, int]) -> Mask:
    """A mask as models have them: every query that is there keeps a key."""
    B, N, T, S = sizes
    lengths = rng.integers(1, S + 1, B)
    lengths[rng.integers(B)] = S
    tokens = np.arange(S) < lengths[:, None]
    diagonal = np.minimum(np.arange(T), S - 1)[:, None] == np.arange(S)
    kinds = {
        "none": Mask(),
        "causal": Mask.causal(),
        "later": Mask.causal(max(S - T, 0)),
        "padding": Mask.padding(key_value=tokens),
        "left": Mask.padding(key_value=tokens[:, ::-1]),
        "lengths": Mask.lengths(key_value=lengths),
        "padded causal": Mask.causal() & Mask.padding(key_value=tokens),
        "window": Mask.window(int(rng.integers(1, 4)) + max(T - S, 0), 1),
        "sparse": Mask.dense((rng.random((T, S)) < 0.5) | diagonal),
        "heads": Mask.dense((rng.random((1, N, T, S)) < 0.5) | diagonal),
        "rows": Mask.dense((rng.random((B, 1, T, S)) < 0.5) | diagonal),
    }
    return kinds[str(rng.choice(list(kinds)))]


@pytest.mark.parametrize("framework", lint.FRAMEWORKS)
def test_silent_on_correct_masks(framework: str) -> None:
    """Written by `export_masks`, whose round trip is proved elsewhere; sizes often coincide."""
    verbs = lint._module(framework)
    silent = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        B, N, T, S = (int(x) for x in rng.integers(3, 6, 4))
        sizes = B, N, T, S
        known = dict(zip(lint.SIZES.values(), sizes, strict=True))
        mask = correct(rng, sizes)
        wanted = {k: v for k, v in known.items() if k in _parameters(verbs.export_masks)}
        try:
            arguments = verbs.export_masks(mask, None, **wanted)
        except ValueError:
            continue  # the framework cannot hold it
        found = lint_masks(framework, **known, **arguments)
        assert not found, f"seed {seed}, {mask!r}: {[str(x) for x in found]}"
        silent += 1
    assert silent >= 200


def _parameters(function: Any) -> Any:
    import inspect

    return inspect.signature(function).parameters


def test_unknown_framework() -> None:
    with pytest.raises(ValueError, match=r"framework must be one of .*torch.*'theano'"):
        lint_masks("theano")
