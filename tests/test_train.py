"""Training: it stops anywhere and goes on bit for bit, and either attention gives one curve."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import chex
import numpy as np
import pytest

from experiments import frame
from experiments.train import __main__ as command
from experiments.train import data, training
from experiments.train.data import Examples
from experiments.train.model import ATTENTION, Settings
from experiments.train.training import Trainer, side_by_side, train
from tests.tolerance import assert_close, assert_same

TINY = Settings(steps=50, dropout=0.4, batch=3, T=7, D=6, N=2, blocks=1, every=20)


pytestmark = pytest.mark.usefixtures("implicit_promotion")


def drawn(count: int, T: int = TINY.T) -> Examples:
    """Random texts of every length; after its end a text is full of what is not to be read."""
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, T + 1, count).astype(np.int32)
    texts = rng.integers(1, 256, (count, T)).astype(np.uint8)
    return Examples(texts, lengths, rng.integers(0, len(data.PACKAGES), count).astype(np.int32))


BOTH = drawn(11), drawn(5)


class PluggedOutError(Exception):
    """Somebody pulled the plug."""


def interrupt(trainer: Trainer) -> None:
    if len(trainer.curve.loss) == 23:  # after the checkpoint of step 20
        raise PluggedOutError


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_as_if_it_was_not(tmp_path: Path) -> None:
    whole = train(TINY, BOTH, tmp_path / "whole")
    assert len(set(whole.curve.loss)) == 50
    assert whole.curve.steps == [20, 40, 50]
    with pytest.raises(PluggedOutError):
        train(TINY, BOTH, tmp_path / "parts", progress=interrupt)
    with pytest.raises(FileExistsError, match="has a checkpoint of step 20: resume, or remove it"):
        train(TINY, BOTH, tmp_path / "parts")
    with pytest.raises(ValueError, match=r"other settings: seed 0, not 1; steps 50, not 6"):
        train(replace(TINY, seed=1, steps=6), BOTH, tmp_path / "parts", resume=True)
    parts = train(TINY, BOTH, tmp_path / "parts", resume=True)
    assert parts.curve == whole.curve  # floats, so bit for bit
    chex.assert_trees_all_equal(parts.state, whole.state, strict=True)


def test_seconds_of_all_sessions_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "step", lambda self: self.curve.loss.append(1.0))
    monkeypatch.setattr(Trainer, "evaluate", lambda self: None)
    clock = iter(range(0, 10_000, 7))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    settings = replace(TINY, steps=3, every=1)

    def stop(trainer: Trainer) -> None:
        if len(trainer.curve.loss) == 2:
            raise PluggedOutError

    with pytest.raises(PluggedOutError):
        train(settings, BOTH, tmp_path / "parts", progress=stop)
    assert train(settings, BOTH, tmp_path / "parts", resume=True).earlier == 14


KILLED = """
import os, signal, sys
from dataclasses import asdict
from pathlib import Path
import json
from experiments.train.training import train
from tests.test_train import BOTH, TINY

def progress(trainer):
    if sys.argv[2] == "kill" and len(trainer.curve.loss) == 23:
        os.kill(os.getpid(), signal.SIGKILL)

trainer = train(TINY, BOTH, Path(sys.argv[1]), resume=sys.argv[2] == "resume", progress=progress)
print(json.dumps(asdict(trainer.curve)))
"""


@pytest.mark.slow
def test_a_process_that_was_killed_goes_on(tmp_path: Path) -> None:
    def run(folder: str, how: str) -> subprocess.CompletedProcess[str]:
        code = [sys.executable, "-c", KILLED, str(tmp_path / folder), how]
        environment = os.environ | {"PYTHONPATH": os.getcwd()}
        return subprocess.run(code, check=False, capture_output=True, text=True, env=environment)

    assert run("parts", "kill").returncode == -signal.SIGKILL
    parts, whole = run("parts", "resume"), run("whole", "")
    assert parts.returncode == whole.returncode == 0, parts.stderr + whole.stderr
    assert parts.stdout == whole.stdout
    assert len(json.loads(whole.stdout)["loss"]) == 50


@pytest.mark.slow
def test_either_attention_gives_the_same_curve() -> None:
    settings = [replace(TINY, attention=kind, dropout=0.0) for kind in ATTENTION]
    ours, flax = side_by_side(settings, BOTH, 50)
    assert len(flax["loss"]) == 50
    assert max(flax["loss"]) / min(flax["loss"]) > 1.5  # something was learned
    for step, (a, e) in enumerate(zip(ours["loss"], flax["loss"], strict=True)):
        assert_close(np.float32(a), np.array(e), f"step {step}")


@pytest.mark.everyday(attention=["jaxmha"])
@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION)
def test_what_is_beyond_a_length_is_not_read(attention: str) -> None:
    model = Trainer(replace(TINY, attention=attention), BOTH).model
    model.eval()
    texts, lengths, labels = drawn(3)
    lengths = np.array([1, 3, 6], np.int32)
    losses, _ = training.judged(model, texts, lengths, labels)
    other = np.where(np.arange(7) < lengths[:, None], texts, texts + 1)
    assert_same(training.judged(model, other, lengths, labels)[0], losses)
    longer, _ = training.judged(model, texts, np.full(3, 7, np.int32), labels)
    assert np.abs(np.asarray(longer) - np.asarray(losses)).min() > 1e-4


@pytest.fixture(scope="module")
def functions() -> tuple[Examples, Examples]:
    """Of some packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "PACKAGES", data.PACKAGES[-4:])
        return data.read(64)


def test_functions_of_the_standard_library(functions: tuple[Examples, Examples]) -> None:
    texts = [
        {text[:length].tobytes() for text, length, _ in zip(*side, strict=True)}
        for side in functions
    ]
    for side, distinct in zip(functions, texts, strict=True):
        assert len(distinct) == len(side.labels)
        assert set(side.labels) == set(range(4))
        assert side.texts.shape[1] == side.lengths.max() == 64
        assert side.lengths.min() >= data.SHORTEST
        assert len(set(side.lengths)) > 20
        assert not side.texts[np.arange(64) >= side.lengths[:, None]].any()
    assert not texts[0] & texts[1]
    assert 3 < len(texts[0]) / len(texts[1]) < 6
    assert any(text.startswith(b"def ") for text in texts[0])


def test_a_batch_depends_on_its_step_alone() -> None:
    examples = drawn(11)
    examples = examples._replace(labels=np.arange(11, dtype=np.int32))
    epochs = [[data.batch(examples, 3, 0, 3 * e + i).labels for i in range(3)] for e in range(2)]
    for epoch in epochs:
        assert len(set(np.concatenate(epoch))) == 9
    assert (np.concatenate(epochs[0]) != np.concatenate(epochs[1])).any()
    assert_same(data.batch(examples, 3, 0, 4).labels, epochs[1][1])
    assert (data.batch(examples, 3, 1, 0).labels != epochs[0][0]).any()


@pytest.mark.parametrize("wrong", ["--steps=1", "--seed=-1", "--dropout=1", "--attention=torch"])
def test_bad_arguments_end_with_a_message(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        frame.run(command.EXPERIMENT, [wrong])
    assert ended.value.code == 2
    assert wrong.split("=")[0] in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--checkpoints", str(tmp_path / "kept"), "--side-by-side", "2"]
    monkeypatch.setattr(command, "Settings", lambda *_: TINY)
    monkeypatch.setattr(frame, "HERE", tmp_path)
    monkeypatch.setattr(data, "read", lambda T: BOTH)
    frame.run(command.EXPERIMENT, [*arguments, "--json", "--write"])
    results = json.loads(capsys.readouterr().out)
    assert results["settings"] == asdict(TINY)
    assert len(results["curve"]["loss"]) == 50
    assert list(results["side_by_side"]["runs"]) == list(ATTENTION)
    stored = json.loads((tmp_path / "train" / "results.json").read_text())
    assert {name: stored[name] for name in results} == results
    assert (tmp_path / "train" / "curves.png").stat().st_size > 10_000
    with pytest.raises(SystemExit) as ended:
        frame.run(command.EXPERIMENT, arguments[:2])
    assert ended.value.code == 2
    assert "has a checkpoint of step 50" in capsys.readouterr().err
    frame.run(command.EXPERIMENT, [*arguments[:2], "--resume"])
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("present", [False, True])
def test_nothing_to_resume_from(present: bool, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    if present:
        folder.mkdir()
    with pytest.raises(FileNotFoundError, match=f"{folder} has no checkpoint to resume from"):
        train(TINY, BOTH, folder, resume=True)
    assert folder.exists() == present


@pytest.mark.parametrize("more", [[], ["--resume"]], ids=str)
def test_a_folder_that_cannot_be_used_ends_with_a_message(
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "kept")
    monkeypatch.setattr(command, "Settings", lambda *_: TINY)
    monkeypatch.setattr(data, "read", lambda T: BOTH)
    with pytest.raises(SystemExit) as ended:
        frame.run(command.EXPERIMENT, ["--checkpoints", folder, *more])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert folder in message
    assert "\n" not in message.strip()


def test_stored_results_are_of_the_present_command() -> None:
    results = json.loads(command.EXPERIMENT.path.read_text())
    assert results["settings"].keys() == asdict(Settings()).keys()
    assert len(results["curve"]["loss"]) == results["settings"]["steps"]
    assert results["curve"]["accuracy"][-1] > 2 * results["most_frequent"]
    compared = results["side_by_side"]
    assert compared["difference"] < 1e-5
    assert {len(run["loss"]) for run in compared["runs"].values()} == {50}
