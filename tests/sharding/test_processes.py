"""Real processes over loopback."""

import json
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from experiments.scaling import processes, workers
from jaxmha import checkpoint
from tests.sharding import loading, printing
from tests.sharding.saving import saved

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["padded", "window", "segments"])
@pytest.mark.parametrize("count", [2, 4])
def test_processes_agree_with_one(count: int, mask: str) -> None:
    """Causal with another mask, grouped heads, dropout; outputs and gradients, twice."""
    command = [sys.executable, "-m", "experiments.scaling.processes", "--json", "--mask", mask]
    done = subprocess.run(
        [*command, "--processes", str(count)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert len(found["layouts"]) == 6
    # The output bias is on every process.
    assert all(share == pytest.approx(1 / count, rel=0.05) for share in found["read"])


@pytest.mark.slow
def test_slices_read_their_share(tmp_path: Path) -> None:
    loading.write(tmp_path, 64 << 20)
    for found in workers.together(loading.work, 2, tmp_path):
        assert len(found) == 7
        for name, of in found.items():
            assert of["share"] == 32 << 20, name
            assert of["read"] <= 1.05 * of["share"], name
            assert of["peak"] <= of["share"] + (256 << 20), name


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 8])
def test_killed_while_saving(tmp_path: Path, files: int) -> None:
    """One of two processes dies: the step before stays, and saving again completes."""
    assert workers.together(saved, 2, tmp_path / "step1", 0.0) == [True, True]
    with pytest.raises(BrokenProcessPool):
        workers.together(saved, 2, tmp_path / "step2", 1.0, files)
    assert not (tmp_path / "step2").exists()
    with checkpoint.open(tmp_path / "step1") as file:
        assert file["block/bias"].tolist() == list(range(0, 2**21, 64))
    assert workers.together(saved, 2, tmp_path / "step2", 1.0) == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step1", "step2"]


@pytest.mark.slow
def test_arrays_of_other_processes_print() -> None:
    for texts in workers.together(printing.texts, 2):
        assert texts[:2] == ["Mask(causal_offset=0, key_value_padding=bool[2, 5])"] * 2
        assert all("shape=(6, 3, 7)" in x or "Mask" in x or "6, 3, 7" in x for x in texts)


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        processes.main(["--processes", "3"])
    assert ended.value.code == 2
    assert "choose from 2, 4, 8" in capsys.readouterr().err
