"""Stored results as a page of Markdown with a figure: `python -m experiments.benchmarks.report`
makes the pages and the README's part again from the stored JSON."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

from experiments.benchmarks import statistics as stats
from experiments.benchmarks.cases import select
from experiments.benchmarks.statistics import Entry
from experiments.pages import fill
from jaxmha.bench.case import Case
from jaxmha.bench.peers import ON_JAX, OURS, PEERS  # noqa: F401  pages name them

RESULTS = Path(__file__).parent / "results"
WITHOUT_NATIVE = "without-native"  # the folder of results of before the native kernels came
README = Path(__file__).parents[2] / "README.md"
ALT = "Time relative to the fastest shown, for every case"
ALT_SOME = "Time relative to the fastest shown, for some cases of every kind"
SOME = "some.png"
MARKS = ("<!-- benchmarks -->\n", "<!-- /benchmarks -->")


def page(results: dict[str, Any], figure: str) -> str:
    """Everything that was measured, in Markdown."""
    return fill(globals(), "results.md", results=results, figure=figure)


def against(results: dict[str, Any], peers: Sequence[str]) -> str:
    """Mean and range of our time relative to the fastest of `peers`, for layers of T >= 2048."""
    ratios = [
        ratio
        for entry in results["cases"]
        if entry["case"]["scope"] == "layer" and entry["case"]["T"] >= 2048
        if (ratio := stats.relative(entry, peers))
    ]
    mean = geometric_mean(ratios)
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f}; {len(ratios)} shapes)"


def missing(results: dict[str, Any]) -> list[Case]:
    """The cases that are still to come; none where a part of all was asked for, or there are others now."""
    names = {entry["name"] for entry in results["cases"]}
    wanted = select(quick=results["selection"] == "quick")
    found = [case for case in wanted if case.name not in names]
    return found if len(names) + len(found) == results.get("asked") else []


def measured(results: dict[str, Any]) -> str:
    """How many cases; of how many, and how long those are, where some are still to come."""
    count, asked = len(results["cases"]), results.get("asked", 0)
    lengths = sorted(Counter(case.T for case in missing(results)).items(), reverse=True)
    absent = f" (not {', '.join(f'{n} of T = {T}' for T, n in lengths)})" * bool(lengths)
    return f"{count} of {asked} cases so far{absent}" if count < asked else f"{count} cases"


def goals(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields, of every goal that has cases: the goal, its ratios, their mean, how many exceed the
    bound, and the worst entry."""
    for goal in stats.GOALS:
        entries = [entry for entry in results["cases"] if goal.of(stats.case_of(entry))]
        found = [(ratio, e) for e in entries if (ratio := goal.ratio(e)) is not None]
        if found:
            ratios = [ratio for ratio, _ in found]
            yield {
                "goal": goal, "ratios": ratios, "mean": geometric_mean(ratios),
                "over": sum(ratio > (goal.worst or 0.0) for ratio in ratios),
                "worst": found[ratios.index(max(ratios))][1],
            }  # fmt: skip


# The README's table: what the time is relative to, and the cases, by `GOALS`.
HEADLINES = {
    "the fastest of torch, TensorFlow and JAX: a layer, forward, T >= 512": 0,
    "the same, forward and backward": 3,
    "the fastest of Flax, Keras and `jax.nn` on JAX: everything": 7,
    "torch: a layer, T < 512": 15,
    "Flax's own layer with jaxmha's `attention_fn`, relative to without it, T >= 2048": 12,
}


def headlines(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of the README's table: mean and worst ratio, and how often jaxmha is slower."""
    by_goal = {one["goal"]: one for one in goals(results)}
    for what, index in HEADLINES.items():
        if (one := by_goal.get(stats.GOALS[index])) is not None:
            ratios = one["ratios"]
            yield {
                "what": what, "mean": one["mean"], "worst": max(ratios), "shapes": len(ratios),
                "slower": sum(ratio > 1 for ratio in ratios),
            }  # fmt: skip


def named(entry: Entry) -> str:
    """The case, marked where its times are not like the others."""
    marks = " ~" * stats.disturbed(entry) + " ^" * ("again" in entry)
    return f"`{entry['name']}`{marks}"


def disturbed(results: dict[str, Any]) -> int:
    """How many cases are marked as such."""
    return sum(map(stats.disturbed, results["cases"]))


def torch_gaps(results: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Name -> factors of the time relative to torch, for layers with T < 512."""
    return {
        entry["name"]: gap
        for entry in results["cases"]
        if stats.case_of(entry).scope == "layer" and stats.case_of(entry).T < 512
        if (gap := stats.gap_to_torch(entry)) is not None
    }


def failures(results: dict[str, Any]) -> dict[tuple[str, str], list[str]]:
    """(peer, reason) -> the cases that failed; `all` if the peer is not installed."""
    reasons = {
        (name, peer["absent"]): ["all"] for name, peer in results["peers"].items() if peer["absent"]
    }
    for entry in results["cases"]:
        for peer, found in entry["peers"].items():
            for key, prefix in (("failed", ""), ("memory_failed", "memory: ")):
                if key in found:
                    reasons.setdefault((peer, prefix + found[key]), []).append(f"`{entry['name']}`")
    return reasons


def with_memory(results: dict[str, Any]) -> list[Entry]:
    """The entries whose memory was measured."""
    return [e for e in results["cases"] if any("memory" in found for found in e["peers"].values())]


def kernels(results: dict[str, Any]) -> str:
    """Says whether the C++ kernels of jaxmha-cpu ran."""
    reason = results["native"]
    return f"jaxmha with{'' if reason == 'used' else 'out'} its native kernels"


def folder_of(results: dict[str, Any]) -> str:
    """The folder of a processor's results: `intel-xeon`."""
    name = re.sub(r"\(\w+\)|cpu|processor", "", processor(results).lower())
    return "-".join(re.findall(r"[a-z0-9]+", name))


def processor(results: dict[str, Any]) -> str:
    """As the system names it."""
    return str(results["machine"]["processor"])


def elsewhere(folder: Path = RESULTS) -> dict[str, str]:
    """Processor -> the page of its results, of those whose place a later run took."""
    return {
        processor(json.loads(path.read_text())): path.with_suffix(".md")
        .relative_to(folder)
        .as_posix()
        for path in sorted(folder.glob("*/*.json"))
        if path.parent.name != WITHOUT_NATIVE
    }


def set_aside(results: dict[str, Any], folder: Path) -> None:
    """Moves the stored results of another processor, whose place these take, to their own folder."""
    name = results["selection"]
    path = folder / f"{name}.json"
    if not path.is_file() or processor(other := json.loads(path.read_text())) == processor(results):
        return
    aside = folder / folder_of(other)
    aside.mkdir(exist_ok=True)
    for kind in ("png", "md", "json"):
        path.with_suffix(f".{kind}").replace(aside / f"{name}.{kind}")


def readme_part(results: dict[str, Any], page: str, figure: str, folder: Path = RESULTS) -> str:
    """Summary, versions and figure."""
    others = elsewhere(folder)
    return fill(globals(), "readme.md", results=results, page=page, figure=figure, others=others)


def filled(text: str, part: str) -> str:
    """The README with the part between its marks."""
    before, rest = text.split(MARKS[0])
    return f"{before}{MARKS[0]}{part}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def files(selection: str) -> list[str]:
    """That `write` puts into the folder."""
    return [*(f"{selection}.{kind}" for kind in ("json", "md", "png")), SOME]


def write(results: dict[str, Any], folder: Path = RESULTS, readme: Path | None = README) -> Path:
    """Stores JSON, page and figure; where nothing was measured later, the README's part."""
    from experiments.benchmarks import figure

    name = results["selection"]
    folder.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=folder) as made:  # none is replaced before all are made
        new = Path(made)
        (new / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
        (new / f"{name}.md").write_text(page(results, f"{name}.png"))
        figure.draw(results, new / f"{name}.png")
        newest = latest(folder, results) == name
        if readme is not None and newest:
            figure.draw(some(results), new / SOME)
        set_aside(results, folder)
        for path in new.iterdir():
            path.replace(folder / path.name)
    if readme is not None and newest:
        place = folder.relative_to(readme.parent).as_posix()
        part = readme_part(results, f"{place}/{name}.md", f"{place}/{SOME}", folder)
        readme.write_text(filled(readme.read_text(), part))
    return folder / f"{name}.md"


def most(folder: Path = RESULTS) -> str:
    """The selection with the most cases of those that are stored."""
    return "full" if (folder / "full.json").is_file() else "quick"


def latest(folder: Path = RESULTS, *more: dict[str, Any]) -> str:
    """The selection that was measured last, of those that are stored and `more`; of one day, the
    one with the most cases."""
    stored = [path for name in ("quick", "full") if (path := folder / f"{name}.json").is_file()]
    found = [json.loads(path.read_text()) for path in stored] + [*more]
    names: list[str] = [one["selection"] for one in found]
    measured = [(one["date"], name == "full") for one, name in zip(found, names, strict=True)]
    return names[measured.index(max(measured))]


def some(results: dict[str, Any]) -> dict[str, Any]:
    """Of all cases the quick ones."""
    return results | {"cases": [e for e in results["cases"] if stats.case_of(e).quick]}


def present(results: dict[str, Any]) -> list[str]:
    """The installed peers, in the order of `PEERS`."""
    return [x for x in PEERS if not results["peers"].get(x, {"absent": True})["absent"]]


if __name__ == "__main__":
    for stored in sorted(RESULTS.glob("*/*.json")):
        write(json.loads(stored.read_text()), stored.parent, readme=None)
    for stored in sorted(RESULTS.glob("*.json")):
        write(json.loads(stored.read_text()))
