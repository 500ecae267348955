"""Why do two hand-written attention layers of PyTorch and TensorFlow give different results?

Two classes that are often set side by side run as they are written; where they do not, with the
smallest repair; and are then repaired step by step until only rounding is left. At every step the
difference is taken apart: weights, masks, constants, rounding.
"""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments import command

HERE = Path(__file__).parent
EXAMPLES = """examples:
  python -m experiments.attribution            tables
  python -m experiments.attribution --write    results.json and the figures
  python -m experiments.attribution --seed 7 --json
"""


def parsed(arguments: list[str] | None = None) -> Namespace:
    """The command line; exits with 2 and one message where it is wrong."""
    parser = command.parser("attribution", __doc__, EXAMPLES)
    parser.add_argument("--seed", type=int, default=42, help="of weights and input; default 42")
    chosen = parser.parse_args(arguments)
    if chosen.seed < 0:
        parser.exit(2, f"--seed must be at least 0, got {chosen.seed}\n")
    return chosen


def measure(seed: int, console: Console) -> dict[str, Any]:
    """Everything that the page says."""
    # Before keras is imported.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from experiments.attribution import steps
    except ImportError as error:
        sys.exit(_fail(f"{error}: `make .venv/installed` brings torch and tensorflow"))

    found = [
        {"name": step.name, "away": list(step.away), **step.found.to_json()}
        for step in track(
            steps.repair(seed), "repairing", steps.REPAIRS, console=console, transient=True
        )
    ]
    return {
        "sizes": {
            "D": steps.D,
            "N": steps.N,
            "T": steps.T,
            "B": steps.B,
            "written": steps.WRITTEN,
            "lengths": steps.LENGTHS.tolist(),
        },
        "errors": steps.errors(steps.build(seed), steps.draw(seed, steps.WRITTEN)),
        "printed": steps.as_printed(seed),
        "builds": steps.drawn_again(seed),
        "steps": found,
    }


def show(found: dict[str, Any]) -> None:
    """Tables for readers of a terminal."""
    console = Console()
    for name, what in found["errors"].items():
        console.print(f"{name} as written: {what}", markup=False, highlight=False)
    for step in found["steps"]:
        title = f"{step['name']}: {step['relative']:.2g} of the output"
        table = Table("part", "share", "what", title=title, title_justify="left")
        for part in step["parts"]:
            table.add_row(part["name"], f"{part['share']:.3g}", part["sentence"])
        console.print(table)
    table = Table("weights", "mask", "sum", "largest", title="what the text prints")
    for row in found["printed"]:
        table.add_row(row["weights"], row["mask"], f"{row['sum']:.3g}", f"{row['largest']:.2g}")
    console.print(table)


def main() -> None:
    """Measures, prints, and writes where asked."""
    chosen = parsed()
    found = measure(chosen.seed, Console(stderr=True))
    print(json.dumps(found, indent=1)) if chosen.json else show(found)
    if chosen.write:
        from experiments import records
        from experiments.attribution import figures, page

        figures.waterfall(found["steps"][0], HERE / "waterfall.svg")
        figures.repairs(found["steps"], HERE / "repairs.svg")
        records.save(HERE / "results.json", found, command=page.COMMAND, seed=chosen.seed)


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
