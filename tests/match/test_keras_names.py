"""Keras models with automatic names, matched with torch and Flax models in both directions."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras as library
import numpy as np
import pytest
import torch

from jaxmha.converters import equinox, flax, keras, match
from jaxmha.converters import torch as of_torch
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.matching import Line, Plan, prove
from tests.match import keras_encoders
from tests.promotion import foreign

pytestmark = [
    pytest.mark.usefixtures("implicit_promotion"),
    pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras
]
encoders: Any = keras_encoders
IDS, KERAS = encoders.IDS, encoders.KERAS
OTHERS: dict[str, Any] = {
    "torch": (encoders.OfTorch, of_torch.load_into),
    "nnx": (encoders.OfNnx, flax.load_into),
    "linen": (encoders.of_linen, flax.load_into),
}

# The linen module's last norm has the name of its class, which is asked about.
PAIRS = [x for x in itertools.product(KERAS, OTHERS) if x != ("functional", "linen")]


def proved(source: Any, model: Any, plan: Plan) -> bool:
    """True if both models have the same arrays and outputs."""
    proof = prove(source, model, plan, inputs=lambda _: (IDS,))
    assert proof.difference is not None
    return proof.same


def asked(plan: Plan) -> set[str]:
    """Names of the layers in questions, without numbers."""
    return {re.sub(r"[_.]?(\{_?i\}|\d+)", "", question.target) for question in plan.questions}


def block(*, pre: bool) -> Callable[[Any], Any]:
    return lambda x: encoders.flat_block(x, pre)


@foreign()
def test_a_functional_model_computes_what_the_source_computes() -> None:
    source, model = encoders.OfTorch(), KERAS["functional"]()
    keras.load_into(model, source)
    expected = source(torch.as_tensor(IDS)).detach().numpy()
    found = jax.jit(lambda ids: model(ids))(IDS)
    np.testing.assert_allclose(to_numpy(found), expected, atol=1e-5 * np.abs(expected).max())


@foreign()
@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_blocks_are_matched_in_both_directions(name: str, other: str) -> None:
    model, (make, load_into) = encoders.drawn(KERAS[name]()), OTHERS[other]
    source = make()
    onto = match(source, model)
    assert onto.questions == ()
    assert Plan.from_toml(onto.to_toml()).lines == onto.lines
    keras.load_into(model, source, onto)
    assert proved(source, model, onto)

    target = make()
    back = match(encoders.drawn(model), target)
    assert proved(model, load_into(target, model, back), back)


@foreign()
@pytest.mark.slow
@pytest.mark.parametrize("embed_norm", [False, True])
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("pre", [False, True])
def test_norms_before_and_after_the_blocks(pre: bool, final: bool, embed_norm: bool) -> None:
    source = encoders.OfTorch(pre, final, embed_norm)
    model = encoders.functional(block(pre=pre), final=final, embed_norm=embed_norm)
    plan = match(source, model)
    keras.load_into(model, source, plan)
    assert proved(source, model, plan)


@foreign()
@pytest.mark.everyday(name=["nested"])
@pytest.mark.parametrize("name", ["flat", "nested"])
def test_norms_of_parallel_branches_are_asked(name: str) -> None:
    """Keras numbers the norm of the MLP first, because its branch is longer."""
    block = encoders.parallel_block
    nested = name == "nested"
    model = encoders.functional((lambda x: encoders.model_of_block(block)(x)) if nested else block)
    layer = "layers/functional/layers" if nested else "layers"
    names = {f"{layer}/layer_normalization"}, {"layers.norm", *["norm"] * (not nested)}
    assert asked(match(encoders.OfTorch(), model)) == names[0]
    assert asked(match(model, encoders.OfTorch())) == names[1]


@foreign()
def test_parallel_blocks_are_asked() -> None:
    model = encoders.experts(encoders.BLOCKS)
    source = {
        f"{n}.{i}.weight": np.zeros(x) for n in range(3) for i, x in enumerate(((5, 3), (3, 5)))
    }
    first, _ = match(source, model).questions
    assert "parallel branches" in first.reason


@foreign()
@pytest.mark.slow
def test_a_model_of_another_order_is_seen_by_prove() -> None:
    """Norms of the embedding and of the output have the same shapes."""
    model, source = (
        encoders.functional(block(pre=False), final=False, embed_norm=True),
        encoders.OfTorch(),
    )
    plan = match(source, model)
    keras.load_into(model, source, plan)
    assert not proved(source, model, plan)


@foreign()
@pytest.mark.slow
def test_the_norm_of_a_class_name_is_asked() -> None:
    """`LayerNorm_0` of a linen module may stand before or after its blocks."""
    model = encoders.functional(block(pre=True))
    assert asked(match(encoders.of_linen(), model)) == {"layers/layer_normalization"}


def test_blocks_are_in_the_order_of_their_numbers() -> None:
    names = [f"encoder_{n}" for n in range(11)]
    source = {
        f"{name}/dense/kernel": np.full((3, 5), n, np.float32) for n, name in enumerate(names)
    }
    source = dict(sorted(source.items()))
    target = {"layers": [{"fc": {"kernel": np.zeros((3, 5), np.float32)}} for _ in names]}
    filled = equinox.load_into(target, source)
    assert [layer["fc"]["kernel"][0, 0] for layer in filled["layers"]] == list(range(11))
    (line,) = match(source, target).lines
    assert line.sources == ("encoder_{i}/dense/kernel",)


@foreign()
@pytest.mark.parametrize("file", ["m.keras", "m.weights.h5"])
def test_a_file_has_the_names_of_its_live_model(file: str, tmp_path: Path) -> None:
    """In questions, and in plans of either; names of the file are understood too."""
    x = inputs = library.Input((3, 5))
    for name in ("mu_0", "mu_1"):
        x = library.layers.LayerNormalization(name=name)(x)
    live = library.Model(inputs, x)
    live.weights[0].assign(range(5))
    (live.save if file == "m.keras" else live.save_weights)(tmp_path / file)
    norms = [{"scale": np.ones(5, "f"), "bias": np.zeros(5, "f")}] * 2
    target = {"left": norms[0], "right": norms[1]}
    plan = match(tmp_path / file, target)
    assert plan.questions == match(live, target).questions
    assert plan.questions[0].candidates == ("mu_0", "mu_1")
    group = "layers/layer_normalization{_i}/vars/"
    for scale, bias in (("mu_{i}/gamma", "mu_{i}/beta"), (f"{group}0", f"{group}1")):
        plan = Plan((Line("{i}/scale", (scale,)), Line("{i}/bias", (bias,))))
        made = equinox.load_into(norms, tmp_path / file, plan)
        assert [one["scale"][4] for one in made] == [4, 1]
