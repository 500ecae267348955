"""Attention of classes written by hand, live and in files, goes through every command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import linen, nnx

from jaxmha import checkpoint
from jaxmha.converters import flax, keras, linear, torch
from jaxmha.converters.layout import by_hand
from jaxmha.converters.verify import attribution, comparison
from jaxmha.params import leaves
from tests.converters.command_line import succeeds
from tests.promotion import foreign

N, D = 2, 8
NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def keras_class(names: tuple[str, ...] = NAMES) -> Any:
    """A layer of Keras with dense layers as attributes, and no forward that is needed here."""
    import keras as framework

    class TensorFlowMultiHeadAttention(framework.layers.Layer):  # type: ignore[misc]
        def __init__(self, embed_dim: int, num_heads: int) -> None:
            super().__init__()
            self.num_heads = num_heads
            for name in names:
                setattr(self, name, framework.layers.Dense(embed_dim))

        def build(self, shape: Any) -> None:
            for name in names:
                getattr(self, name).build(shape)
            self.built = True

        def call(self, x: Any) -> Any:
            for name in names:
                x = getattr(self, name)(x)
            return x

    return TensorFlowMultiHeadAttention


def torch_class(names: tuple[str, ...] = NAMES) -> Any:
    import torch as framework

    class PyTorchMultiHeadAttention(framework.nn.Module):
        def __init__(self, embed_dim: int, num_heads: int) -> None:
            super().__init__()
            self.num_heads = num_heads
            for name in names:
                setattr(self, name, framework.nn.Linear(embed_dim, embed_dim))

    return PyTorchMultiHeadAttention


def subclassed() -> Any:
    import keras as framework

    class Model(framework.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up = framework.layers.Dense(D)
            self.attn = keras_class()(D, N)
            self.down = framework.layers.Dense(D)

        def call(self, x: Any) -> Any:
            return self.down(self.attn(self.up(x)))

    model = Model()
    with foreign():
        model(np.zeros((1, 3, D), "f"))
    return model


def functional() -> Any:
    import keras as framework

    inputs = framework.Input((3, D))
    with foreign():
        x = framework.layers.Dense(D, name="up")(inputs)
        return framework.Model(inputs, keras_class()(D, N)(keras_class()(D, N)(x)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of both classes, as their frameworks write them."""
    import torch as framework

    path = tmp_path_factory.mktemp("by_hand")
    for name, model in (("subclassed", subclassed()), ("functional", functional())):
        model.save_weights(path / f"{name}.weights.h5")
    functional().save(path / "functional.keras")
    framework.save(torch_class()(D, N).state_dict(), path / "torch.pt")
    return path


FILES = {
    "subclassed.weights.h5": 1,
    "functional.weights.h5": 2,
    "functional.keras": 2,
    "torch.pt": 1,
}


@pytest.mark.slow_variants("functional*")
@pytest.mark.parametrize("name", FILES)
def test_every_command_takes_the_file(folder: Path, name: str, tmp_path: Path) -> None:
    source, heads = folder / name, ("--num-heads", N)
    found = json.loads(succeeds("inspect", source, "--json").stdout)["blocks"]
    assert {block["layout"] for block in found} == {
        "linear" if name == "torch.pt" else "dense-file"
    }
    assert len(found) == FILES[name]
    other = tmp_path / "other.safetensors"
    to = "dense" if name == "torch.pt" else "linear"
    succeeds("plan", source, "--to", to, *heads)
    assert "verified" in succeeds("convert", source, other, "--to", to, *heads).stdout
    data = json.loads(succeeds("verify", source, other, *heads, "--json").stdout)
    assert (data["same"], data["not_compared"]) == (True, [])
    assert json.loads(succeeds("diff", source, other, *heads, "--json").stdout)["same"]
    succeeds("describe", source, *heads)


@pytest.mark.everyday(name=["subclassed"])
@pytest.mark.parametrize("name", ["subclassed", "functional"])
def test_files_of_keras_come_back_as_they_were(folder: Path, name: str, tmp_path: Path) -> None:
    """Under the paths that its model loads."""
    source, present, back = (
        folder / f"{name}.weights.h5",
        tmp_path / "a.pt",
        tmp_path / "b.weights.h5",
    )
    succeeds("convert", source, present, "--to", "linear", "--num-heads", N)
    succeeds("convert", present, back, "--to", "dense", "--num-heads", N)
    with checkpoint.open(source) as first, checkpoint.open(back) as last:
        named = {name for name in first if name.startswith("up")} | set(last)
        if name == "subclassed":
            assert set(first) == set(last)
            assert all(first[key].tobytes() == last[key].tobytes() for key in first)
        else:  # a name of the user's own is kept, and this is said
            assert named >= {"up/vars/0"}
            assert "layers/dense -> up" in " ".join(
                succeeds("plan", source, "--to", "linear", "--num-heads", N).stdout.split()
            )


def test_keras_loads_what_was_converted(folder: Path, tmp_path: Path) -> None:
    present, back = tmp_path / "a.pt", tmp_path / "b.weights.h5"
    succeeds(
        "convert", folder / "subclassed.weights.h5", present, "--to", "linear", "--num-heads", N
    )
    succeeds("convert", present, back, "--to", "dense", "--num-heads", N)
    model = subclassed()
    model.load_weights(back)
    assert comparison.compare(model, folder / "subclassed.weights.h5").same


def test_live_classes_are_read_and_compared() -> None:
    """The head count is an attribute of theirs."""
    P, T = torch_class()(D, N), keras_class()(D, N)
    T.build((None, 3, D))
    found = attribution.attribute(P, T)
    assert {part.name for part in found.parts} >= {"query weights", "zero bias"}
    assert "dropped bias" not in {part.name for part in found.parts}
    for name in NAMES:
        weights = [x.detach().numpy() for x in getattr(P, name).parameters()]
        getattr(T, name).set_weights([weights[0].T, weights[1]])
    report = comparison.compare(P, T)
    assert report.same, str(report)
    assert "is a class written by hand" in report.notes[0]
    assert attribution.attribute(P, T).same
    T.v_proj.kernel.assign(np.asarray(T.v_proj.kernel).T)
    (part,) = attribution.attribute(P, T).parts
    assert part.name == "transposed kernel"


@pytest.mark.slow_variants("*", "!names1", "!names6")
@pytest.mark.parametrize("names", [*by_hand.NAMES.values(), ("qkv", "proj")])
def test_other_names_in_every_framework(names: tuple[str, ...]) -> None:
    class Flax(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.heads = N
            for name in names:
                width = 3 * D if name == "qkv" else D
                setattr(self, name, nnx.Linear(D, width, rngs=nnx.Rngs(0)))

    module, layer = Flax(), torch_class(names)(D, N)
    if "qkv" in names:
        import torch as framework

        layer.qkv = framework.nn.Linear(D, 3 * D)
    framework_state = layer.state_dict()
    for name in names:
        dense = getattr(module, name)
        dense.kernel.set_value(framework_state[f"{name}.weight"].numpy().T)
        dense.bias.set_value(framework_state[f"{name}.bias"].numpy())
    report = comparison.compare(layer, module)
    assert report.same, str(report)


def test_nested_in_models_with_stock_attention() -> None:
    import torch as framework

    class Model(framework.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stock = framework.nn.MultiheadAttention(D, N)
            self.mine = torch_class()(D, N)
            self.norm = framework.nn.LayerNorm(D)

    model = Model()
    names = [block.a for block in comparison.compare(model, model).blocks]
    assert names == ["stock", "mine"]
    assert comparison.compare(model, model.state_dict()).same


def test_from_module_names_the_way_that_works() -> None:
    P, T = torch_class()(D, N), keras_class(("wq", "wk", "wv", "dense"))(D, N)
    T.build((None, 3, D))
    for converter, layer, shown in (
        (torch, P, "import_params(module.state_dict(), layout='linear', num_heads=2)"),
        (keras, T, "layout='dense-tutorial-file', num_heads=2)"),
    ):
        with pytest.raises(TypeError) as error:
            converter.from_module(layer)
        assert shown in str(error.value)
    params, _ = linear.import_params(P.state_dict(), layout="linear", num_heads=2)
    assert params.query.kernel.shape == (D, N, D // N)


def test_a_linen_class_of_ones_own() -> None:
    import jax

    class Mine(linen.Module):  # type: ignore[misc]
        num_heads: int = N

        @linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            for name in NAMES:
                x = linen.Dense(D, name=name)(x)
            return x

    module = Mine()
    variables = initialised(module, jax.random.key(0), np.zeros((1, 3, D), "f"))
    report = comparison.compare((module, variables), (module, variables))
    assert report.same
    assert report.blocks[0].num_heads == N
    with pytest.raises(TypeError, match=r"layout='dense', num_heads=2"):
        flax.from_module(module, variables)
    kernel = leaves(linear.import_params(flat(variables), num_heads=N)[0])["query.kernel"]
    assert np.asarray(kernel).shape == (D, N, D // N)


def initialised(module: Any, *arguments: Any) -> Any:
    with foreign():
        return module.init(*arguments)


def flat(variables: Any) -> dict[str, Any]:
    return {f"{a}/{b}": x for a, y in variables["params"].items() for b, x in y.items()}
