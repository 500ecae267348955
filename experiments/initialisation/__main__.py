"""How does every framework start an attention layer, and does it matter?

Kernels and biases of fresh layers of the frameworks themselves beside those of `init_params`, what
they do to noise, and the first steps of training from each.
"""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import machine, records, tables
from experiments.initialisation import figure, frameworks, learning, measure
from experiments.train import data, seeds

os.environ.setdefault("KERAS_BACKEND", "jax")  # before it is imported

HERE = Path(__file__).parent
PACKAGES = ("optax", "scipy", "equinox", "dm-haiku")  # beside those of every record
WINDOW = 10  # steps of which losses are means
EXAMPLES = """examples:
  python -m experiments.initialisation                    tables; two minutes
  python -m experiments.initialisation --steps 20         shorter training
  python -m experiments.initialisation --write            and results.json and the figures beside it
"""


def parsed(arguments: list[str] | None = None) -> Namespace:
    """The command line; exits with 2 and one message where it is wrong."""
    parser = ArgumentParser(
        prog="python -m experiments.initialisation",
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
    names = frameworks.STARTS
    layers = progress.add_task("layers", total=len(names))
    steps = progress.add_task("training", total=chosen.steps * chosen.seeds * len(learning.TRAINED))
    starts = {}
    for name in names:
        starts[name] = measure.compare(name)
        progress.advance(layers)
    settings = replace(seeds.SMALL, steps=chosen.steps)
    runs = learning.curves(
        settings, data.read(settings.T), chosen.seeds, WINDOW, lambda: progress.advance(steps)
    )
    used = {name: getattr(settings, name) for name in ("D", "N", "T", "blocks", "batch", "steps")}
    return {
        "settings": {"D": measure.D, "N": measure.N, "seeds": measure.SEEDS},
        "starts": starts,
        "haiku": frameworks.haiku_refuses(measure.D, measure.N),
        "training": {**used, "seeds": chosen.seeds, "window": WINDOW, "runs": runs},
    }


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
        command = " ".join(["python -m experiments.initialisation", *sys.argv[1:]])
        records.save(HERE / "results.json", found, command=command, seed=0)
        figure.draw(found, HERE)
    if chosen.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


def show(found: dict[str, Any]) -> None:
    """The tables of the page, and its conclusion."""
    from experiments.initialisation import page  # after saving: results do not depend on their page

    console = Console()
    for title, rows in page.tables(found).items():
        console.print(tables.terminal(title, rows))
    console.print(page.conclusion(found), highlight=False)


if __name__ == "__main__":
    main()
