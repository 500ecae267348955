"""The bytes that devices send, as the table of `experiments.scaling` counts it."""

import re

import pytest

from experiments.scaling import layer
from experiments.scaling.machines import MACHINES, Work, seconds
from jaxmha.implementations.native import library
from tests.sharding.hlo import Collective, collectives

TENSOR = re.compile(r"tensor<(?:\d+x)*(\w+)>")
WIDE, HALF, BITS = "f32", "f16", "u16"


def kinds(found: list[Collective]) -> dict[str, set[str]]:
    """Types of what is sent, by collective."""
    result: dict[str, set[str]] = {}
    for c in found:
        result.setdefault(c.kind, set()).update(shape.split("[")[0] for shape in c.shapes)
    return result


FEATURES = f"[{layer.B},{layer.T},{layer.D}]"


def test_bytes_of_sums() -> None:
    """Counted in the type that they have; nothing is halved."""
    found = [Collective("all-reduce", (kind + FEATURES,), 1) for kind in (WIDE, HALF)]
    work = layer.work("tensor", 8, found)
    assert work.exposed == 2 * 7 / 8 * (4 + 2) * layer.B * layer.T * layer.D
    assert work.hidden == work.moves == 0


@pytest.mark.slow
def test_tensor_parallel_sums() -> None:
    """Of products forward, in float32; of what products have given backward, as it is stored."""
    found = collectives(layer.lowered("tensor", 8).compile())
    assert sorted(c.shapes for c in found) == [(HALF + FEATURES,), (WIDE + FEATURES,)]
    assert {(c.kind, c.times) for c in found} == {("all-reduce", 1)}


SENT = {
    "data": {"all-reduce": {WIDE}},
    "ring": {"all-reduce": {WIDE}, "collective-permute": {WIDE, HALF, BITS}},
    "allgather": {"all-reduce": {WIDE}, "reduce-scatter": {WIDE}, "all-gather": {HALF}},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SENT)
def test_types_of_what_is_sent(layout: str) -> None:
    """Sums are of products, in float32; keys and values travel as they are stored."""
    found = collectives(layer.lowered(layout, 8).compile())
    assert kinds(found) == SENT[layout]
    gradients = sum(c.bytes for c in found if c.kind == "all-reduce")
    assert gradients == 4 * layer.D * layer.H * (2 * layer.N + 2 * layer.K)


@pytest.mark.parametrize(
    "layout",
    ["tensor", *(pytest.param(x, marks=pytest.mark.slow) for x in layer.LAYOUTS if x != "tensor")],
)
def test_float16_stands_for_bfloat16(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs before any pass of a compiler differ in that name alone, where XLA multiplies both."""
    monkeypatch.setattr(library, "isa", lambda: "avx512")  # with AMX, kernels multiply bfloat16
    half, brain = (
        TENSOR.findall(layer.lowered(layout, 8, x).as_text()) for x in (layer.HALF, "bfloat16")
    )
    assert "f16" in half
    assert half == [kind.replace("bf16", "f16") for kind in brain]


def test_moves_of_a_ring_use_one_direction() -> None:
    """Where a ring has two of them, half of its speed."""
    for name, ratio in (("H200", 1), ("TPU v5p", 2)):
        both, one = (
            seconds(Work(0, 0, 0, *sent), MACHINES[name], 8) for sent in ((1e9,), (0, 1e9))
        )
        assert one == ratio * both
