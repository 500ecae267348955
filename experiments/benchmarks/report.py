"""Stored results as a page of Markdown with a figure: `python -m experiments.benchmarks.report`
makes the pages and the README's part again from the stored JSON."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

from experiments.benchmarks import statistics as stats
from experiments.benchmarks.peers import ON_JAX, OURS, PEERS  # noqa: F401  the page names ON_JAX
from experiments.benchmarks.statistics import Entry
from experiments.pages import fill, markdown

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[2] / "README.md"
ALT = "Time relative to the fastest peer, for every case"
ALT_SOME = "Time relative to the fastest peer, for some cases of every kind"
SOME = "some.png"
MARKS = ("<!-- benchmarks -->\n", "<!-- /benchmarks -->")


def page(results: dict[str, Any], figure: str) -> str:
    """Everything that was measured, in Markdown."""
    return fill(globals(), "results.md", results=results, figure=figure)


def against(results: dict[str, Any], peers: Sequence[str]) -> str:
    """Mean and extremes of our time relative to the fastest of these, over layers of T >= 2048."""
    ratios = [
        ratio
        for entry in results["cases"]
        if entry["case"]["scope"] == "layer" and entry["case"]["T"] >= 2048
        if (ratio := stats.relative(entry, peers))
    ]
    mean = geometric_mean(ratios)
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f}; {len(ratios)} shapes)"


def measured(results: dict[str, Any]) -> str:
    """How many cases; of how many, where some are still to come."""
    count, asked = len(results["cases"]), results.get("asked", 0)
    return f"{count} of {asked} cases so far" if count < asked else f"{count} cases"


def summary(results: dict[str, Any]) -> str:
    """One line per goal: geometric mean and worst case."""
    entries = {entry["name"]: entry for entry in results["cases"]}
    rows = []
    for goal in stats.GOALS:
        ratios = {
            entry["name"]: ratio
            for entry in entries.values()
            if goal.of(stats.case_of(entry)) and (ratio := goal.ratio(entry)) is not None
        }
        if not ratios:
            continue
        worst = max(ratios, key=ratios.__getitem__)
        mean = geometric_mean(ratios.values())
        rows.append(
            [
                goal.what,
                str(len(ratios)),
                "–" if goal.worst is None else str(sum(r > goal.worst for r in ratios.values())),
                _targeted(mean, goal.mean),
                _targeted(ratios[worst], goal.worst),
                named(entries[worst]),
            ]
        )
    return markdown([["jaxmha / what", "cases", "over", "mean", "worst", "worst case"], *rows])


def named(entry: Entry) -> str:
    """The case, marked where its times are not like the others."""
    marks = " ~" * stats.disturbed(entry) + " ^" * ("again" in entry)
    return f"`{entry['name']}`{marks}"


def disturbed(results: dict[str, Any]) -> int:
    """How many cases are marked as such."""
    return sum(map(stats.disturbed, results["cases"]))


def times(results: dict[str, Any]) -> str:
    """One line per case."""
    peers, peaks = _present(results), results["sgemm"]
    head = ["case", "ms", "±", "GFLOP/s", "of sgemm", "torch of sgemm", *peers]
    rows = []
    for entry in results["cases"]:
        best = stats.fastest(entry, peers)
        own, spread = stats.time_of(entry, OURS), stats.spread_of(entry, OURS)
        rate, torch = stats.speed_of(entry, OURS), stats.speed_of(entry, "torch-sdpa")
        row = [
            named(entry),
            _number(None if own is None else 1e3 * own, ".3g"),
            _number(spread, ".0%"),
            _number(rate, ".3g"),
            _number(_share(rate, peaks.get("xla")), ".0%"),
            _number(_share(torch, peaks.get("torch")), ".0%"),
        ]
        for peer in peers:
            time, fast = stats.time_of(entry, peer), stats.time_of(entry, best) if best else None
            cell = _number(_share(time, fast), ".2f")
            few = time is not None and len(entry["peers"][peer]["seconds"]) < results["rounds"]
            row.append((f"**{cell}**" if peer == best else cell) + ("*" if few else ""))
        rows.append(row)
    return markdown([head, *rows])


def gaps(results: dict[str, Any]) -> str:
    """One line per layer with T < 512."""
    rows = []
    for entry in results["cases"]:
        case, gap = stats.case_of(entry), stats.gap_to_torch(entry)
        if case.scope == "layer" and case.T < 512 and gap is not None:
            rows.append([f"`{entry['name']}`", *(f"{part:.2f}" for part in gap)])
    return markdown([["case", "jaxmha / torch", "= products", "x rest"], *rows])


def per_peer(
    results: dict[str, Any],
    cell: Callable[[dict[str, Any]], str],
    chosen: Callable[[Entry], bool] = lambda entry: True,
) -> str:
    """One line per case, one column per peer."""
    peers = _present(results)
    rows = [
        [f"`{entry['name']}`", *(cell(entry["peers"].get(peer, {})) for peer in peers)]
        for entry in results["cases"]
        if chosen(entry)
    ]
    return markdown([["case", *peers], *rows])


def failures(results: dict[str, Any]) -> str:
    """Peer, reason, and the cases that it is given for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, peer in results["peers"].items():
        if peer["absent"]:
            reasons[name, peer["absent"]] = ["all"]
    for entry in results["cases"]:
        for peer, found in entry["peers"].items():
            for key, prefix in (("failed", ""), ("memory_failed", "memory: ")):
                if key in found:
                    reason = prefix + found[key]
                    reasons.setdefault((peer, reason), []).append(f"`{entry['name']}`")
    rows = [
        [peer, reason.replace("|", "\\|"), ", ".join(cases)]
        for (peer, reason), cases in reasons.items()
    ]
    return markdown([["peer", "reason", "cases"], *rows])


def readme_part(results: dict[str, Any], page: str, figure: str) -> str:
    """Summary, versions and figure."""
    machine, versions = results["machine"], results["versions"]
    packages = ", ".join(f"{n} {v}" for n, v in versions.items() if n in ("jax", "torch", "flax"))
    return (
        f"{summary(results)}\n\n{measured(results)}, medians of {results['rounds']} interleaved rounds, float32, "
        f"{results['threads']} threads each, on {machine['processor']} ({results['date']}; {packages}). "
        f"Over: cases beyond the target of the worst; bold: a target that is missed; ~: disturbed, as "
        f"{disturbed(results)} cases were; ^: measured again later. [Every case]({page}); "
        f"[how scores are tiled](experiments/tiling/README.md).\n\n![{ALT_SOME}]({figure})"
    )


def filled(text: str, part: str) -> str:
    """The README with the part between its marks."""
    before, rest = text.split(MARKS[0])
    return f"{before}{MARKS[0]}{part}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def files(selection: str) -> list[str]:
    """That `write` puts into the folder."""
    return [*(f"{selection}.{kind}" for kind in ("json", "md", "png")), SOME]


def write(results: dict[str, Any], folder: Path = RESULTS, readme: Path | None = README) -> Path:
    """Stores JSON, page and figure; where these are the most cases there are, the README's part."""
    from experiments.benchmarks import figure

    name = results["selection"]
    folder.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=folder) as made:  # none is replaced before all are made
        new = Path(made)
        (new / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
        (new / f"{name}.md").write_text(page(results, f"{name}.png"))
        figure.draw(results, new / f"{name}.png")
        if name in ("full", most(folder)):
            figure.draw(some(results), new / SOME)
        for path in new.iterdir():
            path.replace(folder / path.name)
    if readme is not None and most(folder) == name:
        place = folder.relative_to(readme.parent).as_posix()
        part = readme_part(results, f"{place}/{name}.md", f"{place}/{SOME}")
        readme.write_text(filled(readme.read_text(), part))
    return folder / f"{name}.md"


def most(folder: Path = RESULTS) -> str:
    """The selection with the most cases of those that are stored."""
    return "full" if (folder / "full.json").is_file() else "quick"


def some(results: dict[str, Any]) -> dict[str, Any]:
    """Of all cases the quick ones."""
    return results | {"cases": [e for e in results["cases"] if stats.case_of(e).quick]}


def _present(results: dict[str, Any]) -> list[str]:
    return [
        peer for peer in PEERS if peer in results["peers"] and not results["peers"][peer]["absent"]
    ]


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _number(value: float | None, form: str, *, least: float = 0.0) -> str:
    return "–" if value is None or value < least else format(value, form)


def _targeted(value: float, target: float | None) -> str:
    """Bold where the target is missed."""
    if target is None:
        return f"{value:.2f}"
    shown = f"{value:.2f}" if value <= target else f"**{value:.2f}**"
    return f"{shown} (target {target:.2f})"


def _has_memory(entry: Entry) -> bool:
    return any("memory" in found for found in entry["peers"].values())


def compilation(results: dict[str, Any]) -> str:
    """Seconds, by case and peer."""
    return per_peer(results, lambda found: _number(found.get("compile"), ".2f", least=1e-3))


def memory(results: dict[str, Any]) -> str:
    """MiB, by case and peer."""
    return per_peer(results, _memory, _has_memory)


def errors(results: dict[str, Any]) -> str:
    """By case and peer."""
    return per_peer(results, _error)


def _memory(found: dict[str, Any]) -> str:
    grown = found.get("memory")
    return f"{grown / 2**20:.0f}" if isinstance(grown, int | float) else "–"


def _error(found: dict[str, Any]) -> str:
    errors = [found[key] for key in ("error", "gradient_error") if key in found]
    return ", ".join(f"{error:.1e}" for error in errors) or "–"


if __name__ == "__main__":
    for stored in sorted(RESULTS.glob("*.json")):
        write(json.loads(stored.read_text()))
