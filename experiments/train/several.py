"""Commands that train several variants over several seeds: their options, progress and results."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import command, machine, records, tables
from experiments.train import seeds

WINDOW = 10  # steps of which losses are means
Tables = Mapping[str, tables.Rows]


def parsed(name: str, about: str | None, examples: str, arguments: Any = None) -> Namespace:
    """The command line; exits with 2 and one message where it is wrong."""
    parser = command.parser(name, about, examples)
    steps = seeds.SMALL.steps
    parser.add_argument("--steps", type=int, default=steps, help=f"of training; default {steps}")
    parser.add_argument("--seeds", type=int, default=5, help="of training; default 5")
    chosen = parser.parse_args(arguments)
    if chosen.steps < WINDOW or chosen.steps % WINDOW:
        parser.exit(2, f"--steps must be a multiple of {WINDOW}, got {chosen.steps}\n")
    if chosen.seeds < 2:
        parser.exit(2, f"--seeds must be at least 2 for a spread, got {chosen.seeds}\n")
    return chosen


def run(
    chosen: Namespace,
    folder: Path,
    packages: Sequence[str],
    measured: Callable[[Namespace, Progress], dict[str, Any]],
    draw: Callable[[dict[str, Any], Path], None],
    said: Callable[[dict[str, Any]], tuple[Tables, str]],
) -> None:
    """Measures, prints what is `said` of it, and writes where asked.

    `packages`: whose versions count beside those of every record.
    """
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        found = measured(chosen, progress)
    found["versions"] = machine.versions() | {name: version(name) for name in packages}
    found["seconds"] = round(time.perf_counter() - start)
    if chosen.write:
        words = " ".join([f"python -m experiments.{folder.name}", *sys.argv[1:]])
        records.save(folder / "results.json", found, command=words, seed=0)
        draw(found, folder)
    if chosen.json:
        print(json.dumps(found, indent=1))
        return
    rows, conclusion = said(found)  # after saving: results do not depend on their page
    console = Console()
    for title, table in rows.items():
        console.print(tables.terminal(title, table))
    console.print(conclusion, highlight=False)
