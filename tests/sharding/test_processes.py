"""Real processes over loopback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_agree_with_one(count: int) -> None:
    command = [sys.executable, "-m", "experiments.scaling.processes", "--json"]
    done = subprocess.run(
        [*command, "--processes", str(count)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert len(found["layouts"]) == 6
    # The output bias is on every process.
    assert all(share == pytest.approx(1 / count, rel=0.05) for share in found["read"])


def test_bad_input() -> None:
    command = [sys.executable, "-m", "experiments.scaling.processes", "--processes", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "must be 2, 4 or 8" in done.stderr
