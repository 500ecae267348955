"""Keras on other backends: what is tested on JAX, in one process of its own.

Keras chooses its backend once per process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.converters import on_backend

HERE = Path(__file__).parent
FILES = (
    "test_round_trip.py",
    "test_parity.py",
    "test_gradients.py",
    "test_validation.py",
    "test_live_validation.py",
)


def run(backend: str, choice: str) -> subprocess.CompletedProcess[str]:
    """pytest on the tests whose names contain the choice."""
    environment = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    # Other plugins and coverage of the outer run have no part in this one.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", choice]
    return subprocess.run(
        [*command, *(str(HERE / name) for name in FILES)],
        env=environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_keras_on(backend: str) -> None:
    pytest.importorskip(backend)
    # Bits of other dtypes do not depend on the backend.
    done = run(backend, "keras and not middle and not float16 and not float64")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 20, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    ["torch", *(pytest.param(x, marks=pytest.mark.slow) for x in ("jax", "numpy", "tensorflow"))],
)
def test_every_function_works_on(backend: str) -> None:
    pytest.importorskip(backend)
    done = subprocess.run(
        [sys.executable, "-m", on_backend.__name__],
        env=os.environ | {"KERAS_BACKEND": backend},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert done.stdout.split("\n")[:-1] == [f"{backend} {x.__name__}" for x in on_backend.CHECKS]


@pytest.mark.slow
def test_another_backend_is_noticed() -> None:
    """The run above would fail if Keras did not listen to the variable."""
    done = run("no_such_backend", "test_keras_runs_on_the_backend_asked_for")
    assert done.returncode != 0
