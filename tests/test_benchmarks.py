"""The benchmark measures what it says: its cases, its checks and its rounds."""

import doctest
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from experiments import frame, pages
from experiments.benchmarks import __main__ as command
from experiments.benchmarks import cases
from experiments.benchmarks.cases import CASES, select
from jaxmha.bench import case as case_module
from jaxmha.bench import data, decode_peers, exact, fleet, measure, programs
from jaxmha.bench.case import Case
from jaxmha.bench.peers import OURS, PEERS
from jaxmha.bench.program import UnsupportedError

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
    lengths = [case.S] * case.B if case.lengths is None else list(case.lengths)
    new = case.B * case.T if kind == "decode" else sum(min(n, case.S) for n in lengths)
    rows = case.B * case.T * 2 * case.N + new * 2 * case.K  # through four kernels
    layer = replace(case, scope="layer")
    assert layer.flop == core + 2 * rows * case.E * case.H
    assert replace(layer, direction="backward").flop == 3.5 * core + 6 * rows * case.E * case.H


@pytest.mark.parametrize(
    ("module", "count"), [(case_module, 6), (measure, 1), (cases, 2), (pages, 1), (frame, 2)]
)
def test_examples(module: Any, count: int) -> None:
    assert doctest.testmod(module) == (0, count)


# The peers.


@pytest.mark.parametrize("kind", TINY)
def test_ours_and_torch_compute_every_kind(
    kind: str, tmp_path: Path, implicit_promotion: None
) -> None:
    direction: Any = "backward" if kind in ("causal", "padded") else "forward"
    case = replace(TINY[kind], direction=direction)
    for peer in (OURS, "torch-sdpa"):
        found = errors(peer, case, tmp_path / "expected.npz")
        assert found.keys() == {"error"} | (
            {"gradient_error"} if direction == "backward" else set()
        )
        assert max(found.values()) < 1e-5


@pytest.mark.slow_variants("flax-linen+jaxmha*", "*-causal", "!torch-native-causal")
@pytest.mark.parametrize("kind", ["causal", "padded"])
@pytest.mark.parametrize("peer", [peer for peer in HERE if peer not in (OURS, "torch-sdpa")])
def test_every_peer_computes_the_same(
    peer: str, kind: str, tmp_path: Path, implicit_promotion: None
) -> None:
    both = kind == "padded" and peer != "torch-native"
    direction: Any = "backward" if both else "forward"
    case = replace(TINY[kind], direction=direction)
    assert max(errors(peer, case, tmp_path / "expected.npz").values()) < 1e-5


@pytest.mark.parametrize("peer", decode_peers.PROGRAMS)
def test_a_decode_step_of_a_layer_can_be_repeated(
    peer: str, tmp_path: Path, implicit_promotion: None
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
    peer: str, case: Case, reason: str, tmp_path: Path, implicit_promotion: None
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        errors(peer, case, tmp_path / "expected.npz")


@pytest.mark.parametrize(
    ("changed", "what"), [("rows", "error"), ("derivative", "gradient_error"), ("nan", "error")]
)
def test_a_wrong_output_is_not_timed(
    changed: str, what: str, tmp_path: Path, implicit_promotion: None
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


def test_an_interrupted_run_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **options: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure", interrupted)
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err.endswith("stopped; --resume goes on\n")


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.parsed(["--help"])
    assert stopped.value.code == 0
    assert "--case layer-*-causal --peer jaxmha" in capsys.readouterr().out
