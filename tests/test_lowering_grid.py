"""Fifty kinds of calls, forward and backward, lowered for every platform."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

import jaxmha
from jaxmha import Mask
from jaxmha.implementations import platforms

pytestmark = pytest.mark.slow
PLATFORMS = {"h200": "cuda", "a100": "cuda", "b200": "cuda", "rocm": "rocm", "tpu": "tpu"}
SHAPE: Any = jax.ShapeDtypeStruct
LENGTHS = np.array([300, 7], np.int32)
VALID = np.arange(600) % 5 > 0
IDS = np.repeat(np.arange(3), 200)[None]
SEGMENTS = Mask.segments(query_ids=IDS, key_value_ids=IDS)
DENSE = Mask.dense(np.arange(600)[:, None] >= np.arange(600)[None])
PACKED = Mask.packed(np.array([[100, 450], [600, 0]]), size=600)
# Sizes that differ from B2 T600 S600 N4 K4 H64, and options of the call.
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "float32 causal": {"dtype": "float32", "is_causal": True},
    "grouped": {"K": 2, "is_causal": True},
    "one key head": {"K": 1},
    "H 32": {"H": 32},
    "H 72": {"H": 72},
    "H 80": {"H": 80, "is_causal": True},
    "H 96": {"H": 96},
    "H 128": {"H": 128, "is_causal": True},
    "H 192 h 128": {"H": 192, "h": 128, "is_causal": True},
    "H 256": {"H": 256, "is_causal": True},
    "H 264": {"H": 264},
    "h 32": {"h": 32},
    "more keys": {"T": 77},
    "more keys, causal": {"T": 77, "is_causal": True},
    "more queries": {"S": 77},
    "odd": {"T": 197, "S": 197},
    "odd causal": {"T": 197, "S": 197, "is_causal": True},
    "one query": {"T": 1},
    "one query, lengths": {"T": 1, "key_value_seq_lengths": LENGTHS},
    "few queries": {"T": 4, "key_value_seq_lengths": LENGTHS},
    "one key": {"S": 1},
    "lengths": {"key_value_seq_lengths": LENGTHS},
    "lengths causal": {"key_value_seq_lengths": LENGTHS, "is_causal": True},
    "both lengths": {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": LENGTHS},
    "padding": {"mask": Mask.padding(key_value=VALID)},
    "padding causal": {"mask": Mask.padding(key_value=VALID), "is_causal": True},
    "padding causal H 256": {"mask": Mask.padding(key_value=VALID), "is_causal": True, "H": 256},
    "padding of queries": {"mask": Mask.padding(query=VALID)},
    "window left": {"local_window_size": (64, 0)},
    "window both": {"local_window_size": (64, 9)},
    "window lengths": {"local_window_size": (64, 0), "key_value_seq_lengths": LENGTHS},
    "bottom-right": {"T": 77, "mask": Mask.causal(523)},
    "offset below": {"mask": Mask.causal(-17)},
    "traced offset": {"mask": Mask.causal(np.array([3, 4]))},
    "segments": {"mask": SEGMENTS},
    "segments causal": {"mask": SEGMENTS, "is_causal": True},
    "packed": {"mask": PACKED},
    "packed causal, grouped": {"mask": PACKED, "is_causal": True, "K": 2},
    "packed float16": {"mask": PACKED, "dtype": "float16"},
    "dense mask": {"mask": DENSE},
    "bias": {"bias": (1, 4, 600, 600)},
    "bias of keys": {"bias": (2, 1, 1, 600)},
    "bias causal": {"bias": (1, 4, 600, 600), "is_causal": True},
    "bias float16": {"bias": (1, 4, 600, 600), "dtype": "float16"},
    "soft cap": {"logits_soft_cap": 20.0},
    "log-sum-exp": {"return_lse": True},
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", KINDS)
def test_lowers(name: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability = platforms.named(platform).capability or (0, 0)
    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(
        private,
        "check_compute_capability",
        lambda least: capability >= tuple(map(int, least.split("."))),
    )
    options = dict(KINDS[name])
    T, S, K, H = (options.pop(x, y) for x, y in (("T", 600), ("S", 600), ("K", 4), ("H", 64)))
    dtype, h = options.pop("dtype", "bfloat16"), options.pop("h", H)
    bias = options.pop("bias", None)
    arrays = [SHAPE((2, *x), jnp.dtype(dtype)) for x in ((T, 4, H), (S, K, H), (S, K, h))]
    arrays += [] if bias is None else [SHAPE(bias, jnp.dtype(dtype))]

    def value(*arrays: Any) -> Any:
        found = jaxmha.dot_product_attention(*arrays, **options)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(found))

    with jaxmha.lowering_for(platform):
        for function in (value, jax.grad(value, tuple(range(len(arrays))))):
            lowered = (
                jax.jit(function).trace(*arrays).lower(lowering_platforms=(PLATFORMS[platform],))
            )
            assert lowered.as_text()
