"""Layers next to attention: the tables against live layers, and how each kind is told."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from flax import nnx

from jaxmha import checkpoint
from jaxmha.converters.discovery import layer_layouts, other_layers
from jaxmha.converters.discovery.layer_layouts import CANONICAL, CONVENTIONS, Convention
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.migrate import pipeline
from tests.promotion import foreign

I, O, V, D = 3, 5, 7, 11
SIZES = {"Di": I, "Do": O, "V": V, "D": D, "y": 2, "x": 13}
EVERY = [(c, kind) for c in CONVENTIONS for kind in c.kinds]
IDS = [f"{c.name}-{kind}" for c, kind in EVERY]


def arrays(convention: Convention, kind: str, prefix: str = "a") -> dict[str, NDArray]:
    """A layer of random numbers."""
    rng = np.random.default_rng(0)
    return {
        f"{prefix}{convention.separator}{entry.key}": rng.normal(
            size=layer_layouts.shape(entry, SIZES)
        ).astype(np.float32)
        for entry in convention.kinds[kind]
    }


@pytest.mark.parametrize(("convention", "kind"), EVERY, ids=IDS)
def test_round_trip(convention: Convention, kind: str) -> None:
    state = arrays(convention, kind)
    for entry in convention.kinds[kind]:
        array = state[f"a{convention.separator}{entry.key}"]
        leaf = layer_layouts.unpack(entry, array)
        assert leaf.shape == tuple(SIZES[a] for a in CANONICAL[entry.leaves[0]].split())
        back = layer_layouts.pack(entry, leaf)
        assert (back.shape, back.tobytes()) == (array.shape, array.tobytes())


def torch_layers() -> dict[str, Any]:
    made = {
        "linear": torch.nn.Linear(I, O),
        "norm": torch.nn.LayerNorm(D),
        "rmsnorm": torch.nn.RMSNorm(D),
        "embedding": torch.nn.Embedding(V, D),
        "convolution": torch.nn.Conv2d(I, O, (2, 13)),
    }
    return {k: {n: to_numpy(p) for n, p in m.named_parameters()} for k, m in made.items()}


def flax_layers() -> dict[str, Any]:
    rngs = nnx.Rngs(0)
    made = {
        "linear": nnx.Linear(I, O, rngs=rngs),
        "norm": nnx.LayerNorm(D, rngs=rngs),
        "rmsnorm": nnx.RMSNorm(D, rngs=rngs),
        "embedding": nnx.Embed(V, D, rngs=rngs),
        "convolution": nnx.Conv(I, O, (2, 13), rngs=rngs),
    }
    assert (nnx.LayerNorm(D, rngs=rngs).epsilon, nnx.RMSNorm(D, rngs=rngs).epsilon) == (1e-6, 1e-6)
    return {k: dict(nnx.to_pure_dict(nnx.state(m))) for k, m in made.items()}


def keras_layers() -> dict[str, Any]:
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
        haiku.RMSNorm(-1)(y)
        haiku.Embed(V, D)(np.zeros(2, np.int32))

    with foreign():
        made = jax.eval_shape(
            haiku.transform(every).init, jax.random.key(0), np.zeros((2, I)), np.zeros((2, D))
        )
    names = {"linear": "linear", "norm": "layer_norm", "rmsnorm": "rms_norm", "embedding": "embed"}
    return {kind: made[name] for kind, name in names.items()}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("convention", "live"),
    [
        (layer_layouts.TORCH, torch_layers),
        (layer_layouts.FLAX, flax_layers),
        (layer_layouts.KERAS, keras_layers),
        (layer_layouts.HAIKU, haiku_layers),
    ],
    ids=["torch", "flax", "keras", "haiku"],
)
def test_names_and_shapes_are_those_of_live_layers(convention: Convention, live: Any) -> None:
    layers = live()
    assert set(layers) <= set(convention.kinds)
    for kind, variables in layers.items():
        expected = {e.key: layer_layouts.shape(e, SIZES) for e in convention.kinds[kind]}
        assert {name: tuple(v.shape) for name, v in variables.items()} == expected, kind


def test_torch_s_epsilon_is_the_default() -> None:
    assert torch.nn.LayerNorm(D).eps == layer_layouts.TORCH.epsilon["norm"]
    assert torch.nn.RMSNorm(D).eps is None  # torch.finfo(float32).eps then
    assert torch.finfo(torch.float32).eps == layer_layouts.TORCH.epsilon["rmsnorm"]


@pytest.mark.parametrize("kind", ["linear", "norm", "embedding", "convolution"])
def test_flax_computes_what_torch_does(kind: str) -> None:
    """Which axis is which, by running both."""
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
    moved = pipeline.convert_state(state, to="flax")
    present = nnx.to_flat_state(nnx.state(ours))
    new = [(path, v.replace(moved[f"embed/{path[-1]}"])) for path, v in present]
    nnx.update(ours, nnx.from_flat_state(new))
    x = inputs.transpose(0, 2, 3, 1) if kind == "convolution" else inputs
    out = np.asarray(ours(x))
    out = out.transpose(0, 3, 1, 2) if kind == "convolution" else out
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def reported(
    shapes: dict[str, tuple[int, ...]],
) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Kind and confidence by prefix, and what is left over."""
    state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    found, others = other_layers.find(state, [])
    return {m.prefix: (m.kind, m.confidence) for m in found}, others


def test_shapes_decide_where_they_can() -> None:
    found, others = reported(
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
    found, others = reported(
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
    assert other_layers.find(state, [])[0] == []


def live_convolutions() -> dict[str, dict[str, NDArray]]:
    """Layers whose arrays an ordinary convolution could have, under the names of a framework."""
    rngs = nnx.Rngs(0)
    depthwise = keras.layers.DepthwiseConv2D(3, use_bias=False)
    depthwise.build((None, 5, 5, D))
    swapped = keras.layers.Conv2DTranspose(D, 3)
    swapped.build((None, 5, 5, D))
    torch_made = {
        "transposed": torch.nn.ConvTranspose2d(D, D, 3),
        "without": torch.nn.ConvTranspose2d(I, O, 3, bias=False),
        "deconv": torch.nn.Conv2d(I, O, 3),
    }
    made = {
        f"torch {k}": {f"{k}.{n}": to_numpy(p) for n, p in m.named_parameters()}
        for k, m in torch_made.items()
    }
    for name, layer in (("depthwise", depthwise), ("swapped", swapped)):
        made[f"keras {name}"] = {f"x/{w.name}": to_numpy(w) for w in layer.weights}
    named = nnx.to_pure_dict(nnx.state(nnx.ConvTranspose(I, O, (3, 3), rngs=rngs)))
    made["flax"] = {f"ConvTranspose_0/{key}": to_numpy(x) for key, x in named.items()}
    return made


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    "which",
    [
        *("torch transposed", "torch without", "torch deconv"),
        *("keras depthwise", "keras swapped", "flax"),
    ],
)
def test_other_convolutions_are_not_taken_for_ordinary_ones(which: str) -> None:
    state = live_convolutions()[which]
    found, others = other_layers.find(state, [])
    assert found == []
    assert others.keys() == state.keys()
    assert all("could be transposed or depthwise" in why for why in others.values())


def test_patches_are_reported_by_name() -> None:
    found, _ = reported(
        {"patch_embed.proj.weight": (5, 3, 2, 2), "patch_embedding.weight": (5, 3, 2, 2)}
    )
    assert set(found.values()) == {("convolution", "by name")}
    found, others = reported(
        {"patch_embed.deconv.weight": (5, 3, 2, 2), "dispatch.weight": (5, 3, 2, 2)}
    )
    assert (found, len(others)) == ({}, 2)


def test_what_only_a_name_calls_an_embedding() -> None:
    found, others = reported(
        {
            "embed_out.weight": (7, 5),
            "unembed.weight": (7, 5),
            "embed_in.weight": (7, 5),
            "time_embed.weight": (5, 5),
            "rel_pos_emb.weight": (5, 5),
        }
    )
    assert found == {
        "embed_out": ("linear", "by name"),
        "unembed": ("linear", "by name"),
        "embed_in": ("embedding", "by name"),
    }
    assert others.keys() == {"time_embed.weight", "rel_pos_emb.weight"}


def torch_block() -> dict[str, NDArray]:
    layer = torch.nn.MultiheadAttention(6, 2)
    return {f"blocks.0.attn.{name}": to_numpy(x) for name, x in layer.state_dict().items()}


def test_layers_are_judged_by_the_framework_of_the_attention_next_to_them() -> None:
    """PReLUs, a LayerScale, a GroupNorm, a depthwise convolution and bare parameters next to attention of
    torch."""
    parameters = {
        "act.weight": np.full(1, 0.25), "blocks.0.ls1.gamma": np.ones(6), "act1.weight": np.ones(6),
        "group_norm.weight": np.ones(6), "group_norm.bias": np.ones(6),
        "blocks.0.dw.weight": np.ones((6, 1, 3, 3)), "blocks.0.dw.bias": np.ones(6), "w": np.eye(6),
        "scale": np.ones(6), "weight": np.ones(6), "blocks.0.norm.weight": np.ones(6),
    }  # fmt: skip
    state = torch_block() | {name: x.astype(np.float32) for name, x in parameters.items()}
    moved = pipeline.convert_state(state, to="flax", num_heads=2)
    expected = {*parameters} - {"blocks.0.norm.weight"} | {"blocks/0/norm/scale"}
    assert {name for name in moved if "attn" not in name} == expected


def test_a_key_map_reads_what_another_framework_wrote() -> None:
    """Old files of BERT have norms as TensorFlow named them."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 6,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 11,
    }
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=7))
    state = {name: to_numpy(x) for name, x in model.state_dict().items()}
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): x
        for name, x in state.items()
    }
    new = pipeline.convert_state(state, to="flax", num_heads=2)
    again = pipeline.convert_state(old, to="flax", num_heads=2)
    assert new.keys() == again.keys()
    assert all(new[name].tobytes() == again[name].tobytes() for name in new)


def test_an_rms_norm_comes_back_through_flax_and_haiku() -> None:
    state = torch_block() | {"rms_norm.weight": np.ones(6, np.float32)}
    for to in ("flax", "haiku"):
        moved = pipeline.convert_state(state, to=to, num_heads=2)
        stored: dict[str, Any] = {} if to == "flax" else {"num_heads": 2}
        assert "rms_norm/scale" in pipeline.convert_state(moved, to="keras", **stored)


def test_what_only_a_name_tells_is_noted(tmp_path: Path) -> None:
    state = torch_block() | {"embed_in.weight": np.ones((7, 5), np.float32)}
    checkpoint.write(tmp_path / "a.npz", state)
    done = pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax", num_heads=2)
    (note,) = [note for note in done.notes if "kinds known only by name" in note]
    assert "embed_in (embedding)" in note
    done = pipeline.convert(
        tmp_path / "a.npz", tmp_path / "c.npz", to="flax", num_heads=2, attention_only=True
    )
    assert not any("kinds known only by name" in note for note in done.notes)
