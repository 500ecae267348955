"""Layers that no name, class or shape decides are questions, whose lines answer them."""

# mypy: disable-error-code="misc"
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxmha.converters import equinox, flax, match
from jaxmha.converters import torch as convert_torch
from jaxmha.converters.matching import Line, Plan, arrows

D, F = 5, 3


class Own(torch.nn.Module):
    """A class that multiplies from the left, next to torch's own, which transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(D, D))
        self.fc = torch.nn.Linear(D, F)


class OwnEquinox(eqx.Module):
    weight: jax.Array
    fc: eqx.nn.Linear


class Mine(nnx.Module):
    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.zeros((D, D)))
        self.fc = nnx.Linear(D, F, rngs=nnx.Rngs(0))


OWN: dict[str, Any] = {
    "torch": Own,
    "equinox": lambda: OwnEquinox(jnp.zeros((D, D)), eqx.nn.Linear(D, F, key=jax.random.key(0))),
}


@pytest.mark.parametrize("name", OWN)
def test_a_class_of_the_users_has_no_axes_of_another_class(name: str) -> None:
    asked = {q.target: q.reason for q in match(OWN[name](), Mine()).questions}
    assert asked["kernel"] == arrows.UNDECIDED


# Shapes of torch layers and of Flax layers by name, and the targets that are asked about.
SAME: dict[str, tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]], list[str]]] = {
    "another lacks a source": ({"fc": (D, F), "x": (7, 9)}, {"fc": (F, D), "y": (F, F)}, ["y"]),
    "names that tell nothing": ({"fc": (D, F), "a": (D, F)}, {"a": (F, D), "fc": (F, D)}, []),
    "one is shared": ({"a": (D, F)}, {"a": (F, D), "b": (F, D)}, ["b"]),
    "numbers": ({f"fc{n}": (D, F) for n in range(3)}, {"fc1": (F, D), "fc2": (F, D)}, ["fc1", "fc2"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_layers_of_the_same_name_belong_together(name: str) -> None:
    mine, theirs, asked = SAME[name]
    source = {f"{key}.weight": np.zeros(shape, "f") for key, shape in mine.items()}
    plan = match(source, {key: {"kernel": np.zeros(shape, "f")} for key, shape in theirs.items()})
    assert [q.target for q in plan.questions] == [f"{key}/kernel" for key in asked]
    assert all(line.target.split("/")[0] == line.sources[0].split(".")[0] for line in plan.lines)


class OfOtherWidth(torch.nn.MultiheadAttention):
    """Attention whose query, key and value have weights apart, but one packed bias."""

    def __init__(self) -> None:
        super().__init__(6, 2, kdim=D, vdim=D)
        torch.nn.init.normal_(self.in_proj_bias)


def attention() -> nnx.MultiHeadAttention:
    sizes = {"in_kv_features": D, "qkv_features": 6, "out_features": 6}
    return nnx.MultiHeadAttention(2, 6, **sizes, decode=False, rngs=nnx.Rngs(0))


def test_a_packed_bias_next_to_weights_apart_fills_each_projection() -> None:
    source = OfOtherWidth()
    model = flax.load_into(attention(), source)
    value = source.in_proj_bias.detach().numpy()[12:].reshape(2, 3)
    np.testing.assert_array_equal(model.value.bias[...], value)
    back = convert_torch.load_into(OfOtherWidth(), model)
    again = convert_torch.load_into(OfOtherWidth(), back)
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name])
        assert torch.equal(tensor, again.state_dict()[name])


def test_a_packed_bias_fills_stacked_layers_and_is_filled_from_them() -> None:
    layers = torch.nn.ModuleList([OfOtherWidth() for _ in range(7)])
    state = {name: tensor.numpy() for name, tensor in layers.state_dict().items()}
    one = nnx.to_pure_dict(nnx.state(attention()))
    stacked = {"blocks": jax.tree.map(lambda x: np.stack([x] * 7), one)}
    made = equinox.load_into(stacked, state)
    key = np.stack([state[f"{n}.in_proj_bias"][6:12].reshape(2, 3) for n in range(7)])
    np.testing.assert_array_equal(made["blocks"]["key"]["bias"], key)
    back = convert_torch.load_into(torch.nn.ModuleList([OfOtherWidth() for _ in range(7)]), made)
    assert all(
        torch.equal(tensor, layers.state_dict()[n]) for n, tensor in back.state_dict().items()
    )


def test_stacked_projections_fill_packed_layers() -> None:
    layers = torch.nn.ModuleList([torch.nn.MultiheadAttention(6, 2) for _ in range(5)])
    one = nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))
    tree = jax.tree.map(lambda x: np.stack([x] * 5), nnx.to_pure_dict(nnx.state(one)))
    made = equinox.load_into({"blocks": tree}, layers)
    empty = torch.nn.ModuleList([torch.nn.MultiheadAttention(6, 2) for _ in range(5)])
    back = convert_torch.load_into(empty, made)
    assert all(
        torch.equal(tensor, layers.state_dict()[n]) for n, tensor in back.state_dict().items()
    )


@pytest.mark.parametrize("name", ["rel_bias", "bias", "bias_table", "pos_bias"])
def test_a_bias_with_several_axes_is_a_table(name: str) -> None:
    source = {
        f"attn.{name}": np.arange(6, dtype="f").reshape(3, 2),
        "fc.weight": np.ones((3, 2), "f"),
    }
    target = {"attn": {name: np.zeros((3, 2), "f")}, "fc": {"kernel": np.zeros((2, 3), "f")}}
    made = equinox.load_into(target, source)
    np.testing.assert_array_equal(made["attn"][name], source[f"attn.{name}"])


# Arrays of source and target that fit only in axes which no layout shows, and a line of the question.
LOOSE: dict[str, tuple[Any, Any, Line]] = {
    "transposed": (
        torch.nn.ModuleDict({"up": torch.nn.ConvTranspose2d(6, F, 2)}),
        nnx.Dict(up=nnx.ConvTranspose(6, F, (2, 2), rngs=nnx.Rngs(0))),
        Line("up/kernel", ("up.weight",), "a0 a1 a2 a3 -> ?"),
    ),
    "turned": (
        {"attn.rel_bias": np.zeros((9, 2), "f")},
        {"attn": {"rel_bias": np.zeros((2, 9), "f")}},
        Line("attn/rel_bias", ("attn.rel_bias",), "a0 a1 -> ?"),
    ),
    "experts": (
        {f"experts.{n}.{m}.bias": np.zeros(D, "f") for n in range(3) for m in (0, 2)}
        | {f"experts.{n}.{m}.weight": np.zeros((D, D), "f") for n in range(3) for m in (0, 2)},
        {"w1": np.zeros((3, D, D), "f"), "b1": np.zeros((3, D), "f")},
        Line("w1", ("experts.{i}.0.weight",), "l a0 a1 -> ?"),
    ),
    "gates": (
        {"rnn.weight_ih_l0": np.zeros((20, 3), "f")},
        {"cell": {"weight_ih": np.zeros((20, 3), "f")}},
        Line("cell/weight_ih", ("rnn.weight_ih_l0",), "a0 a1 -> ?"),
    ),
    "one of four gates": (
        {"rnn.weight_ih_l0": np.zeros((20, 3), "f")},
        {"cell": {name: {"kernel": np.zeros((3, D), "f")} for name in ("i", "forget", "g", "o")}},
        Line("cell/forget/kernel", ("rnn.weight_ih_l0",), "a0 a1 -> ?"),
    ),
    "fused under an unknown name": (
        {"kqv.weight": np.zeros((18, 6), "f"), "proj.weight": np.zeros((6, 6), "f")},
        {name: {"kernel": np.zeros((6, 2, 3), "f")} for name in ("query", "key", "value")},
        Line("query/kernel", ("kqv.weight",), "a0 a1 -> ?"),
    ),
    "stacked": (
        {"blocks/u": np.zeros((2, D, 6), "f")},
        {"blocks": [{"u": np.zeros((D, 2, 3), "f")} for _ in range(2)]},
        Line("blocks/{i}/u", ("blocks/u",), "a0 a1 a2 -> ?", "{i}/2"),
    ),
}


@pytest.mark.parametrize("name", LOOSE)
def test_arrays_that_fit_no_layer_are_candidates_of_those_with_their_sizes(name: str) -> None:
    source, target, wanted = LOOSE[name]
    plan = match(source, target)
    lines = [line for q in plan.questions for several in q.examples for line in several]
    assert wanted in lines
    assert not any(line.fill for line in lines)
    with pytest.raises(ValueError, match=r"is to be completed: .* in the place of \?"):
        equinox.load_into(target, source, Plan((wanted,)))


def test_layers_of_another_width_are_no_candidates() -> None:
    narrow, wide = (torch.nn.TransformerEncoderLayer(n, 2, 2 * n) for n in (8, 16))
    for source, target in ((narrow, wide), (wide, narrow)):
        assert {q.candidates for q in match(source, target).questions} == {()}


# Names in both models, whose shapes occur several times, and whose lists both count alike.
BOTH = (
    "0.up",
    "0.gate",
    "1.up",
    "2.gate",
    "rel_pos_h",
    "rel_pos_w",
    "layer_norm_1",
    "layer_norm_2",
)


def test_names_in_both_models_settle_what_shapes_leave_open() -> None:
    """Names may lie, such as those of gate and up: only a shape of its own is certain."""
    shapes = {"weight": (D, F), "bias": (D,)}
    state = {f"m.{n}.{key}": np.ones(x, "f") for n in BOTH for key, x in shapes.items()}
    state["head.weight"] = np.ones((7, 9), "f")
    plan = match(state, state)
    assert not plan.questions
    assert all(line.sources == (line.target,) for line in plan.lines)
    certain = [line.target for line in plan.lines if line.confidence == "certain"]
    assert certain == ["head.weight"]


def test_recurrent_layers_are_paired_by_their_names() -> None:
    square = torch.nn.GRU(D, D)
    assert {line.confidence for line in match(square, square).lines} == {"by name"}


def test_kept_arrays_are_asked_about_only_with_candidates() -> None:
    """A table that the model computes has no candidate; a head may be tied to the embedding."""
    source = {"embed_tokens.weight": np.ones((7, F), "f"), "fc.weight": np.ones((D, F), "f")}
    target = {**source, "positions.weight": np.zeros((9, F), "f")}
    assert match(source, target).questions
    assert not equinox.load_into(target, source, missing="keep")["positions.weight"].any()
    target["lm_head.weight"] = np.zeros((7, F), "f")
    with pytest.raises(ValueError, match=r"open question: lm_head\.weight"):
        equinox.load_into(target, source, missing="keep")


def test_the_line_of_a_question_takes_layers_from_one_array() -> None:
    source = {n: {"kernel": np.full((2, D, F), x, "f")} for n, x in (("alpha", 1), ("beta", 2))}
    layer = {n: {"kernel": np.zeros((D, F), "f")} for n in ("gamma", "delta")}
    target = {"layers": [layer, layer]}
    plan = match(source, target)
    lines = [q.examples[n][0] for n, q in enumerate(plan.questions)]
    filled = equinox.load_into(target, source, plan.with_lines(*lines))["layers"][1]
    assert {float(x["kernel"][0, 0]) for x in filled.values()} == {1, 2}
