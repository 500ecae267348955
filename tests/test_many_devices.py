"""Runs `tests/sharding` in a process with eight simulated devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(marked: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", marked, "tests/sharding"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.long
def test_eight_devices() -> None:
    run("not slow")


@pytest.mark.slow
def test_eight_devices_slow() -> None:
    run("slow")
