"""Where time goes is read from XLA's own trace."""

import doctest
import subprocess
import sys

import pytest

from experiments.benchmarks import cases, profile


def test_examples() -> None:
    assert doctest.testmod(profile).attempted
    assert not doctest.testmod(profile).failed


def test_products_are_found_in_the_trace() -> None:
    (case,) = cases.select(["layer-forward-plain-B1-T64-E256"], quick=False)
    found = profile.profile("jaxmha", case)
    assert found["kernels"]["products"] > 0
    assert set(found["kernels"]) <= {kind for _, kind in profile.KINDS} | {profile.MOVES}


def test_a_program_that_nothing_compiled_is_refused() -> None:
    (case,) = cases.select(["layer-forward-plain-B1-T64-E256"], quick=False)
    with pytest.raises(ValueError, match="no compiled program"):
        profile.profile("torch-sdpa", case)


def test_an_unknown_case_gives_one_message() -> None:
    command = [sys.executable, "-m", "experiments.benchmarks.profile", "nothing"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "nothing" in found.stderr
    assert "Traceback" not in found.stderr
