"""The linter is silent on correct masks."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import Mask
from jaxmha.converters import lint_masks
from jaxmha.converters.masks import lint
from tests.masks.test_lint import CAUSAL, LEFT, SAME, SQUARE, TOKENS, B, N, S, T

# Right, though each looks like something that is not: framework and arguments.
SILENT: dict[str, tuple[str, dict[str, Any]]] = {
    "the lowest float16": ("huggingface",
        {"attention_mask": np.where(CAUSAL, 0, -65504)[None, None].astype(np.float16)}),
    "the lowest float16, in torch": ("torch",
        {"attn_mask": np.where(CAUSAL, 0, -65504).astype(np.float16), "dtype": torch.float16}),
    "causal in a causal model": ("huggingface",
        {"attention_mask": np.where(CAUSAL, 0.0, -np.inf)[None, None], "is_causal": True}),
    "distances": ("sdpa",
        {"attn_mask": -2000.0 * np.abs(np.arange(T)[:, None] - np.arange(S)).astype(np.float32)}),
    "padding of queries in a Mask": ("jaxmha",
        {"mask": Mask.padding(query=TOKENS, key_value=TOKENS), "query_length": T}),
    "causal and lengths in a Mask": ("jaxmha",
        {"mask": Mask.causal() & Mask.lengths(key_value=np.array([3, 5])), "query_length": T,
        "key_length": S}),
    "causal and left padding in a Mask": ("jaxmha", {"mask": Mask.causal() & LEFT}),
    "a window and left padding in a Mask": ("jaxmha", {"mask": Mask.window(2, 0) & LEFT}),
    "causal next to left padding in a Mask": ("jaxmha", {"mask": LEFT, "is_causal": True}),
    "later queries and left padding in a Mask": ("jaxmha",
        {"mask": Mask.causal(S - 3) & LEFT, "query_length": 3}),
    "left padding in a causal model": ("huggingface",
        {"attention_mask": TOKENS[:, ::-1].astype(int), "is_causal": True}),
    "later queries, each with one key more": ("jax", {"mask": np.tri(3, 5, 1, dtype=bool)}),
    "blocks of queries": ("sdpa", {"attn_mask": np.arange(4) < np.array([[2], [2], [4], [4]])}),
    "few queries of a growing part of the keys": ("flax",
        {"mask": np.arange(9) < np.array([[2], [5], [8]]), "query_length": 3}),
    "as many queries as the batch has rows": ("jax", {"mask": SQUARE[[2, 0, 0, 1, 1]], **SAME}),
    "a mask per head, every second alike": ("torch",
        {"num_heads": 4, "attn_mask": np.tile(np.stack([~CAUSAL, CAUSAL & False]), (4, 1, 1))}),
    "later tokens of a cache": ("flax", {"mask": np.tri(3, 5, 2, dtype=bool) & (np.arange(5) > 1)}),
    "left padding of a cache": ("flax", {"mask": np.broadcast_to(np.arange(5) > 1, (1, 1, 3, 5))}),
}  # fmt: skip
# Sizes of which one is 0: nothing is there to be suspicious about.
NO_KEYS: dict[str, dict[str, Any]] = {
    "jaxmha": {"mask": Mask.padding(key_value=np.ones((B, 0), bool))},
    "torch": {"attn_mask": np.ones((B * N, T, 0), bool), "num_heads": N},
    "sdpa": {"attn_mask": np.ones((B, N, T, 0), bool)},
    "keras": {"attention_mask": np.ones((B, T, 0), bool), "value_mask": np.ones((B, 0), bool)},
    "flax": {"mask": np.ones((B, 1, T, 0)), "bias": np.ones((N, T, 0), np.float32)},
    "jax": {"mask": np.ones((0, N, T, S), bool)},
    "huggingface": {"attention_mask": np.ones((B, 0), int)},
}
# Other arguments of the framework's call.
CALLS: dict[str, dict[str, Any]] = {
    "jaxmha": {"mask": Mask.causal() & Mask.lengths(key_value=np.array([3, 5])), "segment_ids": 1},
    "torch": {"attn_mask": ~CAUSAL, "need_weights": False, "average_attn_weights": True},
    "sdpa": {"attn_mask": CAUSAL, "dropout_p": 0.1, "scale": 0.5, "enable_gqa": True},
    "keras": {"attention_mask": CAUSAL, "training": True, "return_attention_scores": True},
    "flax": {"mask": CAUSAL, "deterministic": True, "sow_weights": False, "inputs_q": CAUSAL},
    "jax": {"mask": CAUSAL, "scale": 0.3, "implementation": "xla"},
    "huggingface": {"attention_mask": np.ones((B, S), int), "input_ids": np.ones((B, S), int)},
}


@pytest.mark.parametrize("what", SILENT)
def test_is_not_named(what: str) -> None:
    framework, arguments = SILENT[what]
    assert [str(finding) for finding in lint_masks(framework, **arguments)] == []


@pytest.mark.parametrize("framework", lint.FRAMEWORKS)
def test_no_keys(framework: str) -> None:
    assert lint_masks(framework, **NO_KEYS[framework]) == []


@pytest.mark.parametrize("framework", lint.FRAMEWORKS)
def test_whole_calls_are_read(framework: str) -> None:
    """Arguments that say nothing about masks are known; misspelled ones are not passed over."""
    assert lint_masks(framework, **CALLS[framework]) == []
    with pytest.raises(TypeError, match=f"{framework} has no argument 'atn_mask'"):
        lint_masks(framework, atn_mask=CAUSAL)


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


@pytest.mark.everyday(count=[130])
@pytest.mark.parametrize(
    ("framework", "count"),
    [("jaxmha", 130), ("torch", 130), *((name, 400) for name in lint.FRAMEWORKS)],
)
def test_silent_on_correct_masks(framework: str, count: int) -> None:
    """Written by `export_masks`, whose round trip is proved elsewhere; sizes often coincide."""
    api = lint._module(framework)
    silent = 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        B, N, T, S = (int(x) for x in rng.integers(3, 6, 4))
        sizes = B, N, T, S
        known = dict(zip(lint.SIZES.values(), sizes, strict=True))
        mask = correct(rng, sizes)
        wanted = {k: v for k, v in known.items() if k in _parameters(api.export_masks)}
        try:
            arguments = api.export_masks(mask, None, **wanted)
        except ValueError:
            continue  # the framework cannot hold it
        found = lint_masks(framework, **known, **arguments)
        assert not found, f"seed {seed}, {mask!r}: {[str(x) for x in found]}"
        silent += 1
    assert silent >= count // 2


def _parameters(function: Any) -> Any:
    return inspect.signature(function).parameters
