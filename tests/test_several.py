"""Common behaviour of the commands that train several variants."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from experiments import frame, records
from experiments.heads import __main__ as heads
from experiments.heads import measure
from experiments.initialisation.__main__ import EXPERIMENT as INITIALISATION
from experiments.pages import Page
from experiments.train import data, seeds
from tests.promotion import foreign
from tests.test_train import BOTH, TINY

each = pytest.mark.parametrize(
    "experiment", [heads.EXPERIMENT, INITIALISATION], ids=lambda experiment: experiment.name
)


@each
@pytest.mark.parametrize("wrong", ["--steps=7", "--steps=0", "--seeds=1", "--seed=3", "--steps=x"])
def test_bad_arguments_end_with_a_message(
    experiment: frame.Experiment, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        frame.run(experiment, [wrong])
    assert ended.value.code == 2
    assert wrong.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "stopped\n"),
        (ModuleNotFoundError("No module named 'optax'"), 2, "No module named 'optax'\n"),
    ],
)
def test_other_ends_have_one_message(
    raised: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(chosen: object) -> NoReturn:
        raise raised

    with pytest.raises(SystemExit) as ended:
        frame.run(heads.EXPERIMENT._replace(measure=measured), [])
    assert ended.value.code == code
    assert capsys.readouterr().err == message


@each
def test_the_page_shows_every_figure(experiment: frame.Experiment) -> None:
    found = records.load(experiment.path)
    assert f"experiments/{experiment.name}/measure.py" in found["sources"]
    text = Page(f"{experiment.name}/page.md").text(found)
    for name in experiment.figures:
        assert f"]({name})" in text
        assert (experiment.path.parent / name).read_text().startswith("<?xml")


@pytest.mark.slow
@each
def test_the_command(
    experiment: frame.Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Everything on small sizes, into a folder of its own."""
    monkeypatch.setattr(frame, "HERE", tmp_path)
    monkeypatch.setattr(data, "read", lambda T: BOTH)
    monkeypatch.setattr(seeds, "SMALL", replace(TINY, dropout=0.0, D=16))
    monkeypatch.setattr(heads, "OF_LAYERS", 1)
    monkeypatch.setattr(measure, "HEADS", (1, 8))
    with foreign():
        arguments = ["--steps", "10", "--seeds", "2", "--json", "--write"]
        assert frame.run(experiment, arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    written = records.load(tmp_path / experiment.name / "results.json")
    assert {name: written[name] for name in printed} == printed
    assert written["command"] == Page(f"{experiment.name}/page.md").command
    assert {file.name for file in tmp_path.glob("*/*.svg")} == set(experiment.figures)
