"""Gate, up and down matrices are told apart by the names that libraries give them, and by shapes."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Linear

from jaxmha.converters import equinox, match
from jaxmha.converters import torch as convert
from jaxmha.converters.matching import prove

# Library -> names of the gate, the up matrix and the output.
NAMES = {
    "Llama": ("w1", "w3", "w2"),
    "DINOv2": ("w1", "w2", "w3"),
    "DBRX": ("w1", "v1", "w2"),
    "transformers": ("gate_proj", "up_proj", "down_proj"),
    "T5": ("wi_0", "wi_1", "wo"),
    "Grok": ("linear", "linear_v", "linear_1"),
    "Grok, counted from 1": ("linear_1", "linear_v", "linear_2"),
    "labml": ("linear1", "linear_v", "linear2"),
    "timm": ("fc1_g", "fc1_x", "fc2"),
    "Shazeer": ("w", "v", "w2"),
}
FUSED = [("w12", "w3"), ("weights_in", "weights_out")]  # of DINOv2, and of transformers 4
INNER, D = 7, 5
SHAPES = ((INNER, D), (INNER, D), (D, INNER))
FUSED_SHAPES = ((2 * INNER, D), SHAPES[2])
ROLES = (1.0, 2.0, 3.0)


@pytest.mark.parametrize("theirs", NAMES.values(), ids=NAMES)
def test_gates_are_no_up_matrices(theirs: Sequence[str]) -> None:
    source = _source(dict(zip(theirs, ROLES, strict=True)))
    for mine in NAMES.values():
        made = equinox.load_into(_target(mine, SHAPES), source)["mlp"]
        assert [made[name]["kernel"][0, 0] for name in mine] == list(ROLES)


def _source(values: Mapping[str, float | Sequence[float]]) -> dict[str, Any]:
    """Layers in torch's form. A layer of two values has two matrices, one after the other."""
    return {
        f"mlp.{name}.weight": np.concatenate([
            np.full(SHAPES[ROLES.index(role)], role, "f") for role in np.atleast_1d(value)
        ])
        for name, value in values.items()
    }  # fmt: skip


def _target(names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    kernels = {n: {"kernel": np.zeros(s[::-1], "f")} for n, s in zip(names, shapes, strict=True)}
    return {"mlp": kernels}


@pytest.mark.parametrize("fused", FUSED)
def test_fused_gates_are_first(fused: tuple[str, str]) -> None:
    """To and from three layers, and between the names of the fused layer."""
    gate_up, down = fused
    source = _source({gate_up: ROLES[:2], down: ROLES[2]})
    for mine in NAMES.values():
        made = equinox.load_into(_target(mine, SHAPES), source)["mlp"]
        assert [made[name]["kernel"][0, 0] for name in mine] == list(ROLES)
        apart = _source(dict(zip(mine, ROLES, strict=True)))
        made = equinox.load_into(_target(fused, FUSED_SHAPES), apart)["mlp"]
        assert [*made[gate_up]["kernel"][0, ::INNER], made[down]["kernel"][0, 0]] == [*ROLES]
    for other in FUSED:
        assert not match(source, _target(other, FUSED_SHAPES)).questions


@pytest.mark.parametrize(
    ("theirs", "mine", "expected"),
    [
        ("w12", "mine", "? mlp/mine/kernel: one of them packs projections"),
        ("mine", "w12", "? mlp/w12/kernel: one of them packs projections"),
        ("w12", "gate_up_proj", "? mlp/gate_up_proj/kernel: projections are packed under two names"),
        ("fc1", "Wi", "by name: both are mlp; the halves of its output may be a gate"),
        ("fc1", "fc1", "certain"),
    ],
)  # fmt: skip
def test_fused_layers_of_which_no_name_tells_the_order(
    theirs: str, mine: str, expected: str
) -> None:
    source = _source({theirs: ROLES[:2], "fc2": ROLES[2]})
    plan = match(source, _target((mine, "fc2"), FUSED_SHAPES))
    assert expected in str(plan)
    for question in plan.questions:
        assert question.candidates == (f"mlp.{theirs}.weight",)
        (lines,) = question.examples
        made = equinox.load_into(
            _target((mine, "fc2"), FUSED_SHAPES), source, plan.with_lines(*lines)
        )
        assert [*made["mlp"][mine]["kernel"][0, ::INNER]] == [*ROLES[:2]]


@pytest.mark.parametrize("sizes", [(D, D, D, D), (D, D, D, 3)])
def test_shapes_that_show_no_roles(sizes: tuple[int, ...]) -> None:
    """Square matrices may have the roles of Llama or DINOv2; layers of an ungated MLP have none."""
    shapes = list(itertools.pairwise(sizes))
    source = {f"w{n}.weight": np.ones(s[::-1], np.float32) for n, s in enumerate(shapes, 1)}
    names = NAMES["transformers"]
    target = {n: {"kernel": np.zeros(s, np.float32)} for n, s in zip(names, shapes, strict=True)}
    with pytest.raises(ValueError, match="open question"):
        equinox.load_into(target, source)


class Gated(torch.nn.Module):
    def __init__(self, lies: bool) -> None:
        super().__init__()
        self.lies, self.gate_proj, self.up_proj = lies, Linear(D, INNER), Linear(D, INNER)

    def forward(self, x: Any) -> Any:
        both = self.gate_proj(x), self.up_proj(x)
        gate, up = both[::-1] if self.lies else both
        return torch.sigmoid(gate) * up


@pytest.mark.parametrize("blocks", [1, 2])
def test_names_that_lie_are_not_certain(blocks: int) -> None:
    source, target = (
        torch.nn.Sequential(
            *(torch.nn.Sequential(Gated(x), Linear(INNER, D)) for _ in range(blocks))
        )
        for x in (True, False)
    )
    plan = match(source, target)
    gates = [line for line in plan.lines if "_proj" in line.target]
    assert {line.confidence for line in gates} == {"by name"}
    convert.load_into(target, source, plan)
    draw = lambda rng: (rng.normal(size=(2, D)).astype("f"),)
    assert not prove(source, target, plan, inputs=draw).same
