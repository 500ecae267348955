"""Settings of the environment are measured in processes of their own, calls in this one."""

import doctest
from pathlib import Path

import pytest

from experiments import frame
from experiments.environment import __main__ as environment
from experiments.environment import page
from experiments.pages import Page


def test_examples() -> None:
    assert doctest.testmod(page) == (0, 2)


@pytest.mark.slow
def test_calls_are_timed_eager_and_under_jit() -> None:
    found = environment.calls(3)
    assert len(found) == 3
    assert all(0 < x < 1e6 for by_way in found.values() for x in by_way.values())
    assert {tuple(by_way) for by_way in found.values()} == {("eager", "under jit")}


@pytest.mark.slow
def test_a_setting_reaches_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "CASES", ("layer-forward-plain-B1-T64-E256",))
    found = environment.measured({"OMP_NUM_THREADS": "1"})
    assert found["layer-forward-plain-B1-T64-E256"]["seconds"] > 0


@pytest.mark.slow
def test_a_flag_that_xla_does_not_know_is_one_message() -> None:
    with pytest.raises(ValueError, match="XLA_FLAGS=--xla_frob"):
        environment.measured({"XLA_FLAGS": "--xla_frob"})


def test_the_best_setting_is_named() -> None:
    none = {"a": {"seconds": 2.0, "error": 1.0}, "b": {"seconds": 4.0, "error": 1.0}}
    half = {"a": {"seconds": 1.0, "error": 1.0}, "b": {"seconds": 2.0, "error": 1.0}}
    found = {
        "rounds": 3,
        "settings": {"none": {}, "slow": {"A": "1"}, "fast": {"B": "1"}},
        "results": {"none": none, "slow": none, "fast": half},
        "calls": {"dot_product_attention": {"eager": 30.0, "under jit": 9.0}},
    }
    text = Page("environment/page.md").text(found)
    assert "helps most, fast, takes 0.50" in text.splitlines()[0]
    assert "| slow (`A=1`) | 1.00 / 1.00 | 1.00 / 1.00 |" in text


def test_where_nothing_can_be_stored_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "environment" / "results.json"
    path.mkdir(parents=True)
    monkeypatch.setattr(frame, "HERE", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        frame.run(environment.EXPERIMENT, ["--write"])
    printed = capsys.readouterr().err
    assert printed == f"{path}: results cannot be stored there: it is no file\n"
