"""Exported masks of torch mean what was exported: to the importer, and to live torch."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from jaxmha import Mask, Semantics, dot_product_attention, multi_head_attention
from jaxmha.converters.arrays import NDArray, to_numpy, to_torch
from jaxmha.converters.masks import sdpa
from jaxmha.converters.masks import torch as layer_masks
from jaxmha.converters.torch import from_module
from tests.masks.draws import KINDS, B, N, S, T, pairs, random_mask
from tests.masks.torch_live import D, H, call, check, draw, module, stacked
from tests.tolerance import assert_close

SEED = int(os.environ["JAXMHA_PROPERTY_SEED"])
SIZES: dict[str, Any] = {"batch_size": B, "num_heads": N, "query_length": T, "key_length": S}
# 16 floors of float32 are 1e-6 of the scale.
FACTOR = 0.5
many = settings(max_examples=1000, deadline=None, database=None)
few = settings(max_examples=15, deadline=None, database=None)
AXES = (None, "1111", "B11S", "111S", "N1S", "BNTS", "TS", "1NT1", "B1TS")
MASKS: dict[str, Any] = {
    "number": st.integers(0, 2**32 - 1),
    "kinds": st.sets(st.sampled_from(KINDS)),
    "excluded": st.sampled_from((0.0, 0.3, 1.0)),
    "axes": st.sampled_from(AXES),
}


def random_bias(axes: str | None, number: int) -> NDArray | None:
    """Over the axes named, with -inf in places."""
    if axes is None:
        return None
    sizes = {"B": B, "N": N, "T": T, "S": S, "1": 1}
    rng = np.random.default_rng(number)
    bias = rng.standard_normal([sizes[axis] for axis in axes]).astype(np.float32)
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    return bias


def added(bias: NDArray | None, allowed: NDArray) -> NDArray:
    """What is added to the logits of the pairs that may attend."""
    return np.where(allowed, np.zeros((), np.float32) if bias is None else bias, 0)


def assert_same_meaning(
    mask: Mask | None, bias: NDArray | None, mask2: Mask | None, bias2: NDArray | None
) -> None:
    allowed = pairs(mask, bias)
    np.testing.assert_array_equal(pairs(mask2, bias2), allowed)
    np.testing.assert_array_equal(added(bias2, allowed), added(bias, allowed))


@seed(SEED)
@many
@given(**MASKS, extra=st.booleans(), need_weights=st.booleans())
def test_layer_round_trip(
    number: int,
    kinds: set[str],
    excluded: float,
    axes: str | None,
    extra: bool,
    need_weights: bool,
) -> None:
    mask, bias = random_mask(number, kinds, excluded), random_bias(axes, number)
    if mask.query_lengths is not None:
        with pytest.raises(ValueError, match="torch has none"):
            layer_masks.export_masks(mask, bias, **SIZES)
        mask = replace(mask, query_lengths=None)
    if extra and mask.query_padding is not None:
        with pytest.raises(ValueError, match="stay visible"):
            layer_masks.export_masks(mask, bias, add_zero_attn=True, **SIZES)
        mask = replace(mask, query_padding=None)
    made = layer_masks.export_masks(mask, bias, add_zero_attn=extra, **SIZES)
    arguments = {"need_weights": need_weights} | made
    mask2, bias2 = layer_masks.import_masks(num_heads=N, add_zero_attn=extra, **arguments)
    assert_same_meaning(mask, bias, mask2, bias2)
    assert len({array.dtype for array in made.values() if isinstance(array, np.ndarray)}) < 2


@seed(SEED)
@many
@given(**MASKS)
def test_sdpa_round_trip(number: int, kinds: set[str], excluded: float, axes: str | None) -> None:
    mask, bias = random_mask(number, kinds, excluded), random_bias(axes, number)
    made = sdpa.export_masks(mask, bias, **SIZES)
    mask2, bias2 = sdpa.import_masks(num_heads=N, kernel="math", **made)
    assert_same_meaning(mask, bias, mask2, bias2)


@seed(SEED)
@few
@given(number=st.integers(0, 2**32 - 1), need_weights=st.booleans(), zero_attn=st.booleans())
def test_live_layer_agrees(number: int, need_weights: bool, zero_attn: bool) -> None:
    """Each example is 32 random masks, exported, given to torch, imported and evaluated."""
    rng = np.random.default_rng(number)
    layer = module(False, zero_attn)
    layer.batch_first = True
    params, semantics = from_module(layer)
    inputs = [draw(B, length, D, seed=int(rng.integers(2**31))) for length in (T, S, S)]
    made, expected = [], []
    for _ in range(32):
        kinds = {k for k in ("causal", "offset", "padding", "array", "heads") if rng.random() < 0.3}
        mask = random_mask(int(rng.integers(2**32)), kinds, 0.3)
        mask = replace(mask, query_padding=None)
        bias = random_bias(AXES[rng.integers(len(AXES))], int(rng.integers(2**32)))
        arguments = layer_masks.export_masks(mask, bias, add_zero_attn=zero_attn, **SIZES)
        arguments["need_weights"] = need_weights
        made.append(layer_masks.import_masks(num_heads=N, add_zero_attn=zero_attn, **arguments))
        live = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
        expected.append(call(layer, *inputs, **live))
    answer = multi_head_attention(
        params,
        *(np.broadcast_to(to_numpy(x), (len(made), *x.shape)) for x in inputs),
        semantics=Semantics.torch(
            "weights" if need_weights else "sdpa", add_zero_attn=semantics.add_zero_attn
        ),
        return_weights=True,
        **stacked(made, int(zero_attn), T),
    )
    out, weights = map(np.asarray, answer)
    for c, theirs in enumerate(expected):
        check((out[c], weights[c]), theirs, slice(None), f"mask {c}")


@seed(SEED)
@few
@given(number=st.integers(0, 2**32 - 1))
def test_live_sdpa_agrees(number: int) -> None:
    """Each example is 32 random masks, exported, given to torch, and evaluated as they were."""
    rng = np.random.default_rng(number)
    query, key, value = (draw(B, N, n, H, seed=int(rng.integers(2**31))) for n in (T, S, S))
    masks, added_to, expected = [], [], []
    for _ in range(32):
        kinds = {k for k in ("causal", "lengths", "padding", "heads") if rng.random() < 0.3}
        mask = random_mask(int(rng.integers(2**32)), kinds, 0.3)
        bias = random_bias(AXES[rng.integers(len(AXES))], int(rng.integers(2**32)))
        arguments = sdpa.export_masks(mask, bias, **SIZES)
        live = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **live)
        masks.append(pairs(mask))
        added_to.append(np.broadcast_to(np.float32(0) if bias is None else bias, (B, N, T, S)))
        expected.append(to_numpy(out.transpose(1, 2)))
    heads = [np.tile(to_numpy(x.transpose(1, 2)), (32, 1, 1, 1)) for x in (query, key, value)]
    actual = dot_product_attention(
        heads[0], heads[1], heads[2], np.concatenate(added_to), np.concatenate(masks)
    )
    assert_close(actual, np.concatenate(expected), factor=FACTOR)


def test_structure_goes_to_the_structured_argument() -> None:
    keys = np.array([3, 7, 1])
    lengths = layer_masks.export_masks(Mask.lengths(key_value=keys), **SIZES)
    np.testing.assert_array_equal(lengths["key_padding_mask"], np.arange(S) >= keys[:, None])
    assert list(lengths) == ["key_padding_mask"]
    causal = layer_masks.export_masks(Mask.causal(), **SIZES)
    np.testing.assert_array_equal(causal["attn_mask"], ~np.tri(T, S, dtype=bool))
    assert causal["is_causal"] is True
    for other in (
        layer_masks.export_masks(Mask.causal(offset=S - T), **SIZES),
        layer_masks.export_masks(Mask.causal(), add_bias_kv=True, **SIZES),
        layer_masks.export_masks(Mask.causal(), np.ones((T, S), "f"), **SIZES),
        layer_masks.export_masks(Mask.causal() & Mask.lengths(key_value=keys), **SIZES),
    ):
        assert "is_causal" not in other
    heads = np.ones((N, T, S), bool)
    heads[0, 1] = False
    alone = {**SIZES, "batch_size": None}
    assert layer_masks.export_masks(heads, **SIZES)["attn_mask"].shape == (B * N, T, S)
    assert layer_masks.export_masks(heads, **alone)["attn_mask"].shape == (N, T, S)
    unbatched = layer_masks.export_masks(Mask.padding(key_value=heads[0, 0]), **alone)
    assert unbatched["key_padding_mask"].shape == (S,)
    assert layer_masks.export_masks(**SIZES) == {}


def test_hidden_extra_positions_come_from_the_triangle_alone() -> None:
    """What `is_causal` does on the path without weights is exported as it came; no other way."""
    blocked = ~np.tri(T, S, dtype=bool)
    made: dict[str, Any] = {"attn_mask": blocked, "is_causal": True, "need_weights": False}
    flags: dict[str, Any] = {"add_bias_kv": True, "add_zero_attn": True}
    mask, bias = layer_masks.import_masks(**made, **flags)
    assert mask is not None
    assert mask.array is not None
    np.testing.assert_array_equal(mask.array, np.tri(T, S + 2, dtype=bool)[None, None])
    again = layer_masks.export_masks(mask, bias, **flags, **SIZES)
    assert again.keys() == made.keys()
    np.testing.assert_array_equal(again["attn_mask"], blocked)
    assert (again["is_causal"], again["need_weights"]) == (True, False)
    hidden = np.ones((T, S + 2), bool)
    visible = layer_masks.export_masks(Mask.dense(hidden), **flags, **SIZES)
    assert not visible["attn_mask"].any()
    hidden[1, -1] = False
    with pytest.raises(ValueError, match="mask decides about the 2 extra positions"):
        layer_masks.export_masks(hidden, **flags, **SIZES)
    with pytest.raises(ValueError, match="bias decides about the 2 extra positions"):
        layer_masks.export_masks(None, np.ones((T, S + 2), "f"), **flags, **SIZES)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"mask: expected axes"):
        layer_masks.export_masks(np.ones((T, S + 1), bool), **SIZES)
    with pytest.raises(ValueError, match=r"bias: expected axes"):
        layer_masks.export_masks(None, np.ones((B + 1, 1, T, S), "f"), **SIZES)
    with pytest.raises(TypeError, match="bias must be floating"):
        layer_masks.export_masks(None, np.ones((T, S), np.int32), **SIZES)


def test_wide_floats_are_not_rounded() -> None:
    bias = np.full((T, S), 1 / 3)
    made = layer_masks.export_masks(None, bias, **SIZES)
    assert made["attn_mask"].dtype == np.float64
    np.testing.assert_array_equal(made["attn_mask"], bias)
    assert sdpa.export_masks(None, bias, **SIZES)["attn_mask"].dtype == np.float64
