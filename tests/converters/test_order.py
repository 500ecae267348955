"""The order of layers in a .weights.h5 file, which Keras pairs by it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import checkpoint
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparands
from tests.converters.test_families import D, N, torch_model
from tests.tolerance import assert_close

S, T = 5, 7
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
NOTE = "check that the model creates its layers so"


def decoder(layers: int) -> tuple[Any, list[Any]]:
    """A functional Keras model of a post-norm decoder, and its attention as it was created."""
    import keras

    made = []
    inputs, memory = keras.Input((T, D)), keras.Input((S, D))
    x = inputs
    for _ in range(layers):
        for over in (None, memory):
            made.append(keras.layers.MultiHeadAttention(N, D // N))
            attended = made[-1](x, x if over is None else over)
            x = keras.layers.LayerNormalization(epsilon=1e-5)(x + attended)
        hidden = keras.layers.Dense(22, "relu")(x)
        x = keras.layers.LayerNormalization(epsilon=1e-5)(x + keras.layers.Dense(D)(hidden))
    return keras.Model([inputs, memory], x), made


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stock_keras_loads_a_decoder(layers: int, tmp_path: Path) -> None:
    state = torch_model("TransformerDecoder")
    state = {name: x for name, x in state.items() if int(name.split(".")[1]) < layers}
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    source, target = tmp_path / "a.pt", tmp_path / "a.weights.h5"
    torch.save(tensors, source)
    done = pipeline.convert(source, target, to="keras", num_heads=N)
    model, attention = decoder(layers)
    model.load_weights(target)
    names = [
        f"layers.{i}.{which}" for i in range(layers) for which in ("self_attn", "multihead_attn")
    ]
    assert [source for source, *_ in done.blocks] == names
    for name, layer in zip(names, attention, strict=True):
        kernel = to_numpy(layer.query_dense.kernel).reshape(D, D)
        expected = state[f"{name}.in_proj_weight"][:D].T
        np.testing.assert_array_equal(kernel, expected, err_msg=name)
    (note,) = [note for note in done.notes if NOTE in note]
    assert f"multi_head_attention: {', '.join(names)}: check" in note
    if layers == 1:
        return
    theirs = torch.nn.TransformerDecoder(
        torch.nn.TransformerDecoderLayer(D, N, 22, 0.0, batch_first=True), layers
    ).eval()
    theirs.load_state_dict(tensors)
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(2, length, D)).astype(np.float32) for length in (T, S))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(x), torch.from_numpy(y)).numpy()
    with comparands.exact_dtypes(np.dtype(np.float32)):
        assert_close(to_numpy(model([x, y])), expected, factor=8)


def test_the_note_is_in_the_plan_and_nowhere_else(tmp_path: Path) -> None:
    source = tmp_path / "a.npz"
    checkpoint.write(source, torch_model("TransformerDecoder"))
    resolved = pipeline.plan(source, to="keras", num_heads=N, in_file=True)[1]
    assert any(NOTE in note for note in resolved.notes)
    resolved = pipeline.plan(source, to="keras", num_heads=N)[1]
    assert not any(NOTE in note for note in resolved.notes)


def test_numbers_are_in_order_whatever_the_file_has(tmp_path: Path) -> None:
    layer = torch_model("TransformerDecoderLayer")
    state = {f"layers.{i}.{name}": x for i in (10, 2, 0) for name, x in layer.items()}
    checkpoint.write(tmp_path / "a.npz", state)
    made = pipeline.plan(tmp_path / "a.npz", to="keras", num_heads=N, in_file=True)[0]
    targets = {step.source: step.target for step in made.steps}
    for place, i in enumerate((0, 2, 10)):
        for which, number in (("self_attn", 2 * place), ("multihead_attn", 2 * place + 1)):
            ending = f"_{number}" * (number > 0)
            assert targets[f"layers.{i}.{which}"] == f"layers/multi_head_attention{ending}"
