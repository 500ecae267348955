"""The benchmark's page says what the stored numbers say."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks import figure, report
from experiments.benchmarks import statistics as stats
from experiments.benchmarks.cases import select
from jaxmha.bench.case import Case
from jaxmha.bench.peers import OURS


def stored() -> dict[str, Any]:
    """Results of two cases: jaxmha twice as fast as torch, four times as fast as Flax."""

    def entry(case: Case) -> dict[str, Any]:
        found = {
            OURS: {"seconds": [0.95, 1.0, 1.15], "compile": 0.5, "error": 1e-7, "memory": 2**20},
            "torch-sdpa": {"seconds": [2.0, 2.0], "compile": 1e-6, "error": 2e-7},
            "flax-nnx": {"seconds": [4.0, 4.0, 4.0], "error": 3e-7, "memory": 2**23},
            "flax-linen": {"failed": "no | memory"},
        }
        return {
            "name": case.name,
            "case": case.as_dict(),
            "gflop": 50.0,
            "sgemm": {"xla": 100.0, "torch": 150.0},
            "probes": [{"xla": 180.0}, {"xla": 200.0, "torch": 300.0}],
            "noisy": case.T < 512,
            "peers": found,
        }

    present = (OURS, "torch-sdpa", "flax-nnx", "flax-linen", "keras-tf")
    return {
        "question": "How fast?",
        "command": "bench",
        "selection": "quick",
        "date": "2026-01-02",
        "seconds": 120,
        "native": "used",
        "machine": {
            "processor": "P",
            "instructions": ["avx2"],
            "cores": 2,
            "memory_gib": 3,
            "system": "S",
        },
        "versions": {"jax": "1", "torch": "2"},
        "threads": 2,
        "rounds": 3,
        "sgemm": {"xla": 100.0, "torch": 200.0},
        "peers": {
            peer: {"about": "x", "absent": "not installed: keras" if peer == "keras-tf" else None}
            for peer in present
        },
        "cases": [entry(c) for c in select(["layer-forward-plain-B1-T2048-E512", "B8-T128-E512"])],
    }


def test_numbers_of_the_page() -> None:
    entry = stored()["cases"][0]
    assert stats.time_of(entry, OURS) == 1.0
    assert stats.quartiles_of(entry, OURS) == pytest.approx(0.1)
    assert stats.relative(entry, stats.OTHERS) == 0.5
    assert stats.relative(entry, ["flax-nnx", "flax-linen"]) == 0.25
    assert stats.relative(entry, ["flax-linen", "keras-tf"]) is None
    assert stats.speed_of(entry, "torch-sdpa") == 25.0
    assert stats.memory_relative(entry, ["flax-nnx", "torch-sdpa"]) == 0.125
    assert stats.gap_to_torch(entry) == (0.5, 1.5, 0.5 / 1.5)
    assert stats.to_products(entry) == 4.0
    assert stats.swapped_relative(entry, stats.time_of) is None
    for what, goal in report.HEADLINES.items():
        assert ("attention_fn" in what) == ("attention_fn" in stats.GOALS[goal].what)
    entry["peers"]["flax-nnx+jaxmha"] = {"seconds": [2.0, 1.0, 3.0], "memory": 2**21}
    entry["peers"]["flax-linen+jaxmha"] = {"seconds": [9.0]}  # flax-linen itself has no time
    assert stats.swapped_relative(entry, stats.time_of) == 0.5
    assert stats.swapped_relative(entry, stats.memory_of) == 0.25
    assert stats.relative(entry, stats.OTHERS) == 0.5  # a layer with our attention is no other


def test_page_holds_everything() -> None:
    results = stored()
    text = report.page(results, "quick.png")
    section = text.split("\n## Time\n")[1].split("\n## ")[0]
    times = [line for line in section.splitlines() if line.startswith("| ")]
    assert times[0].endswith("| jaxmha | torch-sdpa | flax-linen | flax-nnx |")
    large = next(line for line in times if "T2048" in line)
    assert large.endswith("| 1e+03 | 10% | 50 | 50% | 12% | **1.00** | 2.00* | – | 4.00 |")
    assert [("~" in line) for line in times[1:]] == [entry["noisy"] for entry in results["cases"]]
    assert "| keras-tf | not installed: keras | all |" in text
    assert "| flax-linen | no \\| memory |" in text
    assert "(**not installed: keras**)" in text
    for title in ("Time", "Gap to torch where T < 512", "Compilation", "Memory", "Error"):
        assert f"\n## {title}\n" in text
    assert (
        "| layer, forward, T >= 512 / fastest peer | 1 | 0 | 0.50 (target 0.85) | 0.50 (target 1.00)"
        in text
    )
    results["cases"][0]["peers"][OURS]["seconds"] = [3.0] * 3
    results["cases"][1]["peers"][OURS]["seconds"] = [3.0] * 3
    assert "| 1 | **1.50** (target 0.85) | **1.50** (target 1.00) |" in report.page(
        results, "quick.png"
    )


@pytest.mark.parametrize("peer", [OURS, "torch-sdpa"])
def test_wide_spreads_and_later_measurements_are_marked(peer: str) -> None:
    """Of our own rounds, or of the fastest other's; what is slower may do as it likes."""
    results = stored()
    large = next(entry for entry in results["cases"] if not entry["noisy"])
    assert report.named(large) == "`layer-forward-plain-B1-T2048-E512`"
    before = report.disturbed(results)
    large["peers"]["flax-nnx"]["seconds"] = [3.0, 4.0, 7.0]
    assert report.disturbed(results) == before
    large["peers"][peer]["seconds"] = [0.5, 1.0, 1.5]
    large["again"] = "2026-01-03"
    assert report.named(large).endswith("E512` ~ ^")
    assert report.disturbed(results) == before + 1
    assert "`layer-forward-plain-B1-T2048-E512` ~ ^ |" in report.page(results, "quick.png")


def blank(results: dict[str, Any], path: Path) -> None:
    """A figure that takes no time to draw."""
    path.write_bytes(b"")


def test_writing_makes_five_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.MARKS[0]}old\n{report.MARKS[1]}\nafter\n")
    report.write(stored(), tmp_path / "results", readme)
    made = {path.name for path in (tmp_path / "results").iterdir()}
    assert made == {"quick.json", "quick.md", "quick.png", report.SOME}
    assert json.loads((tmp_path / "results" / "quick.json").read_text()) == stored()
    text = readme.read_text()
    assert text.startswith("before\n<!-- benchmarks -->\n![")
    assert "| time on this CPU (below 1: jaxmha is faster) relative to | mean |" in text
    assert text.endswith("(results/quick.md).\n<!-- /benchmarks -->\nafter\n")
    monkeypatch.setattr(figure, "draw", blank)
    report.write(stored() | {"selection": "full"}, tmp_path / "results", readme)
    assert "(results/full.md)" in readme.read_text()
    report.write(stored(), tmp_path / "results", readme)
    assert "(results/full.md)" in readme.read_text(), "few cases in the place of all"


def test_another_processor_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure, "draw", blank)
    first = stored()
    machine = first["machine"]
    other = first | {"machine": machine | {"processor": "Another(R) CPU Processor 7"}}
    report.write(other, tmp_path, readme=None)
    report.write(first, tmp_path, readme=None)
    assert not (tmp_path / report.SOME).exists(), "the README's figure without a README"
    kept = tmp_path / "another-7"
    assert {path.name for path in kept.iterdir()} == {"quick.json", "quick.md", "quick.png"}
    assert json.loads((kept / "quick.json").read_text()) == other
    assert json.loads((tmp_path / "quick.json").read_text()) == first
    assert report.elsewhere(tmp_path) == {"Another(R) CPU Processor 7": "another-7/quick.md"}
    part = report.readme_part(first, "a/quick.md", "a/some.png", tmp_path)
    assert part.endswith(", and [on Another(R) CPU Processor 7](a/another-7/quick.md).")


def test_pages_say_what_was_measured() -> None:
    """Pages name the cases without results, and say if the native kernels ran."""
    *others, last = select()
    results = stored()
    results |= {"selection": "full", "asked": len(others) + 1}
    results["cases"] = [results["cases"][0] | {"name": case.name} for case in others]
    short = f"{len(others)} of {len(others) + 1} cases so far (not 1 of T = {last.T}), "
    assert short in report.readme_part(results, "full.md", "some.png")
    assert f"Still to come: `{last.name}`." in report.page(results, "full.png")
    assert report.missing(results | {"asked": len(others) + 2}) == []
    for native, text in (("used", "jaxmha with its"), ("not installed", "jaxmha without its")):
        results = stored() | {"native": native}
        assert f"{text} native kernels" in report.page(results, "quick.png")
        assert f"{text} native kernels" in report.readme_part(results, "quick.md", "some.png")


STORED = sorted(
    path.relative_to(report.RESULTS).with_suffix("").as_posix()
    for path in report.RESULTS.rglob("*.json")
)


@pytest.mark.parametrize("name", STORED)
def test_committed_pages_are_of_the_committed_numbers(name: str) -> None:
    path = report.RESULTS / f"{name}.json"
    results = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == report.page(results, f"{path.stem}.png")
    assert path.with_suffix(".png").stat().st_size > 10_000
    if name == report.latest():
        place = path.parent.relative_to(report.README.parent)
        part = report.readme_part(results, f"{place}/{name}.md", f"{place}/{report.SOME}")
        text = report.README.read_text()
        assert report.filled(text, part) == text, "python -m experiments.benchmarks.report"
