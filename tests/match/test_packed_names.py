"""Packed projections are matched under all of their names, and can alternate head by head."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

from jaxmha.converters import equinox, flax, match
from jaxmha.converters import torch as convert
from jaxmha.converters.matching import Plan

WIDTH, HEADS, INNER = 21, 3, 4
ROLES = ("query", "key", "value")


class Attention(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query, self.key, self.value, self.out = (
            nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)
        )


class Model(nnx.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        self.attn = Attention(nnx.Rngs(0))


def _answered(plan: Plan, heads: int) -> Plan:
    """The plan with the lines of its question, whose parts alternate by head."""
    (question,) = plan.questions
    lines = []
    for line in question.examples[0]:
        before, after = line.arrow.split(" -> ")
        arrow = f"{before.replace('(s', f'({heads} s')} -> {after.replace('o0', f'({heads} o0)')}"
        lines.append(replace(line, arrow=arrow))
    return plan.with_lines(*lines)


@pytest.mark.parametrize("name", ["GPTNeoX", "Bloom"])
def test_packed_projections_of_transformers_are_asked_and_split_by_head(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    if name == "Bloom":
        config = transformers.BloomConfig(hidden_size=WIDTH, n_head=HEADS)
        source = transformers.models.bloom.modeling_bloom.BloomAttention(config, layer_idx=0)
    else:
        config = transformers.GPTNeoXConfig(hidden_size=WIDTH, num_attention_heads=HEADS)
        source = transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention(config, 0)
    torch.nn.init.normal_(source.query_key_value.bias)
    block = torch.nn.ModuleDict({"self_attention": source})
    plan = match(block, Model())
    assert "head by head" in plan.questions[0].reason
    model = flax.load_into(Model(), block, _answered(plan, HEADS))
    x = np.random.default_rng(0).normal(size=(1, 5, WIDTH)).astype("f")
    # transformers' code: view(..., heads, 3 * head size), then chunk(3, -1) or [..., n, :]
    packed = source.query_key_value(torch.from_numpy(x)).view(1, 5, HEADS, 3, WIDTH // HEADS)
    for n, role in enumerate(ROLES):
        expected = packed[..., n, :].reshape(1, 5, WIDTH).detach().numpy()
        np.testing.assert_allclose(getattr(model.attn, role)(x), expected, rtol=1e-5, atol=1e-6)
    assert match(block, Model(), packing="concatenated").questions == ()


def _packed_state(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {name: 3 * WIDTH, "out_proj": WIDTH}
    return {
        f"attn.{key}.{kind}": rng.normal(size=(rows, WIDTH) if kind == "weight" else rows).astype(
            "f"
        )
        for key, rows in shapes.items()
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("name", ["in_proj", "W_pack", "att_proj", "query_key_value"])
def test_other_names_are_asked_and_loaded_as_concatenated(name: str) -> None:
    state = _packed_state(name)
    assert "head by head" in match(state, Model()).questions[0].reason
    plan = match(state, Model(), packing="concatenated")
    model = flax.load_into(Model(), state, plan)
    parts = np.split(state[f"attn.{name}.weight"], 3)
    for role, part in zip(ROLES, parts, strict=True):
        np.testing.assert_array_equal(getattr(model.attn, role).kernel[...], part.T)


def test_an_in_proj_outside_attention_is_one_layer() -> None:
    state = {"mamba.in_proj.weight": np.ones((3 * WIDTH, WIDTH), "f")}
    assert not match(
        state, {"mixer": {"in_proj": {"kernel": np.ones((WIDTH, 3 * WIDTH), "f")}}}
    ).questions


def test_no_candidate_contradicts_the_name_of_the_target() -> None:
    plan = match(_packed_state("strange"), Model())
    for question in plan.questions:
        if question.target != "attn/out":
            assert question.candidates == ("attn.strange",)
            assert "out is not" in question.reason
            assert "out_proj" not in question.line


def test_packed_arrays_of_one_name_are_copied_where_nothing_shows_their_axes() -> None:
    shapes = {"a/experts/gate_up_proj": (3, 5, 8), "a/experts/gate_up_proj_bias": (3, 8)}
    source = {
        name: np.arange(np.prod(shape), dtype="f").reshape(shape) for name, shape in shapes.items()
    }
    filled = equinox.load_into({name: np.zeros_like(x) for name, x in source.items()}, source)
    for name, array in source.items():
        np.testing.assert_array_equal(filled[name], array)


class Experts(torch.nn.Module):
    """States the order of gate and up as the experts of transformers do."""

    has_gate = True

    def __init__(self, is_concatenated: bool) -> None:
        super().__init__()
        self.is_concatenated = is_concatenated
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 2 * INNER, 5))
        self.gate_up_proj_bias = torch.nn.Parameter(torch.zeros(2, 2 * INNER))


@pytest.mark.parametrize("is_concatenated", [True, False])
@pytest.mark.parametrize("packed", ["apart", "w12"])
def test_experts_state_the_order_of_gate_and_up(is_concatenated: bool, packed: str) -> None:
    both = [{"weight": np.full((INNER, 5), x, "f"), "bias": np.full(INNER, x, "f")} for x in (1, 2)]
    layers = dict(zip(("gate_proj", "up_proj"), both, strict=True))
    if packed == "w12":
        layers = {"w12": {key: np.concatenate([x[key] for x in both]) for key in both[0]}}
    state = {
        f"experts.{n}.{name}.{key}": x
        for n in range(2)
        for name, arrays in layers.items()
        for key, x in arrays.items()
    }
    model = torch.nn.ModuleDict({"experts": Experts(is_concatenated)})
    filled = convert.load_into(model, state).state_dict()
    back = equinox.load_into({name: np.zeros_like(x) for name, x in state.items()}, model)
    assert all(np.array_equal(x, back[name]) for name, x in state.items())
    rows = np.repeat([1, 2], INNER) if is_concatenated else np.tile([1, 2], INNER)
    np.testing.assert_array_equal(filled["experts.gate_up_proj"][1, :, 0], rows)
    np.testing.assert_array_equal(filled["experts.gate_up_proj_bias"][0], rows)


@pytest.mark.parametrize("is_concatenated", [True, False])
def test_experts_that_state_other_orders_are_not_copied(is_concatenated: bool) -> None:
    source, target = Experts(True), Experts(is_concatenated)
    assert bool(match(source, target).questions) is not is_concatenated
