"""After kill -9 the target is the old checkpoint or the whole new one; see `kills`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SUFFIXES = (
    ".safetensors", ".pt", ".weights.h5", ".npz", ".safetensors.index.json", ".bin.index.json",
    ".orbax", ".toml",
)  # fmt: skip


def _kill(suffix: str, *options: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.checkpoint.kills", suffix, *options]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout)
    assert set(found) <= {"before a step", "at a moment", "old", "absent", "new", "temporaries"}
    return found


def test_kills_at_some_steps() -> None:
    found = _kill(".safetensors.index.json", "--moments", "0", "--every", "11")
    assert found["before a step"] > 2
    assert found["old"]
    assert found["new"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--new",)], ids=["overwrite", "new"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_kills_at_every_step_and_200_moments(suffix: str, options: tuple[str, ...]) -> None:
    found = _kill(suffix, "--moments", "200", *options)
    steps = 6 if suffix == ".toml" else 10  # a text is written in one
    assert found["before a step"] >= steps - 5 * bool(options)
    assert found["at a moment"] == 200
    assert found["absent" if options else "old"]
    assert found["new"]
