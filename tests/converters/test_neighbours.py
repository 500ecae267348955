"""Layers beside attention: the tables against live layers, and how each kind is told."""

from typing import Any

import numpy as np
import pytest

from jaxmha.converters import migrate, modules, neighbours
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.neighbours import CANONICAL, CONVENTIONS, Convention

I, O, V, D = 3, 5, 7, 11
SIZES = {"Di": I, "Do": O, "V": V, "D": D, "y": 2, "x": 13}
EVERY = [(c, kind) for c in CONVENTIONS for kind in c.kinds]
IDS = [f"{c.name}-{kind}" for c, kind in EVERY]


def arrays(convention: Convention, kind: str, prefix: str = "a") -> dict[str, NDArray]:
    """A layer of random numbers."""
    rng = np.random.default_rng(0)
    return {
        f"{prefix}{convention.separator}{entry.key}": rng.normal(
            size=neighbours.shape(entry, SIZES)
        ).astype(np.float32)
        for entry in convention.kinds[kind]
    }


@pytest.mark.parametrize(("convention", "kind"), EVERY, ids=IDS)
def test_round_trip(convention: Convention, kind: str) -> None:
    state = arrays(convention, kind)
    for entry in convention.kinds[kind]:
        array = state[f"a{convention.separator}{entry.key}"]
        leaf = neighbours.unpack(entry, array)
        assert leaf.shape == tuple(SIZES[a] for a in CANONICAL[entry.leaves[0]].split())
        back = neighbours.pack(entry, leaf)
        assert (back.shape, back.tobytes()) == (array.shape, array.tobytes())


def torch_layers() -> dict[str, Any]:
    import torch

    made = {
        "linear": torch.nn.Linear(I, O),
        "norm": torch.nn.LayerNorm(D),
        "rmsnorm": torch.nn.RMSNorm(D),
        "embedding": torch.nn.Embedding(V, D),
        "convolution": torch.nn.Conv2d(I, O, (2, 13)),
    }
    return {k: {n: to_numpy(p) for n, p in m.named_parameters()} for k, m in made.items()}


def flax_layers() -> dict[str, Any]:
    from flax import nnx

    rngs = nnx.Rngs(0)
    made = {
        "linear": nnx.Linear(I, O, rngs=rngs),
        "norm": nnx.LayerNorm(D, rngs=rngs),
        "embedding": nnx.Embed(V, D, rngs=rngs),
        "convolution": nnx.Conv(I, O, (2, 13), rngs=rngs),
    }
    assert nnx.state(nnx.RMSNorm(D, rngs=rngs)).keys() == {"scale"}  # a norm without a bias
    assert (nnx.LayerNorm(D, rngs=rngs).epsilon, nnx.RMSNorm(D, rngs=rngs).epsilon) == (1e-6, 1e-6)
    return {k: dict(nnx.to_pure_dict(nnx.state(m))) for k, m in made.items()}


def keras_layers() -> dict[str, Any]:
    import keras

    made = {
        "linear": (keras.layers.Dense(O), (None, I)),
        "norm": (keras.layers.LayerNormalization(), (None, D)),
        "rmsnorm": (keras.layers.RMSNormalization(), (None, D)),
        "embedding": (keras.layers.Embedding(V, D), (None, 2)),
        "convolution": (keras.layers.Conv2D(O, (2, 13)), (None, 5, 17, I)),
    }
    assert (made["norm"][0].epsilon, made["rmsnorm"][0].epsilon) == (1e-3, 1e-6)
    for layer, shape in made.values():
        layer.build(shape)
    return {k: {w.name: to_numpy(w) for w in layer.weights} for k, (layer, _) in made.items()}


def haiku_layers() -> dict[str, Any]:
    import haiku
    import jax

    def every(x: Any, y: Any) -> None:
        haiku.Linear(O)(x)
        haiku.LayerNorm(-1, True, True)(y)
        haiku.Embed(V, D)(np.zeros(2, np.int32))

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        made = jax.eval_shape(
            haiku.transform(every).init, jax.random.key(0), np.zeros((2, I)), np.zeros((2, D))
        )
    names = {"linear": "linear", "norm": "layer_norm", "embedding": "embed"}
    return {kind: made[name] for kind, name in names.items()}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("convention", "live"),
    [
        (neighbours.TORCH, torch_layers),
        (neighbours.FLAX, flax_layers),
        (neighbours.KERAS, keras_layers),
        (neighbours.HAIKU, haiku_layers),
    ],
    ids=["torch", "flax", "keras", "haiku"],
)
def test_names_and_shapes_are_those_of_live_layers(convention: Convention, live: Any) -> None:
    layers = live()
    assert set(layers) <= set(convention.kinds)
    for kind, variables in layers.items():
        expected = {e.key: neighbours.shape(e, SIZES) for e in convention.kinds[kind]}
        assert {name: tuple(v.shape) for name, v in variables.items()} == expected, kind


def test_torch_s_epsilon_is_the_default() -> None:
    import torch

    assert torch.nn.LayerNorm(D).eps == neighbours.TORCH.epsilon["norm"]
    assert torch.nn.RMSNorm(D).eps is None  # torch.finfo(float32).eps then
    assert torch.finfo(torch.float32).eps == neighbours.TORCH.epsilon["rmsnorm"]


@pytest.mark.parametrize("kind", ["linear", "norm", "embedding", "convolution"])
def test_flax_computes_what_torch_does(kind: str) -> None:
    """Which axis is which, by running both."""
    import torch
    from flax import nnx

    rng = np.random.default_rng(1)
    inputs: NDArray = {
        "linear": rng.normal(size=(2, I)),
        "norm": rng.normal(size=(2, D)),
        "embedding": np.array([3, 6]),
        "convolution": rng.normal(size=(1, I, 3, 14)),
    }[kind]
    inputs = inputs if kind == "embedding" else inputs.astype(np.float32)
    makers: dict[str, Any] = {
        "linear": (torch.nn.Linear(I, O), lambda r: nnx.Linear(I, O, rngs=r)),
        "norm": (torch.nn.LayerNorm(D), lambda r: nnx.LayerNorm(D, epsilon=1e-5, rngs=r)),
        "embedding": (torch.nn.Embedding(V, D), lambda r: nnx.Embed(V, D, rngs=r)),
        "convolution": (
            torch.nn.Conv2d(I, O, (2, 13)),
            lambda r: nnx.Conv(I, O, (2, 13), padding="VALID", rngs=r),
        ),
    }
    theirs, maker = makers[kind]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
        expected = theirs(torch.from_numpy(inputs)).numpy()
    ours = maker(nnx.Rngs(0))
    state = {f"embed.{name}": tensor for name, tensor in theirs.state_dict().items()}
    # a transposed or plain convolution is told by its bias, an embedding by its name
    moved = migrate.convert_state(state, to="flax")
    there = nnx.to_flat_state(nnx.state(ours))
    new = [(path, v.replace(moved[f"embed/{path[-1]}"])) for path, v in there]
    nnx.update(ours, nnx.from_flat_state(new))
    x = inputs.transpose(0, 2, 3, 1) if kind == "convolution" else inputs
    out = np.asarray(ours(x))
    out = out.transpose(0, 3, 1, 2) if kind == "convolution" else out
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def told(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Kind and confidence by prefix, and what is left over."""
    state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    found, others = modules.find(state, [])
    return {m.prefix: (m.kind, m.confidence) for m in found}, others


def test_shapes_decide_where_they_can() -> None:
    found, others = told(
        {
            "l.weight": (5, 3), "l.bias": (5,),
            "c.weight": (3, 5), "c.bias": (5,),
            "square.weight": (5, 5), "square.bias": (5,),
            "n.weight": (5,), "n.bias": (5,),
            "my_rms_norm.weight": (5,),
            "f.kernel": (3, 5),
            "layers/dense_2/vars/0": (3, 5), "layers/dense_2/vars/1": (5,),
            "layers/embedding/vars/0": (7, 5),
        }
    )  # fmt: skip
    assert found == {
        "l": ("linear", "likely"),
        "c": ("conv1d", "likely"),
        "square": ("linear", "likely"),
        "n": ("norm", "likely"),
        "my_rms_norm": ("rmsnorm", "likely"),
        "f": ("linear", "likely"),
        "layers/dense_2": ("linear", "certain"),
        "layers/embedding": ("embedding", "certain"),
    }
    assert others == {}


def test_names_decide_where_shapes_cannot_and_nothing_else_is_guessed() -> None:
    found, others = told(
        {
            "tok_embed.weight": (7, 5),
            "out_proj2.weight": (7, 5),
            "lm_head.weight": (7, 5),
            "mystery.weight": (7, 5),
            "bn.weight": (5,), "bn.bias": (5,), "bn.running_mean": (5,),
            "up.weight": (7, 5, 2, 2),
            "odd.weight": (7, 5), "odd.bias": (3,),
            "table": (5,),
        }
    )  # fmt: skip
    assert found == {
        "tok_embed": ("embedding", "by name"),
        "out_proj2": ("linear", "by name"),
        "lm_head": ("linear", "by name"),
    }
    assert "could be conv1d or embedding or linear" in others["mystery.weight"]
    assert "transposed" in others["up.weight"]
    assert {"bn.weight", "bn.bias", "bn.running_mean", "odd.weight", "table"} <= others.keys()


def test_integers_are_no_layers() -> None:
    state = {"a.weight": np.zeros((5, 3), np.int8), "a.bias": np.zeros(5, np.float32)}
    assert modules.find(state, [])[0] == []
