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
from jaxmha.converters.matching import arrows

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
