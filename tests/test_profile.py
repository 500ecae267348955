"""Where time goes is read from XLA's own trace."""

import doctest
import subprocess
import sys

import pytest

from experiments.benchmarks import cases
from experiments.profile import dispatch, flags, kernels, parts


def test_examples() -> None:
    for module in (flags, kernels, parts):
        assert doctest.testmod(module).attempted
        assert not doctest.testmod(module).failed


@pytest.mark.parametrize("backend", ["xla", "torch"])
def test_every_part_is_measured(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SECONDS", 0.0)
    for direction in ("forward", "backward"):
        (case,) = cases.select([f"layer-{direction}-plain-B1-T64-E512"], quick=False)
        found = parts.measure(backend, case)
        assert found.keys() == {"whole", *parts.COUNTS[direction]}
        assert all(seconds > 0 for seconds in found.values())
        row = parts.split(case.name, found)
        assert sum(row.values()) == pytest.approx(2 * row["whole"])


def test_the_parts_are_all_products_of_a_layer() -> None:
    """What blocks multiply, times how many there are, is the work of the case."""
    (case,) = cases.select(["layer-forward-plain-B2-T512-E512"], quick=False)
    x = parts.inputs(case)
    core = len(x.steps) * 4 * x.scores.size * case.H
    projections = 2 * x.x.shape[0] * (x.into.size + x.out_of.size)
    assert core + projections == case.flop


def test_calls_are_timed_eager_and_under_jit() -> None:
    found = dispatch.collect(calls=3)
    assert len(found) == 3
    assert all(0 < x < 1e6 for by_way in found.values() for x in by_way.values())
    assert {tuple(by_way) for by_way in found.values()} == {("eager", "under jit")}


def test_products_are_found_in_the_trace() -> None:
    (case,) = cases.select(["layer-forward-plain-B1-T64-E256"], quick=False)
    found = kernels.profile("jaxmha", case)
    assert found["kernels"]["products"] > 0
    assert set(found["kernels"]) <= {kind for _, kind in kernels.KINDS} | {kernels.MOVES}


def test_a_program_that_nothing_compiled_is_refused() -> None:
    (case,) = cases.select(["layer-forward-plain-B1-T64-E256"], quick=False)
    with pytest.raises(ValueError, match="no compiled program"):
        kernels.profile("torch-sdpa", case)


def test_an_unknown_case_gives_one_message() -> None:
    command = [sys.executable, "-m", "experiments.profile.kernels", "nothing"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "nothing" in found.stderr
    assert "Traceback" not in found.stderr
