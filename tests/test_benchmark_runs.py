"""Runs of the benchmark take turns, are repeated where they were disturbed, and are kept."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.benchmarks import __main__ as command
from experiments.benchmarks import report, unfinished
from experiments.benchmarks.cases import CASES
from jaxmha.bench import exact, measure, programs, run, worker
from jaxmha.bench.case import Case
from jaxmha.bench.peers import OURS, PEERS, SWAPPED
from jaxmha.bench.program import Program
from jaxmha.cli.app import app
from tests.test_benchmarks import TINY


class Script:
    """A fleet that writes down what it is asked, and answers from a script."""

    blind = False

    def __init__(self, rates: list[float]) -> None:
        self.asked: list[tuple[str, str]] = []
        self.rates = rates

    def __enter__(self) -> "Script":  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        pass

    platform = "cpu"

    def __getitem__(self, peer: str) -> Any:
        return _Actor(self, peer)

    def outputs(self, peer: str, do: str, request: dict[str, Any]) -> dict[str, Any]:
        if do == "sgemm":
            square = request["shape"] == (1024, 1024, 1024)
            return {"rate": (self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]) * square}
        self.asked.append((peer, do))
        if peer == "oracle":
            return {"failed": "no memory"} if self.blind else {}
        if peer == "broken" and do == "prepare":
            return {"failed": "cannot"}
        if peer == "dying" and do == "round":
            return {"failed": "ended"}
        slow = 100.0 if peer == "slow" else 0.1
        return {"estimate": slow, "seconds": 1.0, "compile": 0.5, "error": 1e-7}


class _Actor:
    def __init__(self, script: Script, peer: str) -> None:
        self.script, self.peer = script, peer

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        return self.script.outputs(self.peer, do, request)


def run_script(
    monkeypatch: pytest.MonkeyPatch, peers: list[str], rates: list[float], case: Case
) -> tuple[Script, dict[str, Any]]:
    script = Script(rates)
    monkeypatch.setattr(measure, "Fleet", lambda *_: script)
    results = measure.measure([case], peers, rounds=4, budget=60.0, threads=1, backends=["xla"])
    return script, results["cases"][0]


class Device(Script):
    """A fleet on a device with limits, which is disturbed from the second probe on."""

    def outputs(self, peer: str, do: str, request: dict[str, Any]) -> dict[str, Any]:
        known: dict[str, dict[str, Any]] = {
            "device": {"platform": "cpu", "device": "a CPU"},
            "explain": {"supported": [], "chosen": "native", "call": {}},
            "limits": {"tflops": 1.0, "gb_per_second": 1.0},
        }
        return known.get(do) or super().outputs(peer, do, request)


def test_the_command_tells_every_step_and_repeats_none(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Device([100.0, 100.0, 10.0])
    for module in (measure, run):
        monkeypatch.setattr(module, "Fleet", lambda *_: script)
    arguments = (
        "bench decode -B 2 -S 64 -N 4 -K 2 -H 8 --rounds 2 --peer jaxmha:paged --peer jax-nn"
    )
    done = CliRunner().invoke(app, arguments.split())
    assert done.exit_code == 0, done.output
    lines = [line.partition("measuring ")[2] for line in done.stderr.splitlines()]
    assert lines == [
        *("the device", "machine", "core-forward-decode-B2-T1-S64-E32-K2-H8", "the float64 output"),
        *("jaxmha:paged, 1 of 2: compile and check", "jax-nn, 2 of 2: compile and check"),
        *("round 1 of 2", "round 2 of 2", "the device again"),
    ]
    assert [do for _, do in script.asked].count("round") == 4
    assert "the machine was busy" in done.stdout


@pytest.mark.parametrize(("seconds", "calls"), [(0.01, 2), (3.0, 1)])
def test_a_long_call_is_not_repeated_before_the_rounds(
    monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int
) -> None:
    """The call that is compared with float64 has warmed it up."""
    made: list[int] = []
    clock = iter(np.arange(100) * seconds)
    program = Program(lambda: None, lambda calls=1: made.append(calls), lambda cotangent: (0, None))  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(worker, "limit", lambda: None)
    monkeypatch.setattr(programs, "program", lambda *_: program)
    monkeypatch.setattr(exact, "errors", lambda *_, **__: {"error": 0.0})
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    found = worker.prepare(worker.State("jaxmha"), TINY["plain"].as_dict(), "")
    assert made == [1] * calls
    assert found["estimate"] == pytest.approx(seconds)


def test_make_bench_is_the_harness_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(cases: Any, *_: Any, **__: Any) -> Any:
        asked.extend(case.name for case in cases)
        raise LookupError

    monkeypatch.setattr(run, "Fleet", lambda *_: Device([100.0]))
    monkeypatch.setattr(measure, "measure", measured)
    arguments = ["bench", "layer", "-B", "8", "-T", "128", "-N", "8", "-H", "64"]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    with pytest.raises(LookupError):
        command.collect(command.parsed(["--case=layer-forward-plain-B8-T128-E512"]))
    assert asked == 2 * ["layer-forward-plain-B8-T128-E512"]
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    assert f"python -m {command.__package__} --write" in makefile.partition("\nbench: ")[2]


def test_rounds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(TINY["plain"], scope="core")
    peers = ["a", "broken", "b", "dying", "slow"]
    script, entry = run_script(monkeypatch, peers, [100.0], case)
    turns = [peer for peer, do in script.asked if do == "round"]
    rounds = ["a", "b", "dying", "slow"], ["b", "slow", "a"], ["slow", "a", "b"], ["a", "b"]
    assert turns == [peer for turn in rounds for peer in turn]
    assert entry["peers"]["broken"] == {"failed": "cannot"}
    assert entry["peers"]["dying"]["failed"] == "ended"
    assert entry["peers"]["a"] == {"error": 1e-7, "compile": 0.5, "seconds": [1.0] * 4}
    assert len(entry["peers"]["slow"]["seconds"]) == 3
    assert list(entry["peers"]) == peers
    assert not entry["noisy"]


def test_what_dies_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(TINY["plain"], scope="core")
    rates = [100.0, 100.0, 70.0, 100.0, 100.0]
    script, entry = run_script(monkeypatch, ["a", "dying"], rates, case)
    assert script.asked.count(("a", "round")) == 8
    assert script.asked.count(("dying", "round")) == 1
    assert entry["peers"]["dying"] == {"failed": "ended"}
    assert entry["attempts"] == 2


def test_nothing_is_timed_without_a_float64_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Script, "blind", True)
    script, entry = run_script(monkeypatch, ["a"], [100.0], replace(TINY["plain"], scope="core"))
    assert entry["peers"]["a"]["failed"].startswith("no float64 output to compare with: no memory")
    assert script.asked == [("oracle", "expect")]


@pytest.mark.parametrize(
    ("rates", "attempts", "noisy"),
    [
        ([100.0, 100.0, 80.0], 1, False),  # 1.25x
        ([100.0, 100.0, 70.0, 100.0, 99.0], 2, False),
        ([100.0, 100.0, 70.0, 100.0, 70.0], 2, True),
        ([70.0, 70.0, 70.0, 100.0], 1, False),
    ],
)
def test_a_disturbed_case_is_repeated_and_marked(
    rates: list[float], attempts: int, noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(TINY["plain"], scope="core")
    _, entry = run_script(monkeypatch, ["a"], rates, case)
    assert (entry["attempts"], entry["noisy"]) == (attempts, noisy)


def test_a_later_run_measures_what_is_missing_or_was_disturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [replace(TINY["plain"], scope="core", T=T) for T in (2, 3, 5)]
    options: dict[str, Any] = {"rounds": 1, "budget": 60.0, "threads": 1, "backends": ["xla"]}

    def run(rates: list[float], **more: Any) -> tuple[list[str], dict[str, Any]]:
        script = Script(rates)
        monkeypatch.setattr(measure, "Fleet", lambda *_: script)
        found = measure.measure(cases, ["a"], **options, **more)
        return [do for _, do in script.asked if do == "round"], found

    kept: list[dict[str, Any]] = []
    # The second case is disturbed in both attempts; then it is late.
    rates = [100.0, 100.0, 100.0, 70.0, 70.0, 60.0, 60.0]
    turns, first = run(rates, late=lambda: len(kept) == 2, done=kept.append)
    assert [entry["noisy"] for entry in first["cases"]] == [False, True]
    assert len(turns) == 3
    assert kept[-1] == first
    turns, second = run([90.0], known=first)
    assert [entry["noisy"] for entry in second["cases"]] == [False, False, False]
    assert len(turns) == 2
    assert second["cases"][0] == first["cases"][0]
    assert second["sgemm"] == {"xla": 100.0}
    # Worse than what is there already: what is there stays, with its date, marked, and in the end
    # it is not measured any more.
    found, known = first, first["cases"][1]
    found["cases"][1]["date"] = "2026-01-02"
    for attempts in (4, 6, 6):
        found = run([100.0, 50.0], known=found)[1]
        assert found["cases"][1] == known | {"attempts": attempts}
        assert found["cases"][1]["noisy"]
    assert run([100.0, 50.0], known=found)[0] == ["round"] * 0


def test_runs_of_other_machines_or_sources_are_not_mixed(tmp_path: Path) -> None:
    key = unfinished.identity(rounds=7)
    found = {"sgemm": {"xla": 1.0}, "quiet": {}, "cases": []}
    assert unfinished.resume(tmp_path / "full.json", key) == (measure.NOTHING, 0.0)
    kept = {"identity": key, "seconds": 60.0, "found": found}
    unfinished.keep(tmp_path / "full.json", kept)
    assert unfinished.resume(tmp_path / "full.json", key) == (found, 60.0)
    others: list[dict[str, Any]] = [{"rounds": 5}, {"sources": "changed"}, {"machine": {}}]
    others.append({"settings": {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}})
    for other in others:
        with pytest.raises(ValueError, match=f"other {next(iter(other))}: leave --resume out"):
            unfinished.resume(tmp_path / "full.json", key | other)


def test_some_cases_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, or those that are marked, in the place of what is stored; the others stay."""
    names = ["layer-forward-plain-B8-T128-E512", "layer-forward-plain-B1-T2048-E512"]
    chosen = command.parsed(["--full", *(f"--case={name}" for name in names)])
    rounds = {"seconds": [1.0] * 7}
    entries = [
        {
            "name": name,
            "case": case.as_dict(),
            "noisy": i == 1,
            "probes": [{"xla": 1.0}],
            "peers": {OURS: rounds},
        }
        for i, (name, case) in enumerate(zip(names, chosen.cases, strict=True))
    ]
    results = {
        **{key: chosen.identity[key] for key in ("machine", "versions", "settings", "native")},
        "rounds": 7,
        "threads": chosen.threads,
        "cases": entries,
        "seconds": 60,
        "peers": {peer: {"absent": PEERS[peer].absent} for peer in PEERS},
        "date": "2026-01-02",
        "command": "then",
        "sgemm": {},
        "quiet": {},
    }
    (tmp_path / "full.json").write_text(json.dumps(results))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    marked = command.parsed(["--full", "--again"])
    assert [case.name for case in marked.cases] == names[1:]
    again = command.parsed(["--full", "--again", "--case", names[0]])
    assert [case.name for case in again.cases] == names[:1]
    assert [entry["name"] for entry in again.known["cases"]] == names[1:]

    def measured(cases: Any, *_: Any, known: Any, answered: Any, **__: Any) -> Any:
        assert len(answered) == len(CASES)
        return {"cases": [entries[0] | {"noisy": False}, *known["cases"]], "sgemm": {}, "quiet": {}}

    monkeypatch.setattr(measure, "measure", measured)
    found = command.collect(again)
    assert (found["date"], found["command"], found["seconds"]) == ("2026-01-02", "then", 60)
    assert [set(entry) & {"again"} for entry in found["cases"]] == [{"again"}, set()]
    entries[1]["noisy"] = False
    for more, message in (
        ({"cases": entries}, "none of the stored cases is named by --case, or marked ~"),
        ({"rounds": 5}, "was measured with other rounds: leave --again out"),
    ):
        (tmp_path / "full.json").write_text(json.dumps(results | more))
        with pytest.raises(SystemExit, match="2"):
            command.parsed(["--full", "--again"])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.parsed(["--again"])
    assert "quick.json: leave --again out" in capsys.readouterr().err


def test_a_run_has_the_date_of_its_last_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the command which found nothing to measure."""
    monkeypatch.setattr(unfinished, "BUILD", tmp_path)
    name = "--case=layer-forward-plain-B8-T128-E512"
    days = ["2026-01-02", "2026-01-01"]

    def measured(*_: Any, **__: Any) -> Any:
        return {"cases": [{"name": day, "date": day} for day in days], "sgemm": {}, "quiet": {}}

    monkeypatch.setattr(measure, "measure", measured)
    found = command.collect(command.parsed([name, "--resume"]))
    assert found["date"] == days[0]
    assert [entry["date"] for entry in found["cases"]] == days


def test_a_measurement_has_its_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "today", lambda: "2026-01-02")
    _, entry = run_script(monkeypatch, ["a"], [100.0], replace(TINY["plain"], scope="core"))
    assert entry["date"] == "2026-01-02"


def test_figures_are_not_begun_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        command.parsed(["--write"])
    assert capsys.readouterr().err == "--write draws figures: matplotlib is not installed\n"


def stored(**other: Any) -> str:
    return json.dumps(json.loads((report.RESULTS / "quick.json").read_text()) | other)


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--again", "{", "quick.json is no JSON"),
        (
            "--again",
            "[]",
            "quick.json has no peers, sgemm, quiet, cases, seconds, date, command as ",
        ),
        ("--again", "null", "--again: .*quick.json has no peers, sgemm, quiet, cases, seconds"),
        ("--again", stored(peers=[]), "quick.json has no peers as a run"),
        ("--again", stored(peers={"jaxmha": None}), "quick.json has no absent as a run"),
        ("--again", stored(seconds="x"), "quick.json has no seconds as a run"),
        ("--again", stored(cases=None), "quick.json has no cases as a run"),
        ("--again", stored(cases=[{"name": "x"}]), "quick.json has no peers as a run"),
        ("--resume", "{}", "--resume: .*quick.json has no identity, found, seconds as a run"),
        ("--resume", '{"identity": 1, "found": {}, "seconds": 3}', "quick.json has no identity as"),
        ("--resume", '{"identity": {}, "found": {}, "seconds": 3}', "no sgemm, quiet, cases as a"),
    ],
)
def test_damaged_results_are_named(
    option: str,
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(unfinished, "BUILD", tmp_path)
    (tmp_path / "quick.json").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        command.parsed([option])
    printed = capsys.readouterr().err
    assert re.search(message, printed)
    assert printed.count("\n") == 1


@pytest.mark.parametrize("blocked", ["results", "build", "results/quick.md", "build/quick.json"])
def test_where_nothing_can_be_stored_nothing_is_measured(
    blocked: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(unfinished, "BUILD", tmp_path / "build")
    if "." in blocked:
        (tmp_path / blocked).mkdir(parents=True)
    else:
        (tmp_path / blocked).write_text("a file")
    with pytest.raises(SystemExit, match="2"):
        command.parsed(["--write"])
    assert f"{tmp_path / blocked}: results cannot be stored there: " in capsys.readouterr().err


def test_a_swapped_layer_is_measured_where_that_is_the_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for peer in SWAPPED.values():
        assert [PEERS[peer].takes(replace(TINY["plain"], T=T)) for T in (512, 1024)] == [0, 1]
    assert all(PEERS[peer].takes(case) for peer in SWAPPED for case in CASES)
    case = replace(TINY["plain"], scope="core")
    script = Script([100.0])
    monkeypatch.setattr(measure, "Fleet", lambda *_: script)
    found = measure.measure(
        [case], ["a", "b"], rounds=1, budget=1.0, threads=1, backends=["xla"],
        takes=lambda peer, case: peer == "b",
    )  # fmt: skip
    assert list(found["cases"][0]["peers"]) == ["b"]
    assert "a" not in dict(script.asked)
