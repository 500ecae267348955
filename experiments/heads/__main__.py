"""Are eight heads of 64 the same as one head of 512?

The same three matrices, cut into 1, 2, 4, 8 and 16 heads: outputs, ranks and gradients; a script
that prints True, over 40 seeds; cases where they are equal, in float64; and learning curves.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import machine, records, tables
from experiments.heads import cases, figure, measure, script
from experiments.train import data, seeds

HERE = Path(__file__).parent
PACKAGES = ("optax",)  # beside those of every record
WINDOW = 10  # steps of which losses are means
OF_LAYERS = 5  # seeds
EXAMPLES = """examples:
  python -m experiments.heads                       tables; two minutes
  python -m experiments.heads --steps 20            shorter training
  python -m experiments.heads --write               and results.json and the figures beside it
"""


def parsed(arguments: list[str] | None = None) -> Namespace:
    """The command line; exits with 2 and one message where it is wrong."""
    parser = ArgumentParser(
        prog="python -m experiments.heads",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    steps = seeds.SMALL.steps
    parser.add_argument("--steps", type=int, default=steps, help=f"of training; default {steps}")
    parser.add_argument("--seeds", type=int, default=5, help="of training; default 5")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--write", action="store_true", help="write results.json and the figures")
    chosen = parser.parse_args(arguments)
    if chosen.steps < WINDOW or chosen.steps % WINDOW:
        parser.exit(2, f"--steps must be a multiple of {WINDOW}, got {chosen.steps}\n")
    if chosen.seeds < 2:
        parser.exit(2, f"--seeds must be at least 2 for a spread, got {chosen.seeds}\n")
    return chosen


def measured(chosen: Namespace, progress: Progress) -> dict[str, Any]:
    """Everything, part by part."""
    heads = measure.HEADS
    parts = {
        "script": 40 * len(script.WEIGHTS),
        "layers": OF_LAYERS,
        "cases": 10,
        "training": chosen.steps * chosen.seeds * len(heads),
    }
    bars = {name: progress.add_task(name, total=total) for name, total in parts.items()}

    def each(name: str, found: Iterable[Any]) -> Iterator[Any]:
        for one in found:
            yield one
            progress.advance(bars[name])

    made = cases.cases(8, measure.E, 10, 10)
    settings = replace(seeds.SMALL, steps=chosen.steps)
    results: dict[str, Any] = {
        "settings": {"E": measure.E, "B": measure.B, "T": measure.T, "heads": list(heads)},
        "script": {
            kind: [seed._asdict() for seed in each("script", script.run(kind, 40))]
            for kind in script.WEIGHTS
        },
        "layers": list(each("layers", (measure.of_seed(seed, heads) for seed in range(OF_LAYERS)))),
        "spectra": measure.spectra(0, heads),
        "pictures": measure.pictures(0, script.N),
        "cases": list(each("cases", (cases.outcome(case, 8) for case in made))),
    }
    examples = data.read(settings.T)
    runs = {
        f"{h} head{'s' if h > 1 else ''}": seeds.train(
            replace(settings, N=h),
            examples,
            range(chosen.seeds),
            window=WINDOW,
            progress=lambda: progress.advance(bars["training"]),
        )
        for h in heads
    }
    used = {name: getattr(settings, name) for name in ("D", "T", "blocks", "batch", "steps")}
    results["training"] = {**used, "seeds": chosen.seeds, "window": WINDOW, "runs": runs}
    return results


def main() -> None:
    """Measures, prints tables, and writes where asked."""
    chosen = parsed()
    console, start = Console(stderr=True), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        found = measured(chosen, progress)
    found["versions"] = machine.versions() | {name: version(name) for name in PACKAGES}
    found["seconds"] = round(time.perf_counter() - start)
    if chosen.write:
        command = " ".join(["python -m experiments.heads", *sys.argv[1:]])
        records.save(HERE / "results.json", found, command=command, seed=0)
        figure.draw(found, HERE)
    if chosen.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


def show(found: dict[str, Any]) -> None:
    """The tables of the page, and its conclusion."""
    from experiments.heads import page  # after saving: results do not depend on their page

    console = Console()
    for title, rows in page.tables(found).items():
        console.print(tables.terminal(title, rows))
    console.print(page.conclusion(found), highlight=False)


if __name__ == "__main__":
    main()
