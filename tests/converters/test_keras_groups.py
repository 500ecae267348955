"""Keras loads by group: files are compared by it, and a template gives it after every format."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparison
from tests.converters.command_line import cli, succeeds
from tests.converters.test_by_hand import keras_class, torch_class
from tests.promotion import foreign

D, N = 8, 2
X = np.random.default_rng(0).normal(size=(1, 3, D)).astype("f")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def drawn(model: Any, by_name: bool) -> Any:
    """Values by the layer's name, or in the order of the weights."""
    rng = np.random.default_rng(0)
    for layer in model.layers:
        own = np.random.default_rng(sum(map(ord, layer.name))) if by_name else rng
        layer.set_weights([own.normal(size=w.shape).astype("f") for w in layer.get_weights()])
    return model


def functional(*names: str, by_name: bool = True, norms: bool = False) -> Any:
    """Attention, and dense layers or norms of these names; without names Keras counts."""
    kind = (lambda **x: keras.layers.LayerNormalization(**x)) if norms else None
    x = inputs = keras.Input((3, D))
    with foreign():
        x = keras.layers.MultiHeadAttention(N, D // N, **({"name": "attn"} if names else {}))(x, x)
        for name in names or (None, None):
            options = {} if name is None else {"name": name}
            x = kind(**options)(x) if kind else keras.layers.Dense(D, **options)(x)
        return drawn(keras.Model(inputs, x), by_name)


def subclassed() -> Any:
    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up = keras.layers.Dense(D)
            self.attn = keras.layers.MultiHeadAttention(N, D // N)
            self.down = keras.layers.Dense(D)

        def call(self, x: Any) -> Any:
            y = self.up(x)
            return self.down(self.attn(y, y))

    model = Model()
    with foreign():
        model(X)
        return drawn(model, by_name=False)


@pytest.mark.everyday(norms=[False])
@pytest.mark.parametrize("norms", [False, True])
def test_names_in_other_groups_are_other_layers(norms: bool, tmp_path: Path) -> None:
    """The same values by name, and other outputs of a model that loads both files."""
    made = functional("one", "two", norms=norms)
    for name, model in (("a", made), ("b", functional("two", "one", norms=norms))):
        model.save_weights(tmp_path / f"{name}.weights.h5")
    outputs = []
    with foreign():
        for name in "ab":
            made.load_weights(tmp_path / f"{name}.weights.h5")
            outputs.append(np.asarray(made(X)))
    assert not np.allclose(outputs[0], outputs[1])
    pipeline.convert(tmp_path / "a.weights.h5", tmp_path / "a.safetensors", to="flax")
    for first in ("a.weights.h5", "a.safetensors"):
        for command in ("verify", "diff"):
            done = cli(command, tmp_path / first, tmp_path / "b.weights.h5")
            assert done.exit_code == 1, done.output
            text = " ".join(done.stdout.split())
            assert "compared by group, as Keras loads them" in text
            group = "layer_normalization" if norms else "dense"
            assert f"layers/{group} is one and two" in text
        assert comparison.compare(tmp_path / first, tmp_path / "a.weights.h5").same


def test_names_alone_may_differ(tmp_path: Path) -> None:
    """Every group holds the same: each file gives the same outputs in either model."""
    for name, names in (("a", ("one", "two")), ("b", ("first", "second"))):
        functional(*names, by_name=False).save_weights(tmp_path / f"{name}.weights.h5")
    report = comparison.compare(tmp_path / "a.weights.h5", tmp_path / "b.weights.h5")
    assert report.same, report
    assert "layers/dense is one and first" in str(report)


@pytest.mark.slow_variants("*", "!subclassed-a.npz", "!functional-a.pt")
@pytest.mark.parametrize("name", ["a.npz", "a.pt", "a.orbax"])
@pytest.mark.parametrize("model", [functional, subclassed])
def test_a_template_fits_layers_that_keras_counted(model: Any, name: str, tmp_path: Path) -> None:
    """Counters go on: in another process the same layers are called dense_7 and dense_8."""
    made = model()
    source, back = tmp_path / "a.weights.h5", tmp_path / "b.weights.h5"
    made.save_weights(source)
    model().save_weights(tmp_path / "like.weights.h5")
    to = "torch" if name.endswith("pt") else "flax"
    pipeline.convert(source, tmp_path / name, to=to)
    like = ("--to", "keras", "--like", tmp_path / "like.weights.h5")
    done = succeeds(
        "convert", tmp_path / name, back, *like, *(["--num-heads", N] * (to == "torch"))
    )
    text = " ".join(done.output.split())
    assert "verified: " in text
    assert "check that the model creates" not in text
    with foreign():
        expected = np.asarray(made(X))
        made.set_weights([np.zeros_like(w) for w in made.get_weights()])
        made.load_weights(back)
        np.testing.assert_array_equal(np.asarray(made(X)), expected)


@pytest.mark.everyday(how=["attribute"])
@pytest.mark.parametrize("how", ["functional", "attribute"])
def test_a_class_of_torch_alone_fits_a_model_that_holds_the_class(how: str, tmp_path: Path) -> None:
    """Its names begin at the top, and no model of Keras but the class itself has them there."""
    import torch

    P, T = torch_class()(D, N), keras_class()
    torch.save(P.state_dict(), tmp_path / "a.pt")

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.attn = T(D, N)

        def call(self, x: Any) -> Any:
            return self.attn(x)

    with foreign():
        inputs = keras.Input((3, D))
        model = keras.Model(inputs, T(D, N)(inputs)) if how == "functional" else Model()
        model(X)
    model.save_weights(tmp_path / "like.weights.h5")
    target = tmp_path / "b.weights.h5"
    command = ("convert", tmp_path / "a.pt", target, "--to", "dense", "--num-heads", N)
    done = succeeds(*command)
    assert "a model that holds the class as a layer, name a file" in " ".join(done.stdout.split())
    with pytest.raises(ValueError, match="could not be loaded"), foreign():
        model.load_weights(target)
    done = succeeds(*command, "--force", "--like", tmp_path / "like.weights.h5")
    assert "the top of the file" not in " ".join(done.stdout.split())
    with foreign():
        model.load_weights(target)
    assert comparison.compare(model, P).same


def test_two_layers_without_a_counterpart_are_named(tmp_path: Path) -> None:
    functional("one", "two").save_weights(tmp_path / "a.weights.h5")
    functional("three", "four").save_weights(tmp_path / "like.weights.h5")
    like = ("--to", "keras", "--like", tmp_path / "like.weights.h5")
    pipeline.convert(tmp_path / "a.weights.h5", tmp_path / "a.npz", to="flax")
    done = cli("convert", tmp_path / "a.npz", tmp_path / "b.weights.h5", *like)
    assert done.exit_code == 2
    assert "no layer named 'one'; its layers are attn, four, three:" in done.stderr
