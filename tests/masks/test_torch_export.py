"""Which arguments of torch say what; random masks are in test_random_masks.py."""

from typing import Any

import numpy as np
import pytest

from jaxmha import Mask
from jaxmha.converters.masks import sdpa
from jaxmha.converters.masks import torch as layer_masks
from tests.masks.draws import USUAL, B, N, S, T

SIZES: dict[str, Any] = USUAL.named()


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
    """The effect of `is_causal` on the path without weights is exported as it came; no other way."""
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
    with pytest.raises(ValueError, match="mask decides about the 2 extra positions"):
        layer_masks.export_masks(mask, np.ones((T, S), "f"), **flags, **SIZES)
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
