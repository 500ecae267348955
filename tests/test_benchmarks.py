"""The benchmark measures what it says: its cases, its checks and its rounds."""

import doctest
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import frame, pages
from experiments.benchmarks import __main__ as command
from experiments.benchmarks import cases, report, unfinished
from experiments.benchmarks.cases import CASES, select
from jaxmha.bench import case as case_module
from jaxmha.bench import data, decode_peers, exact, fleet, measure, programs
from jaxmha.bench.case import Case
from jaxmha.bench.peers import OURS, PEERS, SWAPPED
from jaxmha.bench.program import UnsupportedError

ROOT = Path(__file__).parents[1]
TINY = {
    "plain": Case("layer", "forward", "plain", 2, 5, 5, 2, 2, 4),
    "causal": Case("layer", "forward", "causal", 2, 5, 5, 2, 2, 4),
    "padded": Case("layer", "forward", "padded", 3, 5, 5, 2, 2, 4),
    "gqa": Case("layer", "forward", "gqa", 2, 5, 5, 4, 2, 3),
    "cross": Case("layer", "forward", "cross", 2, 5, 7, 2, 2, 4),
    "decode": Case("core", "forward", "decode", 2, 1, 7, 4, 2, 3),
}
# Keras has one backend per process, and here it is JAX.
HERE = [peer for peer in PEERS if peer != "keras-tf"]


pytestmark = pytest.mark.usefixtures("torch_as_it_was")


@pytest.fixture
def defaults() -> Iterator[None]:
    """JAX as users have it: the peers promote as they like."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# The cases.


def test_names_are_unique_and_lead_back() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert Case(**json.loads(json.dumps(case.as_dict()))) == case
        assert select([case.name]).count(case) == 1


def test_cases_cover_what_is_promised() -> None:
    layers = [case for case in CASES if case.scope == "layer"]
    sizes = [case.B * case.T for case in layers if case.kind == "plain"]
    assert (min(sizes), max(sizes)) == (64, 16384)
    for direction in ("forward", "backward"):
        of_direction = [case for case in layers if case.direction == direction]
        kinds = {"plain", "causal", "padded", "gqa", "cross"}
        assert {case.kind for case in of_direction} - {"decode"} == kinds
        assert {case.E for case in of_direction} >= {256, 512, 1024}
        assert {case.T for case in of_direction} >= {77, 197, 333, 1023, 512, 2048, 4096, 16384}
        assert {case.H for case in of_direction} == {64, 80, 96}
        assert any(case.B * case.N == 1 for case in of_direction)
    core = {case.kind for case in CASES if case.scope == "core"}
    assert core == {"plain", "causal", "padded", "gqa", "cross", "decode"}
    quick = select(quick=True)
    assert {case.kind for case in quick} == core
    assert {(case.scope, case.direction) for case in quick} >= {
        ("layer", "forward"),
        ("layer", "backward"),
        ("core", "forward"),
    }
    assert len(quick) < len(CASES) / 4


@pytest.mark.parametrize("case", CASES)
def test_cases_are_valid(case: Case) -> None:
    assert case.N % case.K == 0
    assert (case.kind == "gqa") <= (case.K < case.N)
    assert case.kind in ("cross", "decode") or case.T == case.S
    assert (case.kind == "decode") <= (case.T == 1)
    assert (case.kind == "padded") <= (case.B > 1)
    if case.lengths is not None:
        assert len(case.lengths) == case.B
        assert all(0 < length <= case.S for length in case.lengths)
        assert max(case.lengths) > min(case.lengths) or case.kind == "decode"


@pytest.mark.parametrize("kind", TINY)
def test_work_is_counted_pair_by_pair(kind: str) -> None:
    case = TINY[kind]
    pairs = sum(
        (kind != "causal" or s <= t) and (case.lengths is None or s < case.lengths[b])
        for b in range(case.B)
        for t in range(case.T)
        for s in range(case.S)
    )
    core = 4 * case.N * case.H * pairs
    assert replace(case, scope="core").flop == core
    assert replace(case, scope="core", direction="backward").flop == 3.5 * core
    new = case.T if kind == "decode" else case.S  # what is in a cache is not projected again
    rows = case.B * (case.T * 2 * case.N + new * 2 * case.K)  # through four kernels
    layer = replace(case, scope="layer")
    assert layer.flop == core + 2 * rows * case.E * case.H
    assert replace(layer, direction="backward").flop == 3.5 * core + 6 * rows * case.E * case.H


@pytest.mark.parametrize(
    ("module", "count"), [(case_module, 5), (cases, 2), (pages, 1), (frame, 2)]
)
def test_examples(module: Any, count: int) -> None:
    assert doctest.testmod(module) == (0, count)


# The peers.


@pytest.mark.parametrize("kind", TINY)
def test_ours_and_torch_compute_every_kind(kind: str, tmp_path: Path, defaults: None) -> None:
    direction: Any = "backward" if kind in ("causal", "padded") else "forward"
    case = replace(TINY[kind], direction=direction)
    for peer in (OURS, "torch-sdpa"):
        found = errors(peer, case, tmp_path / "expected.npz")
        assert found.keys() == {"error"} | (
            {"gradient_error"} if direction == "backward" else set()
        )
        assert max(found.values()) < 1e-5


@pytest.mark.slow_variants(
    "flax-linen+jaxmha*", "keras-jax-causal", "flax-linen-causal", "flax-nnx+jaxmha-causal"
)
@pytest.mark.parametrize("kind", ["causal", "padded"])
@pytest.mark.parametrize("peer", [peer for peer in HERE if peer not in (OURS, "torch-sdpa")])
def test_every_peer_computes_the_same(peer: str, kind: str, tmp_path: Path, defaults: None) -> None:
    both = kind == "padded" and peer != "torch-native"
    direction: Any = "backward" if both else "forward"
    case = replace(TINY[kind], direction=direction)
    assert max(errors(peer, case, tmp_path / "expected.npz").values()) < 1e-5


@pytest.mark.parametrize("peer", decode_peers.PROGRAMS)
def test_a_decode_step_of_a_layer_can_be_repeated(
    peer: str, tmp_path: Path, defaults: None
) -> None:
    """`errors` calls it twice; the cache is written in place, and the token stays the last."""
    case = replace(TINY["decode"], scope="layer", N=2, K=2)
    assert errors(peer, case, tmp_path / "expected.npz")["error"] < 1e-5


@pytest.mark.parametrize(
    ("peer", "case", "reason"),
    [
        ("torch-sdpa", replace(TINY["decode"], scope="layer"), "no cache"),
        ("torch-native", replace(TINY["plain"], direction="backward"), "no gradient"),
        ("torch-native", TINY["cross"], "does not take its native fast path"),
        ("torch-weights", TINY["decode"], "see torch-sdpa"),
        ("keras-tf", TINY["plain"], "runs on jax here"),
    ],
)
def test_unsupported_cases_of_a_peer_are_named(
    peer: str, case: Case, reason: str, tmp_path: Path, defaults: None
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        errors(peer, case, tmp_path / "expected.npz")


@pytest.mark.parametrize(
    ("changed", "what"), [("rows", "error"), ("derivative", "gradient_error"), ("nan", "error")]
)
def test_a_wrong_output_is_not_timed(
    changed: str, what: str, tmp_path: Path, defaults: None
) -> None:
    case, path = replace(TINY["causal"], direction="backward"), tmp_path / "expected.npz"
    exact.write(case, path)
    with np.load(path) as stored:
        arrays = dict(stored)
    if changed == "derivative":
        arrays["derivative"] = arrays["derivative"] * 1.01
    else:
        arrays["rows"][-1, -1, -1] += np.nan if changed == "nan" else 1e-2
    np.savez(path, allow_pickle=False, **arrays)
    inputs = data.make(case)
    program = programs.program(OURS, case, inputs)
    program.compile()
    outputs = program.outputs(data.only_compared(case, inputs.cotangent))
    with pytest.raises(ValueError, match=f"wrong output: {what} "):
        exact.errors(case, inputs, path, *outputs)


def errors(peer: str, case: Case, path: Path) -> dict[str, float]:
    exact.write(case, path)
    inputs = data.make(case)
    program = programs.program(peer, case, inputs)
    program.compile()
    program.run()
    outputs = program.outputs(data.only_compared(case, inputs.cotangent))
    assert outputs[0].shape == inputs.cotangent.shape
    return exact.errors(case, inputs, path, *outputs)


# The processes.


def test_a_worker_returns_results_and_its_end_is_one(tmp_path: Path) -> None:
    case, path = TINY["padded"], tmp_path / "expected.npz"
    exact.write(case, path)
    with fleet.Fleet(threads=1) as workers:
        worker = workers[OURS]
        ready = worker.ask("prepare", case=case.as_dict(), expected=str(path))
        assert 0 < ready["error"] < 1e-5
        assert ready["calls"] >= 1
        assert ready["compile"] > 0
        assert worker.ask("round")["seconds"] > 0
        assert worker.ask("memory", case=case.as_dict())["bytes"] >= 0
        failed = worker.ask("prepare", case=case.as_dict(), expected="nowhere.npz")["failed"]
        assert failed.startswith("FileNotFoundError")
        assert worker.process is not None
        worker.process.kill()
        worker.process.wait()
        assert "ended with code -9" in worker.ask("round")["failed"]
        assert "nothing is prepared" in worker.ask("round")["failed"]


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


def test_the_parent_is_light() -> None:
    """Children inherit the size of their parent, and its threads would disturb them."""
    heavy = "{'torch', 'tensorflow', 'keras', 'flax', 'matplotlib'}"
    code = (  # the harness is jaxmha's, which imports JAX, but uses no device
        f"import sys, experiments.benchmarks.__main__\nprint({heavy} & set(sys.modules))\n"
        "from jax._src import xla_bridge\nassert not xla_bridge._backends"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


# The rounds.


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
    # Worse than what is there already: what is there stays.
    worse = run([50.0], known=first)[1]
    assert worse["cases"][1] == first["cases"][1]


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


# The command line.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--case nothing", "--case 'nothing' matches none of"),
        ("--peer theano", "--peer 'theano' is unknown: it may be jaxmha, torch-sdpa,"),
        ("--rounds 0", "--rounds must be between 1 and 1000, got 0"),
        ("--threads 9999", "--threads must be between 1 and"),
        ("--minutes 0", "--minutes must be more than 0, got 0"),
        ("--again --resume", "--again measures every peer of its cases: leave --peer,"),
        ("--again --minutes 3", "--again measures every peer of its cases: leave"),
        ("--write --peer jaxmha", "--write stores whole selections"),
    ],
)
def test_wrong_arguments_give_one_message(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.parsed(arguments.split())
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1


def test_a_peer_that_is_not_installed_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = PEERS["torch-sdpa"]._replace(packages=("nowhere",))
    assert gone.absent == "not installed: nowhere"
    monkeypatch.setitem(PEERS, "torch-sdpa", gone)
    asked: dict[str, Any] = {}

    def pretend(cases: Any, peers: list[str], **options: Any) -> dict[str, Any]:
        asked.update(options, peers=peers)
        return {"sgemm": {}, "cases": []}

    monkeypatch.setattr(measure, "measure", pretend)
    results = command.collect(command.parsed(["--full"]))
    assert results["peers"]["torch-sdpa"]["absent"] == "not installed: nowhere"
    assert "torch-sdpa" not in asked["peers"]
    assert asked["backends"] == ["xla"]
    assert (results["selection"], results["rounds"]) == ("full", 7)


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.parsed(["--help"])
    assert stopped.value.code == 0
    assert "--case layer-*-causal --peer jaxmha" in capsys.readouterr().out
