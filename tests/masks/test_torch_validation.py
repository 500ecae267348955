"""Masks that torch refuses are refused with the reason, and its paths are told apart."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from jaxmha.converters.layout.arrays import to_torch
from jaxmha.converters.masks.torch import import_masks, path_of, static_heads
from tests.masks.torch_live import B, D, N, S, T, draw, module, spy


class Refused(NamedTuple):
    """Arguments that torch refuses, or does not take its native path with."""

    why: str
    error: type[Exception]
    arguments: dict[str, Any]


ROWS = np.zeros((B * N, T, S), bool)
SQUARE = np.zeros((S, S), bool)
KEYS = np.zeros((B, S), bool)
REFUSED = (
    Refused("attn_mask must be Boolean", TypeError, {"attn_mask": ROWS[0].astype(np.int32)}),
    Refused("key_padding_mask must be Bool", TypeError, {"key_padding_mask": KEYS.astype("u1")}),
    Refused("attn_mask: expected axes", ValueError, {"attn_mask": ROWS[None]}),
    Refused(r"\(\(B N\), T, S\)", ValueError, {"attn_mask": ROWS[:5]}),
    Refused("B=3", ValueError, {"attn_mask": ROWS[:2], "key_padding_mask": KEYS}),
    Refused("B=1", ValueError, {"attn_mask": ROWS, "key_padding_mask": KEYS[0]}),
    Refused("S=7", ValueError, {"attn_mask": ROWS[0, :, :5], "key_padding_mask": KEYS}),
    Refused("key_padding_mask: exp", ValueError, {"key_padding_mask": KEYS[None]}),
    Refused("torch refuses is_causal", ValueError, {"is_causal": True}),
    Refused("refuses", ValueError, {"is_causal": True, "key_padding_mask": KEYS}),
    Refused("path must be", ValueError, {"path": "fast"}),
    Refused("floating", ValueError, {"path": "native", "attn_mask": SQUARE.astype("f4")}),
    Refused("unbatched", ValueError, {"path": "native", "key_padding_mask": KEYS[0]}),
    Refused("extra", ValueError, {"path": "native", "add_zero_attn": True}),
    Refused("T differs", ValueError, {"path": "native", "attn_mask": ROWS[0]}),
    Refused("odd", ValueError, {"path": "native", "num_heads": 3}),
)


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("refused", REFUSED, ids=lambda r: r.why)
def test_errors_say_why(refused: Refused) -> None:
    with pytest.raises(refused.error, match=refused.why):
        import_masks(**{"num_heads": N, **refused.arguments})


@pytest.mark.parametrize(
    "refused", [r for r in REFUSED if r.arguments.keys().isdisjoint({"path"})], ids=lambda r: r.why
)
def test_torch_refuses_them_too(refused: Refused) -> None:
    layer = module(False, False)
    layer.batch_first = True
    masks = {
        name: to_torch(value) if isinstance(value, np.ndarray) else value
        for name, value in refused.arguments.items()
    }
    inputs = draw(B, T, D), draw(B, S, D), draw(B, S, D)
    with pytest.raises((RuntimeError, AssertionError)):
        layer(*inputs, **masks)


def test_head_count_is_asked_for() -> None:
    with pytest.raises(ValueError, match="without knowing B or N"):
        import_masks(attn_mask=ROWS)
    with pytest.raises(ValueError, match="static_k"):
        static_heads(np.ones((7, 5, 3)), N)


@dataclass(frozen=True)
class Condition:
    """A module, and how it is called, apart from what the native path asks."""

    why: str
    native: bool = False
    made: dict[str, Any] = field(default_factory=dict)
    train: bool = False
    gradients: bool = False
    key: bool = False
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    batched: bool = True
    fast: bool = True


CONDITIONS = (
    Condition("nothing", native=True),
    Condition("dropout", native=True, made={"dropout": 0.1}),
    Condition("float64", native=True, dtype=torch.float64),
    Condition("training", train=True),
    Condition("gradients", gradients=True),
    Condition("another key", key=True),
    Condition("unbatched", batched=False),
    Condition("autocast on CPU", native=True, autocast=True),
    Condition("switched off", fast=False),
    Condition("odd heads", made={"num_heads": 11}),
    Condition("time first", made={"batch_first": False}),
    Condition("no biases", made={"bias": False}),
    Condition("bias_kv", made={"add_bias_kv": True}),
    Condition("zero_attn", made={"add_zero_attn": True}),
    Condition("separate", made={"kdim": D, "vdim": D + 1}, key=True),
)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: c.why)
def test_path_is_the_one_taken(
    condition: Condition, need_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = spy(monkeypatch)
    made: dict[str, Any] = {
        "num_heads": N,
        "batch_first": True,
        "dtype": condition.dtype,
    } | condition.made
    layer = torch.nn.MultiheadAttention(D, **made).train(condition.train)
    x = draw(*((B,) if condition.batched else ()), S, D).to(condition.dtype)
    key = x.clone() if condition.key else x
    value = draw(B, S, made["vdim"]) if "vdim" in made else key
    torch.backends.mha.set_fastpath_enabled(condition.fast)
    try:
        with (
            torch.set_grad_enabled(condition.gradients),
            torch.autocast("cpu", torch.bfloat16, enabled=condition.autocast),
        ):
            path = path_of(layer, x, key, value, need_weights=need_weights)
            layer(x, key, value, need_weights=need_weights)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert bool(taken) == condition.native
    assert path == ("native" if condition.native else "weights" if need_weights else "sdpa")
