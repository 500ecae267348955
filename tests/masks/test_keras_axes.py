"""Masks of Keras layers that attend over other axes than the second of three, against live Keras."""

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

from jaxmha import Mask, Semantics, multi_head_attention
from jaxmha.converters.keras import from_module, to_module
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.masks.keras import import_masks
from tests.masks.draws import numbers
from tests.promotion import foreign
from tests.tolerance import assert_close

B, N, D, H = 3, 2, 13, 11
FACTOR = 0.5  # 16 floors of float32 are 1e-6 of the scale
X, SHORT = 3, 4  # an axis as long as the batch: a mask on the wrong axis would fit
ALONG: dict[str, tuple[tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "value": ((2,), {"value_mask": (B, SHORT)}),
    "query": ((2,), {"query_mask": (B, SHORT)}),
    "pairs": ((2,), {"attention_mask": (B, SHORT, SHORT)}),
    "pairs of every row": ((2,), {"attention_mask": (B, X, SHORT, SHORT)}),
    "first axis": ((1,), {"value_mask": (B, X), "attention_mask": (B, X, X)}),
    "two axes": ((1, 2), {"attention_mask": (B, X, SHORT, X, SHORT)}),
}


@pytest.mark.parametrize("name", ALONG)
def test_masks_of_attention_over_other_axes(name: str) -> None:
    axes, shapes = ALONG[name]
    rng, x = np.random.default_rng(0), numbers(B, X, SHORT, D)
    masks = {key: rng.random(shape) < 0.7 for key, shape in shapes.items()}
    with foreign():
        made = keras.layers.MultiHeadAttention(N, H, attention_axes=axes)
        made.build(x.shape, x.shape)
        given, call = keras.ops.convert_to_tensor(x), dict(masks)
        if "query_mask" in call:
            given._keras_mask = call.pop("query_mask")
        out, _ = made(given, x, return_attention_scores=True, **call)
    params, semantics = from_module(made)
    found = ours_along(masks, semantics, x.ndim, implicit="query_mask" in masks)
    got = multi_head_attention(
        params, x, mask=found, semantics=replace(semantics, fully_masked="zero")
    )
    assert_close(got, to_numpy(out), factor=FACTOR)


def ours_along(masks: dict[str, Any], semantics: Semantics, rank: int, **more: Any) -> Any:
    axes = semantics.attention_axes
    return import_masks(**masks, attention_axes=axes, input_axes=rank, **more)[0]


def test_what_keras_reads_along_other_axes_is_refused() -> None:
    pairs = np.ones((B, X, SHORT, SHORT), bool)
    for options, why in (
        ({"use_causal_mask": True}, "positions of use_causal_mask and sliding_window from axis 1"),
        ({"sliding_window": 2}, "positions of use_causal_mask and sliding_window from axis 1"),
        ({"attention_mask": pairs, "value_mask": np.ones((B, SHORT))}, "pass it within attention_"),
        ({"attention_mask": np.ones(SHORT)}, r"expected 2 to 5 axes .* got shape \(4,\)"),
    ):
        with pytest.raises(ValueError, match=why):
            import_masks(**options, attention_axes=(2,), input_axes=4)
    with pytest.raises(ValueError, match="value_mask: keras reads it along other axes"):
        import_masks(value_mask=np.ones((B, X)), attention_axes=(1, 2), input_axes=4)
    mask, _ = import_masks(use_causal_mask=True, attention_axes=(1,), input_axes=4)
    assert mask == Mask.causal()


@pytest.mark.parametrize("axes", [(2,), (-2,), (1, 2), (1,)])
def test_a_window_over_other_axes_than_the_first_is_refused(axes: tuple[int, ...]) -> None:
    """Keras ignores it where axis 1 has size 1, and fails where that has another size."""
    x, sizes = numbers(B, 1, SHORT, D), (B, X, SHORT, D)
    with foreign():
        windowed, plain = (
            keras.layers.MultiHeadAttention(N, H, attention_axes=axes, sliding_window=window)
            for window in (2, None)
        )
        for layer in (windowed, plain):
            layer.build(sizes, sizes)
        if axes == (2,):
            plain.set_weights([to_numpy(w) for w in windowed.weights])
            np.testing.assert_array_equal(to_numpy(windowed(x, x)), to_numpy(plain(x, x)))
    params, semantics = from_module(plain)
    semantics = replace(semantics, local_window_size=(1, 1))
    if axes == (1,):
        assert from_module(windowed)[1] == semantics
        assert to_module(params, semantics).get_config()["sliding_window"] == 2
        return
    for refused in (lambda: from_module(windowed), lambda: to_module(params, semantics)):
        with pytest.raises(ValueError, match=r"sliding_window=2 with .* its window for axis 1"):
            refused()
