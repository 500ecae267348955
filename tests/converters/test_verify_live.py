"""Live layers and models are compared by what they compute, also where they ignore masks or give NaN."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as framework

from jaxmha import Semantics
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.verify import comparison, load_block, page_facts
from tests import drawn
from tests.converters import layers
from tests.converters.command_line import cli
from tests.converters.layers import Config
from tests.converters.test_verify import report, torch_config
from tests.promotion import foreign


@pytest.mark.slow_variants("linen*", "keras*", "nnx*")
@pytest.mark.parametrize("config", layers.cases())
def test_every_layer_is_the_same_as_its_parameters(config: Config) -> None:
    live = layers.build(config)
    converter = {"torch": torch, "keras": keras, "linen": flax, "nnx": flax}[config.framework]
    found = report(live, converter.from_module(*(live if isinstance(live, tuple) else (live,))))
    assert found.same, str(found)
    assert set(found.errors) == {"no mask", "padding", "causal"}
    assert all(0 < error < 100 for pair in found.errors.values() for error in pair)


def copied(layer: Any, forward: Any) -> Any:
    """The layer with another `forward`, which is given torch's own."""

    class Copied(framework.nn.MultiheadAttention):
        def forward(self, *given: Any, **options: Any) -> Any:
            return forward(super().forward, *given, **options)

    found = Copied(torch_config.Dq, torch_config.N, batch_first=True)
    found.load_state_dict(layer.state_dict())
    return found.eval()


def test_a_layer_that_ignores_its_mask_is_caught(layer: Any) -> None:
    careless = copied(layer, lambda forward, *given, **masks: forward(*given))
    found = report(layer, careless)
    assert not found.differences
    assert not found.same
    assert found.errors["no mask"][1] < 100
    assert found.errors["padding"][1] > 1000
    assert found.departs is not None
    assert "a live layer computes something else" in found.departs


def test_whole_torch_encoder() -> None:
    framework.manual_seed(0)
    block = framework.nn.TransformerEncoderLayer(21, 3, 17, batch_first=True)
    encoder = framework.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
    found = comparison.compare(encoder, encoder.state_dict())
    assert [b.a for b in found.blocks] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert found.same
    with framework.no_grad():
        state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
        state["layers.1.self_attn.in_proj_bias"][4] += 1
    found = comparison.compare(encoder, state)
    assert [b.same for b in found.blocks] == [True, False]
    assert found.blocks[1].differences[0].leaf == "query.bias"


# Keras' own variables have an __array__ of before NumPy 2.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras_functional_model() -> None:
    import keras as framework

    def model() -> Any:
        inputs = framework.Input((7, 15))
        x = framework.layers.MultiHeadAttention(3, 5, name="first")(inputs, inputs)
        x = framework.layers.Dense(15)(x)
        return framework.Model(
            inputs, framework.layers.MultiHeadAttention(3, 5, name="second")(x, x)
        )

    framework.utils.set_random_seed(0)
    with foreign():
        a, b = model(), model()
    b.set_weights(a.get_weights())
    found = comparison.compare(a, b)
    assert [block.a for block in found.blocks] == ["first", "second"]
    assert found.same, str(found)
    b.get_layer("second").value_dense.bias.assign(np.full((3, 5), 0.5, np.float32))
    assert [block.same for block in comparison.compare(a, b).blocks] == [True, False]


def test_rows_whose_window_leaves_no_valid_key_are_not_compared() -> None:
    """Frameworks differ in their outputs for these rows."""
    params = drawn.params(num_heads=3, features=15)
    given = params, Semantics(fully_masked="mean", local_window_size=(2, 0))
    assert report(given, given).same
    found = report(given, (params, replace(given[1], local_window_size=(3, 0))))
    assert not found.same
    assert found.departs is not None
    assert "probabilities" in found.departs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_keras_layer_with_a_window_is_the_same_as_itself() -> None:
    """Its rows without a key are not zeros."""
    import keras as framework

    layer = framework.layers.GroupQueryAttention(5, 6, 3, sliding_window=3)
    layer.build((None, 7, 11), (None, 7, 11))
    assert report(layer, layer).same
    assert report(layer, keras.from_module(layer)).same


@pytest.mark.slow
def test_nnx_model_with_two_layers() -> None:
    from flax import nnx

    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self, seed: int) -> None:
            rngs = nnx.Rngs(seed)
            self.a = nnx.MultiHeadAttention(3, 15, decode=False, rngs=rngs)
            self.between = nnx.Linear(15, 15, rngs=rngs)
            self.b = nnx.MultiHeadAttention(5, 15, decode=False, rngs=rngs)

    model = Model(0)
    found = comparison.compare(model, Model(0))
    assert sorted(block.a for block in found.blocks) == ["a", "b"]
    assert found.same, str(found)
    assert not comparison.compare(model, Model(1)).same


def test_a_forward_that_gives_nan_is_never_alike(layer: Any) -> None:
    def spoiled(forward: Any, *given: Any, **masks: Any) -> Any:
        out, weights = forward(*given, **masks)
        out[0, 0, 0] = float("nan")
        return out, weights

    broken = copied(layer, spoiled)
    for pair in ((layer, broken), (broken, layer), (broken, broken)):
        found = report(*pair)
        assert not found.differences
        assert not found.same
        assert found.departs is not None
        assert "a live layer computes something else" in found.departs


def test_a_mask_ignored_on_both_sides_is_noticed(layer: Any) -> None:
    careless = copied(layer, lambda forward, *given, **masks: forward(*given))
    found = report(careless, careless)
    assert not found.differences
    assert not found.same
    assert max(found.errors["no mask"]) < 100 < min(found.errors["padding"])
    assert found.explanation == "mask ignored"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_blocks_of_one_name(tmp_path: Path) -> None:
    """Their paths name them, in models and in files; another block keeps its name."""
    import keras as framework

    def model(count: int) -> Any:
        whole = x = framework.Input((7, 15))
        for i in range(count):
            inner = framework.Input((7, 15))
            name = "own" if i == 2 else "same"
            out = framework.layers.MultiHeadAttention(3, 5, name=name)(inner, inner)
            x = framework.Model(inner, out, name=f"part_{i}")(x)
        return framework.Model(whole, x)

    with foreign():
        two, three = model(2), model(3)
    a, b = (tmp_path / f"{name}.weights.h5" for name in "ab")
    two.save_weights(a)
    found = comparison.compare(two, a)
    first, second = (pair.a for pair in found.blocks)
    assert first != second
    assert [pair.b for pair in found.blocks] == [first, second]
    assert found.same
    assert not found.notes
    more = comparison.compare(a, three)
    assert not more.same
    assert len(more.blocks) == 2
    three.save_weights(tmp_path / "three.weights.h5")
    assert load_block.read(tmp_path / "three.weights.h5", "own").name == "own"
    with foreign():
        two.set_weights([x + (i == 0) for i, x in enumerate(two.get_weights())])
    two.save_weights(b)
    done = cli("diff", a, b, "--json")
    blocks = json.loads(done.stdout)["blocks"]
    assert (done.exit_code, {name: one["same"] for name, one in blocks.items()}) == (
        1,
        {first: False, second: True},
    )
    assert cli("diff", a, b, "--block", second).exit_code == 0
    tensors = page_facts.read(a, comparison.compare(a, b)).tensors
    assert [x.name.startswith(first) for x in tensors if x.result != page_facts.SAME] == [True]
    assert load_block.read(a, first).name == first
    assert all(name in cli("inspect", a).stdout for name in (first, second))
