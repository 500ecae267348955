"""Layers are asked about if their automatic names say nothing of the order of the calls."""

# mypy: disable-error-code="misc, no-untyped-call"
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers as kl

from jaxmha.converters import match
from jaxmha.converters.matching import Plan
from tests.match import keras_encoders
from tests.promotion import foreign

pytestmark = [
    pytest.mark.usefixtures("implicit_promotion"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras
]
D, F = 5, 7
X = np.ones((2, D), np.float32)
encoders: Any = keras_encoders


class Attributes(keras.Model):
    """Keras files the attributes behind `layers` in the alphabet by the order of their making."""

    def __init__(self) -> None:
        super().__init__()
        self.proj2, self.proj1 = kl.Dense(D), kl.Dense(D)

    def call(self, x: Any) -> Any:
        return self.proj2(self.proj1(x))


class Norms(keras.Model):
    """A block of which two norms are numbered against the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2, self.norm1 = kl.LayerNormalization(), kl.LayerNormalization()
        self.up = kl.Dense(F)
        self.widen = kl.Dense(D)

    def call(self, x: Any) -> Any:
        return self.norm2(self.widen(self.up(self.norm1(x))))


class Towers(keras.Model):
    """Two towers of two layers; the second is made first."""

    def __init__(self) -> None:
        super().__init__()
        self.tower2, self.tower1 = tower(), tower()

    def call(self, x: Any) -> Any:
        return self.tower2(self.tower1(x))


class InDict(keras.Model):
    """Layers of a dict are numbered as they were put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.d = {"two": kl.Dense(D), "one": kl.Dense(D)}

    def call(self, x: Any) -> Any:
        return self.d["two"](self.d["one"](x))


class InList(keras.Model):
    """Layers of a list are in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = [kl.Dense(D) for _ in range(3)]

    def call(self, x: Any) -> Any:
        for layer in self.chain:
            x = layer(x)
        return x


def tower() -> Any:
    return keras.Sequential([keras.Input((D,)), kl.Dense(F), kl.Dense(D)])


def blocks(make: Callable[[], Any], count: int = 3) -> Any:
    """A functional model of blocks in series."""
    x = start = keras.Input((D,))
    for _ in range(count):
        x = make()(x)
    return keras.Model(start, x)


def called(model: Any) -> Any:
    model(X)
    return model


def of_torch(**layers: Any) -> Any:
    """A torch module of these layers."""
    return torch.nn.ModuleDict(layers)


def linears(*names: str) -> Any:
    return of_torch(**{name: torch.nn.Linear(D, D) for name in names})


def pair() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(D, F), torch.nn.Linear(F, D))


def norms() -> Any:
    return of_torch(
        norm1=torch.nn.LayerNorm(D),
        norm2=torch.nn.LayerNorm(D),
        up=torch.nn.Linear(D, F),
        widen=torch.nn.Linear(F, D),
    )


def several(count: int, make: Callable[[], Any]) -> Any:
    return of_torch(blocks=torch.nn.ModuleList(make() for _ in range(count)))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "attributes": (lambda: called(Attributes()), lambda: linears("proj1", "proj2")),
    "norms": (lambda: blocks(Norms, 2), lambda: several(2, norms)),
    "towers": (lambda: called(Towers()), lambda: of_torch(tower1=pair(), tower2=pair())),
    "dict": (lambda: called(InDict()), lambda: linears("fc1", "fc2")),
    "experts": (lambda: encoders.experts(3), lambda: several(3, bare_pair)),
}


def bare_pair() -> Any:
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(3, 5, bias=False), linear(5, 3, bias=False))


def as_dict(model: Any) -> dict[str, Any]:
    return {one.path: np.asarray(one) for one in model.weights}


def as_file(model: Any, folder: Path) -> Path:
    model.save_weights(folder / "m.weights.h5")
    return folder / "m.weights.h5"


def asks(plan: Plan) -> bool:
    """True if no line has been decided by numbers, and something is asked."""
    return bool(plan.questions) and not any("numbers" in line.reason for line in plan.lines)


@foreign()
@pytest.mark.parametrize("name", MODELS)
def test_automatic_numbers_are_no_order(name: str, tmp_path: Path) -> None:
    """Neither in the live model nor in its dict of variables nor in its file."""
    make, other = MODELS[name]
    model, target = make(), other()
    assert asks(match(model, target))
    assert asks(match(target, model))
    assert asks(match(as_dict(model), target))
    assert asks(match(as_file(model, tmp_path), target))


@foreign()
def test_a_file_has_no_graph(tmp_path: Path) -> None:
    """The order is known from the live model only."""
    model, target = blocks(tower), several(3, pair)
    assert match(model, target).questions == ()
    for source in (as_dict(model), as_file(model, tmp_path)):
        plan = match(source, target)
        assert plan.lines == ()
        assert "match the live model" in plan.questions[0].reason


@foreign()
def test_a_file_of_the_same_model_is_matched(tmp_path: Path) -> None:
    """The names of all arrays are those of the file that the target would write."""
    chain = [keras.Sequential([keras.Input((D,)), kl.Dense(D), kl.Dense(D)]) for _ in range(2)]
    assert match(as_file(chain[0], tmp_path), chain[1]).questions == ()


@foreign()
def test_a_line_says_that_numbers_are_taken_as_the_order() -> None:
    """All norms have one shape: only a name shows the last."""
    x = start = keras.Input((D,))
    for _ in range(2):
        x = kl.Dense(D)(kl.LayerNormalization()(x))
    model = keras.Model(start, kl.LayerNormalization()(x))
    layers = several(2, lambda: of_torch(norm=torch.nn.LayerNorm(D), fc=torch.nn.Linear(D, D)))
    layers["norm"] = torch.nn.LayerNorm(D)
    lines = match(model, layers).lines
    assert {line.confidence for line in lines} == {"by name"}
    for line in lines:
        assert "the order of their numbers" in line.reason
        assert ("`norm` is taken as the last" in line.reason) == ("norm" in line.target)


@foreign()
def test_the_order_of_a_list_is_known() -> None:
    model = called(InList())
    plan = match(model, linears("fc1", "fc2", "fc3"))
    assert plan.questions == ()
    (kernel,) = (line for line in plan.lines if line.target == "fc1.weight")
    assert kernel.sources == ("chain/dense/kernel",)


@pytest.mark.parametrize("names", [("linear_1", "linear_2", "linear"), ("up_1", "up")])
@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(D, D), pair], ids=["layer", "block"])
def test_a_name_without_a_number_is_no_first_layer_of_torch(
    names: tuple[str, ...], make: Callable[[], Any]
) -> None:
    """In names that a user has given, `linear` may stand behind `linear_1` and `linear_2`."""
    numbered = of_torch(**{f"fc{n}": make() for n, _ in enumerate(names)})
    source = of_torch(**{name: make() for name in names})
    for one in (source, source.state_dict()):
        assert match(one, numbered).questions
    assert match(numbered, source).questions


def test_a_list_that_begins_at_another_number_is_no_axis_of_stacked_layers() -> None:
    from transformers import ResNetConfig, ResNetModel

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [3, 4, 3]}
    with torch.device("meta"):
        model = ResNetModel(ResNetConfig(**sizes, layer_type="bottleneck"))
    plan = match(model, model)
    assert not plan.questions
    assert len(plan.lines) > 40
    assert all(line.sources == (line.target,) for line in plan.lines)
