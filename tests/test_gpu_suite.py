"""The GPU suite without a GPU: what it would run, what it notices, and its page."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.benchmarks import (
    gpu,
    gpu_cases,
    gpu_conformance,
    gpu_peers,
    gpu_report,
    gpu_timing,
)
from experiments.benchmarks.gpu_cases import CASES, SHAPES, Case
from jaxmha import Mask
from jaxmha.implementations.tiled import attention
from tests import reference

ROOT = Path(__file__).parents[1]


def test_the_standard_grid_is_complete() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert {shape.H for shape in SHAPES} == {64, 128, 256}
    assert {shape.T for shape in SHAPES} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {shape.kind for shape in SHAPES} == {"full", "causal", "lengths", "padding", "bias"}
    assert {(shape.N, shape.K) for shape in SHAPES} >= {(64, 8)}
    assert {shape.backward for shape in SHAPES} == {False, True}
    assert {shape.B * shape.T for shape in SHAPES} == {16384}
    assert len({case.name for case in CASES}) == len(CASES)


def test_needed_operations_are_counted() -> None:
    full = SHAPES[0]
    assert full.flop == 4 * full.N * full.H * full.B * full.T**2
    assert 0.5 < replace(full, kind="causal").flop / full.flop < 0.5001
    assert replace(full, backward=True).flop == 3.5 * full.flop
    padded = replace(full, kind="lengths", T=2048)
    assert padded.flop == pytest.approx(0.75 * replace(padded, kind="full").flop, rel=1e-3)


def test_its_float64_is_that_of_the_specification() -> None:
    """Output and lse; the gradients are the slopes of them."""
    case = Case("small", T=3, S=5, N=4, K=2, H=7, h=2, bias="1NTS", excludes=True)
    arrays, _ = gpu_cases.arrays(case)
    mask = Mask.causal(1) & Mask.lengths(key_value=np.asarray([0, 4], np.int32))
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    dense: Any = mask.to_array(case.T, case.S, np)

    def answer(heads: dict[str, Any]) -> Any:
        names = ("query", "key", "value", "bias")
        return reference.dot_product_attention(**{n: heads[n] for n in names}, mask=dense)

    found, want = gpu_cases.expected(wide, mask, lse=True), answer(wide)
    np.testing.assert_allclose(found["out"], want.out, atol=1e-14)
    np.testing.assert_allclose(found["lse"], want.lse, atol=1e-14)

    def total(heads: dict[str, Any]) -> float:
        out, lse = answer(heads).out, answer(heads).lse
        lse = np.where(np.isfinite(lse), lse, 0.0)
        return float((out * wide["cotangent"]).sum() + (lse * wide["lse_cotangent"]).sum())

    rng = np.random.default_rng(0)
    for name in ("query", "key", "value", "bias"):
        finite = np.isfinite(wide[name])
        direction = np.where(finite, rng.standard_normal(wide[name].shape), 0.0)
        sides = []
        for step in (1e-5, -1e-5):
            with np.errstate(invalid="ignore"):
                sides.append(total(wide | {name: wide[name] + step * direction}))
        slope = (sides[0] - sides[1]) / 2e-5
        assert float((found[name] * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_a_wrong_implementation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("noticed", T=6, S=6, N=2, K=1, H=8, h=8, mask=gpu_cases._lengths)
    right = gpu_conformance.check(case, "blocked", "bfloat16")
    assert "failed" not in right
    assert set(right["errors"]) == {"out", "d query", "d key", "d value", "lse"}
    attend = attention.attend

    def leaky(request: Any) -> Any:
        found = attend(request)
        return found._replace(out=found.out + 0 * request.value.sum())

    monkeypatch.setattr(attention, "attend", leaky)
    jax.clear_caches()  # type: ignore[no-untyped-call]
    wrong = gpu_conformance.check(case, "blocked", "bfloat16")
    assert wrong["failed"] == "what nothing attends has an influence"


def test_what_is_declined_is_no_failure() -> None:
    found = gpu_conformance.check(CASES[0], "cudnn", "bfloat16")
    assert "capability" in found["declined"]
    rows = [found, {**found, "implementation": "blocked", "errors": {"out": 1.5}, "lse": True}]
    del rows[1]["declined"]
    assert gpu_report.conformance(rows) == "cudnn: 0 right, 1 declined; blocked: 1 right"


def test_peers_that_fail_stay_in_the_results() -> None:
    def broken() -> gpu_peers.Program:
        raise RuntimeError("no engine\nmore")

    calls: list[int] = []
    runs: list[int] = []

    def breaks(n: int) -> None:
        runs.append(n)
        if len(runs) == 5:
            raise RuntimeError

    found = gpu_timing.entry(
        {
            "jaxmha": lambda: gpu_peers.Program(calls.append, 7),
            "torch": broken,
            "jax-nn": lambda: gpu_peers.Program(breaks, None),
        },
        flop=1e12,
    )["peers"]
    assert found["torch"] == {"failed": "RuntimeError: no engine"}
    assert found["jax-nn"] == {"failed": "RuntimeError: "}
    assert found["jaxmha"]["bytes"] == 7
    assert found["jaxmha"]["tflops"] == pytest.approx(1 / found["jaxmha"]["seconds"])
    assert len(found["jaxmha"]["rounds"]) == gpu_timing.ROUNDS
    assert len(calls) == 2 + gpu_timing.ROUNDS


def test_stored_rows_are_not_measured_again() -> None:
    """Nor is anything lost of what was, should the process end."""
    rows: list[dict[str, Any]] = [
        {"name": "a", "peers": {}},
        {"name": "b", "skipped": "out of time"},
        {"name": "c", "peers": {}},
    ]
    seen: list[list[str]] = []

    def work(name: str) -> Any:
        return lambda: {"peers": {name: {"seconds": 1.0}}}

    jobs = [({"name": name}, work(name)) for name in "abcd"]
    gpu.fill(rows, jobs, lambda: False, lambda _: seen.append([row["name"] for row in rows]))
    assert rows == [
        {"name": "a", "peers": {}},
        {"name": "b", "peers": {"b": {"seconds": 1.0}}},
        {"name": "c", "peers": {}},
        {"name": "d", "peers": {"d": {"seconds": 1.0}}},
    ]
    assert seen == [["a", "b", "c"], ["a", "b", "c", "d"]]
    conformance: list[dict[str, Any]] = []
    for late, key in ((True, "skipped"), (False, "declined"), (True, "declined")):
        gpu_conformance.run(
            conformance, CASES[:2], ["cudnn"], ["bfloat16"],
            late=partial(bool, late), threads=2, done=lambda _: None,
        )  # fmt: skip
        assert [key in row for row in conformance] == [True, True]


@pytest.mark.slow
def test_a_process_that_is_broken_stops() -> None:
    rows: list[dict[str, Any]] = []

    def fails() -> Any:
        raise RuntimeError("an illegal address")

    jobs = [({"name": n, "sizes": (1, 2, 3, 4, 5)}, fails) for n in "abc"]
    gpu.fill(rows, jobs, lambda: False, lambda _: None)
    assert [row.get("skipped") for row in rows] == [None, None, "all failed before it"]
    assert rows[0]["peers"] == {"jaxmha": {"failed": "RuntimeError: an illegal address"}}
    assert "all failed before it" in gpu_report.page(results() | {"decode": rows})


@pytest.mark.slow
def test_results_of_another_device_are_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(results()))
    assert gpu.main(["--check", "--resume", "--write", str(tmp_path)]) == 2
    assert "is of device a device, here is cpu: write elsewhere" in capsys.readouterr().err


def results(**peers: dict[str, Any]) -> dict[str, Any]:
    shape = {"name": "full-T8192-H128-N16-forward", "kind": "full", "T": 8192, "backward": False}
    return {
        "date": "2026-01-01",
        "device": "a device",
        "versions": {"jax": "1"},
        "peaks": {"tflops": 800.0, "gb_per_second": 4000.0},
        "seconds": 3,
        "conformance": [
            {"case": "c", "implementation": "i", "dtype": "d", "failed": "out 9"},
        ],
        "chosen": {shape["name"]: "cudnn"},
        "shapes": [{**shape, "peers": peers}, {**shape, "name": "late", "skipped": "out of time"}],
        "layers": [],
        "decode": [{
            "name": "decode B64", "sizes": (64, 8192, 64, 8, 128),
            "peers": {"jaxmha": {"gb_per_second": 3200.0}, "decode_step": {"failed": "no"}},
        }],
    }  # fmt: skip


def test_page_and_targets() -> None:
    ours = {"seconds": 1e-3, "tflops": 700.0, "bytes": 10}
    found = results(
        jaxmha=ours,
        **{  # type: ignore[arg-type]
            "jax-nn": {"seconds": 8e-3, "tflops": 87.5, "bytes": 150},
            "torch-cudnn": {"seconds": 0.9e-3, "tflops": 777.0, "bytes": None},
            "torch-flash": {"failed": "no"},
        },
    )
    page = gpu_report.page(found)
    row = "| full-T8192-H128-N16-forward | cudnn | 700 | 88 | 8.00 | 0.90 | failed |"
    assert row in page
    assert "| late |  | out of time |" in page
    assert "**failed**: out 9" in page
    assert "80 % of the copy" in page
    values = {target.words: target.value for target in gpu_report.targets(found)}
    assert values["TFLOP/s, full forward, H 128, T 8k"] == 700
    assert values["times as fast as jax.nn and Flax, full"] == 8
    assert values["times less memory than they, T 8k"] == 15
    assert values["times as fast as torch by cuDNN"] == pytest.approx(0.9)
    assert values["slower than the fastest implementation, worst"] == pytest.approx(1 / 0.9)
    assert values["times as fast as torch by flash"] is None
    assert values["% of memory bandwidth, attention over a cache"] == 80
    assert values["% of memory bandwidth, decode_step"] is None
    aims = page.split("## Targets")[1]
    assert "| TFLOP/s, full forward, H 128, T 8k | 700 | >= 660 | yes |" in aims
    assert "| times less memory than they, T 8k | 15 | >= 20 | **no** |" in aims
    assert "not measured" in aims


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "no GPU: JAX runs on cpu (--check runs anywhere)\n"


@pytest.mark.slow
def test_everything_on_tiny_shapes(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.benchmarks.gpu",
        "--check",
        "--write",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.rstrip().splitlines()[-1].startswith("| % of memory bandwidth")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert all("seconds" in shape["peers"]["jaxmha"] for shape in found["shapes"])
    assert all("seconds" in x["peers"]["jaxmha"] for x in (*found["layers"], *found["decode"]))
    assert (tmp_path / "gpu.md").read_text() == done.stdout.removesuffix("\n")
    again = subprocess.run(
        [*command, "--resume"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert " ms" not in again.stderr
    assert json.loads((tmp_path / "gpu.json").read_text())["shapes"] == found["shapes"]
