"""The GPU suite without a GPU: its cases and peers, the errors that it notices, and its page."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.benchmarks import gpu, gpu_cases, gpu_report
from experiments.benchmarks.gpu_cases import CASES, takes
from jaxmha import Mask
from jaxmha.bench import limits, measure, peers, run
from jaxmha.bench.case import Case
from jaxmha.implementations.tiled import attention
from tests import jit_cache
from tests.h100 import on_device
from tests.h100.on_device import CALLS, Call

ROOT = Path(__file__).parents[1]
NAME = "core-forward-plain-B2-T8192-E8192-K8-H128-bfloat16"


def test_the_grid_is_complete() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({call.name for call in CALLS}) == len(CALLS)
    shapes = [case for case in CASES if gpu_cases.part(case) == "shapes"]
    assert {case.H for case in shapes} == {64, 128, 192, 256}
    assert {case.T for case in shapes} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {case.B * case.T for case in shapes} == {16384}
    assert {(case.N, case.K) for case in shapes} >= {(64, 8)}
    assert {case.dtype for case in shapes if case.tf32} == {"float32"}
    for has in (
        {"window": 128},
        {"packed": 12, "by_lengths": True},
        {"H": 192, "h": 128},
        {"kind": "padded", "boolean": True},
        {"bias": True},
        {"dtype": "float32", "tf32": False},
        {"scope": "layer", "kind": "causal"},
    ):
        found = [case for case in CASES if all(getattr(case, k) == x for k, x in has.items())]
        assert {case.direction for case in found} == {"forward", "backward"}, has
    caches = [case for case in CASES if case.kind == "decode"]
    assert {case.T for case in caches} == {1, 2, 4, 8, 16}
    assert {2048, 8192, 32768} == {case.S for case in caches}
    assert {case.scope for case in caches} == {"core", "layer"}


def test_peers_are_timed_where_they_have_the_case() -> None:
    assert {name.partition(":")[0] for name in gpu_cases.PEERS} <= peers.PEERS.keys()
    assert {name for name in gpu_cases.PEERS if ":" in name} == {*run.ON_GPU, "jaxmha:blocked"}
    plain = Case("core", "forward", "plain", 2, 8, 8)
    layer = replace(plain, scope="layer")
    both = {"jaxmha", "jax-nn:cudnn", "torch-sdpa"}
    backends = {f"torch-sdpa:{name}" for name in ("cudnn", "flash", "efficient")}
    layers = {"flax-linen", "flax-linen+jaxmha", "flax-nnx+jaxmha", "torch-native", "torch-weights"}
    for case, expected in (
        (plain, both | backends),
        (replace(plain, packed=2), both | backends | {"jaxmha:blocked"}),
        (replace(plain, quick=True), both | backends | {"jax-nn", "flax-nnx"}),
        (layer, both | layers),
        (replace(layer, direction="backward"), both | layers - {"torch-native"}),
        (replace(layer, kind="decode"), {"jaxmha", "jax-nn", "flax-linen", "flax-nnx"}),
    ):
        assert {name for name in gpu_cases.PEERS if takes(name, case)} == expected


@pytest.mark.slow_variants("mask")
@pytest.mark.parametrize("defect", ["leak", "mask"])
def test_a_wrong_implementation_is_noticed(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = Mask.lengths(key_value=np.asarray([2, 6], np.int32))
    call = Call("noticed", lengths, T=6, S=6, K=1, H=8, h=8)
    right = on_device.check(call, "blocked", "bfloat16")
    assert "failed" not in right
    assert set(right["errors"]) == {"out", "d query", "d key", "d value", "lse"}
    attend = attention.attend

    def leaky(request: Any) -> Any:
        found = attend(request)
        return found._replace(out=found.out + 0 * request.value.sum())

    def unmasked(request: Any) -> Any:
        return attend(request._replace(mask=Mask()))

    monkeypatch.setattr(attention, "attend", leaky if defect == "leak" else unmasked)
    jit_cache.forget()
    failed = on_device.check(call, "blocked", "bfloat16")["failed"]
    if defect == "leak":
        assert failed == "keys that nothing attends have an influence"
    else:
        assert "; out " in failed


def test_a_declined_call_is_no_failure() -> None:
    found = on_device.check(CALLS[0], "cudnn", "bfloat16")
    assert "capability" in found["declined"]
    rows = [found, {**found, "implementation": "blocked", "errors": {"out": 1.5}, "lse": True}]
    del rows[1]["declined"]
    assert gpu_report.conformance(rows) == "cudnn: 0 right, 1 declined; blocked: 1 right"


def test_stored_rows_are_not_checked_again() -> None:
    conformance: list[dict[str, Any]] = []
    seen: list[int] = []
    for late, key in ((True, "skipped"), (False, "declined"), (True, "declined")):
        on_device.run(
            conformance, CALLS[:2], ["cudnn"], ["bfloat16"],
            late=partial(bool, late), threads=2, done=lambda: seen.append(len(conformance)),
        )  # fmt: skip
        assert [key in row for row in conformance] == [True, True]
    assert seen == [1, 2, 2, 2]


def test_one_check_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many compile: XLA ends the process where one loads while another records a graph."""
    running, most = [0], [0]

    def work(x: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.1)
        running[0] -= 1
        return x

    def program(*_: Any, **__: Any) -> Any:
        return lambda heads, _: {"out": jax.pure_callback(work, heads["query"], heads["query"])}

    monkeypatch.setattr(on_device, "program", program)
    monkeypatch.setattr(on_device, "expected", lambda _, exact, *__, **___: {"out": exact["query"]})
    rows: list[Any] = []
    on_device.run(
        rows, CALLS[:4], ["blocked"], ["bfloat16"],
        late=lambda: False, threads=4, done=lambda: None,
    )  # fmt: skip
    assert [row["errors"]["out"] for row in rows] == [0] * 4
    assert most == [1]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The harness writes down what it is asked, and has measured everything."""
    asked: dict[str, Any] = {}

    def measured(cases: Any, names: Any, **options: Any) -> Any:
        asked.update(options, cases=cases)
        made = [{"name": case.name, "case": case.as_dict(), "noisy": False, "gflop": 1.0, "date": "2026-01-02",
                 "peers": {"jaxmha": {"seconds": [1.0]}}} for case in cases]  # fmt: skip
        found = {"sgemm": {"xla": 3.0}, "quiet": {}, "cases": [*options["known"]["cases"], *made]}
        options["done"](found)
        return found

    monkeypatch.setattr(measure, "measure", measured)
    rates = {"tflops": 1.0, "gb_per_second": 2.0}
    monkeypatch.setattr(limits, "measure", lambda products: rates)
    return asked


def test_parts_are_added_to_stored_results(
    harness: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ["--check", "--write", str(tmp_path), "--only", "decode"]
    assert gpu.main(first) == 0
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert [entry["case"]["kind"] for entry in stored["cases"]] == ["decode"]
    assert stored["limits"] == {"bfloat16": {"tflops": 1.0, "gb_per_second": 2.0}}
    assert gpu.main([*first[:-1], "layers", "--resume"]) == 0
    assert harness["known"]["cases"] == stored["cases"]
    assert stored["date"] == "2026-01-02"  # of its measurement
    assert harness["known"]["sgemm"] == {"xla": 3.0}
    assert [case.scope for case in harness["cases"]] == ["layer"]
    assert len(harness["answered"]) == len(gpu.CHECKED) == stored["asked"]
    both = json.loads((tmp_path / "gpu.json").read_text())
    assert [entry["case"]["scope"] for entry in both["cases"]] == ["core", "layer"]
    assert "2 of 4 cases" in (tmp_path / "gpu.md").read_text()
    for name in ("device", "probe"):
        (tmp_path / "gpu.json").write_text(json.dumps(both | {name: "another"}))
        capsys.readouterr()
        assert gpu.main([*first, "--resume"]) == 2
        message = f"gpu.json was measured with other {name}: leave --resume out"
        assert message in capsys.readouterr().err


def results(**timed: dict[str, Any]) -> dict[str, Any]:
    """A case of 4 PFLOP, the same in other words, and a step over a cache."""
    case = next(case for case in CASES if case.name == NAME)
    cache = next(case for case in CASES if case.kind == "decode")
    quick = replace(case, quick=True, N=16, K=16)
    return {
        "date": "2026-01-01",
        "device": "a device",
        "versions": {"jax": "1"},
        "limits": {"bfloat16": {"tflops": 800.0, "gb_per_second": 4000.0}},
        "seconds": 3,
        "rounds": 7,
        "asked": 9,
        "conformance": [
            {"case": "c", "implementation": "i", "dtype": "d", "failed": "out 9"},
        ],
        "peers": dict.fromkeys(gpu_cases.PEERS),
        "chosen": {NAME: "cudnn"},
        "cases": [
            {"name": x.name, "case": x.as_dict(), "noisy": False, "gflop": x.flop * 1e-9,
             "peers": found}
            for x, found in ((case, timed), (quick, {"jaxmha": {"failed": "no engine"}}), (cache, {
                "jaxmha": {"seconds": [cache.nbytes / 3.2e12] * 3},
            }))
        ],
    }  # fmt: skip


def test_page_and_targets() -> None:
    case = next(case for case in CASES if case.name == NAME)
    ours = case.flop / 700e12
    found = results(
        jaxmha={"seconds": [ours] * 3, "bytes": 10, "error": 1e-3},
        **{  # type: ignore[arg-type]
            "jax-nn": {"seconds": [8 * ours] * 3, "bytes": 150},
            "torch-sdpa:cudnn": {"seconds": [0.9 * ours] * 3},
            "torch-sdpa:flash": {"failed": "no"},
        },
    )
    page = gpu_report.page(found)
    row = next(line for line in page.splitlines() if line.startswith(f"| {NAME} |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:6] == ["cudnn", f"{1e3 * ours:.3g}", "700", f"{case.nbytes * 1e-9 / ours:.0f}", "88%"]  # fmt: skip
    shown = dict(
        zip([name for name in gpu_cases.PEERS if name != "jaxmha"], cells[6:], strict=True)
    )
    assert (shown["jax-nn"], shown["torch-sdpa:cudnn"]) == ("8.00", "0.90")
    assert (shown["torch-sdpa:flash"], shown["torch-native"]) == ("failed", "–")
    assert "|  | no engine |" in page
    assert "**failed**: out 9" in page
    assert "| 3200 | 80% |" in page
    values = {target.about: target.value for target in gpu_report.targets(found)}
    assert values["TFLOP/s, full forward, N 64/8, H 128, T 8k"] == pytest.approx(700)
    assert values["times as fast as jax.nn and Flax, full"] == pytest.approx(8)
    assert values["times less memory than they, T 8k"] == 15
    assert values["times as fast as torch by cuDNN"] == pytest.approx(0.9)
    assert values["slower than the fastest other, worst"] == pytest.approx(1 / 0.9)
    assert values["times as fast as torch by flash"] is None
    assert values["% of the limit, one query over a cache"] == pytest.approx(80)
    assert values["% of the limit, decode_step"] is None
    goals = page.split("## Targets")[1]
    assert "| TFLOP/s, full forward, N 64/8, H 128, T 8k | 700 | >= 690 | yes |" in goals
    assert "| times less memory than they, T 8k | 15 | >= 20 | **no** |" in goals
    assert "not measured" in goals


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "no GPU: JAX runs on cpu (--check runs anywhere)\n"


@pytest.mark.slow
def test_everything_on_tiny_shapes(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "experiments.benchmarks.gpu", "--check", "--write", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.rstrip().splitlines()[-1].startswith("| times as fast as cuDNN, 8 queries |")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert len(found["cases"]) == len(gpu.CHECKED)
    for entry in found["cases"]:
        assert {"seconds", "error", "bytes"} <= entry["peers"]["jaxmha"].keys()
    assert (tmp_path / "gpu.md").read_text() == done.stdout.removesuffix("\n")
