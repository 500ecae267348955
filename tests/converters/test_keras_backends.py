"""Keras on TensorFlow: what is tested on JAX, in one process of its own.

Keras chooses its backend once per process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_keras_on_tensorflow() -> None:
    pytest.importorskip("tensorflow")
    # Bits of other dtypes do not depend on the backend.
    done = run("tensorflow", "keras and not middle and not float16 and not float64")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 20, done.stdout


@pytest.mark.slow
def test_another_backend_is_noticed() -> None:
    """The run above would fail if Keras did not listen to the variable."""
    done = run("no_such_backend", "test_keras_runs_on_the_backend_asked_for")
    assert done.returncode != 0
