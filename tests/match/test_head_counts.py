"""A model of another head count than the source states is refused, and keeps its arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file

import jaxmha.flax.nnx
from jaxmha.converters import flax, keras
from jaxmha.converters import torch as torch_face
from jaxmha.converters.matching import match, prove

BERT = {"model_type": "bert", "num_attention_heads": 4, "hidden_size": 16}
COUNTS = r"source has 4 heads, and .*model has 2\b"


def ours(heads: int, features: int = 16) -> Any:
    return jaxmha.flax.nnx.MultiHeadAttention(heads, features, rngs=nnx.Rngs(0))


def theirs(heads: int) -> Any:
    return torch.nn.MultiheadAttention(16, heads, batch_first=True)


def bert_like(folder: Path, heads: int) -> Path:
    """One layer's attention with the names of BERT, next to its config.json."""
    rng = np.random.default_rng(3)
    at = "bert.encoder.layer.0.attention"
    names = (*(f"{at}.self.{x}" for x in ("query", "key", "value")), f"{at}.output.dense")
    arrays = {f"{x}.weight": rng.normal(size=(16, 16)).astype("f") for x in names}
    arrays |= {f"{x}.bias": rng.normal(size=16).astype("f") for x in names}
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(
        str(BERT | {"num_attention_heads": heads}).replace("'", '"')
    )
    return folder


@pytest.mark.parametrize("of", [nnx.MultiHeadAttention, None])
def test_a_wrong_count_of_a_target_is_refused_and_nothing_is_written(of: Any) -> None:
    model = ours(2) if of is None else of(2, 16, decode=False, rngs=nnx.Rngs(0))
    before = np.array(nnx.state(model)["query"]["kernel"].get_value())
    for call in (flax.load_into, lambda a, b: match(b, a), lambda a, b: prove(b, a)):
        with pytest.raises(ValueError, match=COUNTS):
            call(model, theirs(4))
    assert np.array_equal(before, nnx.state(model)["query"]["kernel"].get_value())


def test_counts_of_axes_alone_are_refused_too() -> None:
    variables = jaxmha.flax.nnx.MultiHeadAttention(2, 16, rngs=nnx.Rngs(0))
    for heads in (1, 2, 8):
        tree = nnx.to_pure_dict(nnx.state(ours(heads), nnx.Param))
        with pytest.raises(ValueError, match=rf"source has 4 heads, and .*model has {heads}\b"):
            match(theirs(4), tree)
        with pytest.raises(ValueError, match=rf"source has {heads} heads, and .*model has 4\b"):
            torch_face.load_into(theirs(4), tree)
    assert not match(theirs(2), nnx.state(variables, nnx.Param)).questions


def test_two_modules_without_axes_of_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=COUNTS):
        torch_face.load_into(theirs(2), theirs(4))


def test_keras_states_its_count() -> None:
    import keras as framework

    layer = framework.layers.MultiHeadAttention(2, 8)
    layer.build((None, 5, 16), (None, 5, 16))
    with pytest.raises(ValueError, match=COUNTS):
        keras.load_into(layer, theirs(4))


@pytest.mark.parametrize("heads", [2, 8])
def test_the_config_of_a_folder_states_the_count(tmp_path: Path, heads: int) -> None:
    source = bert_like(tmp_path, 4)
    with pytest.raises(
        ValueError, match=rf"attention.self of the source|source.* has 4 heads, .*{heads}"
    ):
        flax.load_into(ours(heads), source)
    assert prove(source, flax.load_into(ours(4), source)).same


def test_arrays_alone_state_no_count() -> None:
    flax.load_into(ours(2), dict(theirs(4).state_dict()))


class Grouped(torch.nn.Module):
    """Four query heads and two key heads of 3 features."""

    num_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = torch.nn.Linear(5, 12), torch.nn.Linear(12, 5)
        self.key, self.value = torch.nn.Linear(5, 6), torch.nn.Linear(5, 6)


@pytest.mark.parametrize(("heads", "fits"), [(4, True), (2, False)])
def test_fewer_key_heads_are_no_other_count(heads: int, fits: bool) -> None:
    features = 12 // heads
    shapes = {"query": (5, heads, features), "out": (heads, features, 5)}
    shapes |= dict.fromkeys(("key", "value"), (5, 6 // features, features))
    tree = {name: {"kernel": np.zeros(shape, "f")} for name, shape in shapes.items()}
    for name, shape in shapes.items():
        tree[name]["bias"] = np.zeros(shape[2:] if name == "out" else shape[1:], "f")
    if fits:
        assert not match(Grouped(), {"params": tree}).questions
        return
    with pytest.raises(ValueError, match=COUNTS):
        match(Grouped(), {"params": tree})


def test_a_property_that_raises_states_no_count() -> None:
    """As of configurations whose layers have different counts: the error is no AttributeError."""

    class Layer(torch.nn.Linear):
        @property
        def num_heads(self) -> int:
            raise RuntimeError("several")

    assert match(Layer(3, 5), Layer(3, 5)).lines
