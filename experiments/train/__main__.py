"""Does a Flax model train the same with this attention, and faster?

A small transformer (flax.nnx, optax) reads the first bytes of functions of the Python standard
library and says which package each is from. Their lengths differ, so that padding masks matter.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import machine
from experiments.train import data
from experiments.train.data import Examples
from experiments.train.model import ATTENTION
from experiments.train.training import Settings, Trainer, side_by_side, train

HERE = Path(__file__).parent
BUILD = Path("build") / "train"
EXAMPLES = """examples:
  python -m experiments.train                              train, with a checkpoint now and then
  python -m experiments.train --resume                     go on where the last one ended
  python -m experiments.train --attention flax --steps 200 --checkpoints /tmp/flax
  python -m experiments.train --side-by-side 50            both attentions step by step first
"""


def parsed(arguments: list[str] | None = None) -> Namespace:
    """The command line; exits with 2 and one message where it is wrong."""
    default = Settings()
    parser = ArgumentParser(
        prog="python -m experiments.train",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--attention", choices=ATTENTION, default=default.attention, help="default jaxmha"
    )
    for name, kind, about in (
        ("steps", int, "of the optimiser"),
        ("seed", int, "of weights, batches and dropout"),
        ("dropout", float, "rate of attention weights and of residuals"),
    ):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"{about}; default {value}")
    parser.add_argument(
        "--side-by-side",
        type=int,
        default=0,
        metavar="STEPS",
        help="first so many steps of both attentions in turns, without dropout",
    )
    parser.add_argument("--checkpoints", type=Path, default=BUILD, help=f"folder, default {BUILD}")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint there")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--write", action="store_true", help="write results.json and curves.png")
    chosen = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("seed", 0), ("side_by_side", 0)):
        if getattr(chosen, name) < least:
            parser.exit(2, f"--{name.replace('_', '-')} must be at least {least}\n")
    if not 0 <= chosen.dropout < 1:
        parser.exit(2, f"--dropout must be in [0, 1), got {chosen.dropout}\n")
    return chosen


def main() -> None:
    """Trains, prints a table, and writes where asked."""
    chosen = parsed()
    settings = Settings(chosen.attention, chosen.seed, chosen.steps, chosen.dropout)
    console = Console(stderr=True)
    start, examples = time.perf_counter(), data.read(settings.T)
    try:
        beside = compare(settings, examples, chosen.side_by_side, console)
        trainer = run(settings, examples, chosen, console)
    except (OSError, ValueError) as error:
        sys.exit(fail(error))
    except KeyboardInterrupt:
        console.print("stopped; --resume goes on from the last checkpoint")
        sys.exit(130)
    results = {
        "question": "Does a Flax model train the same with this attention, and faster?",
        "command": " ".join(["python -m experiments.train", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": round(time.perf_counter() - start),
        "seed": settings.seed,
        "machine": machine.describe(),
        "versions": machine.versions()
        | {name: version(name) for name in ("optax", "orbax-checkpoint")},
        "settings": asdict(settings),
        "examples": {"trained on": len(examples[0].labels), "held out": len(examples[1].labels)},
        "most_frequent": most_frequent(examples[1]),
        "curve": asdict(trainer.curve),
        "side_by_side": beside,
    }
    print(json.dumps(results, indent=1)) if chosen.json else show(results)
    if chosen.write:
        from experiments.train import figure

        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        figure.draw(results, HERE / "curves.png")


def fail(error: Exception) -> int:
    """One message; the exit code of bad input."""
    print(error, file=sys.stderr)
    return 2


def run(
    settings: Settings, examples: tuple[Examples, Examples], chosen: Namespace, console: Console
) -> Trainer:
    """The training itself, with a bar on a terminal and a line per evaluation elsewhere."""
    with bar(console) as progress:
        task = progress.add_task("", total=settings.steps)

        def tell(trainer: Trainer) -> None:
            curve, done = trainer.curve, len(trainer.curve.loss)
            text = f"loss {curve.loss[-1]:.3f}"
            if curve.accuracy:
                text += f"  held out: {curve.held_out_loss[-1]:.3f}, {curve.accuracy[-1]:.1%} right"
            progress.update(task, completed=done, description=text)
            if not console.is_terminal and curve.steps[-1:] == [done]:
                console.print(f"step {done}: {text}", highlight=False)

        folder, resume = chosen.checkpoints, chosen.resume
        return train(settings, examples, folder, resume=resume, progress=tell)


def compare(
    settings: Settings, examples: tuple[Examples, Examples], steps: int, console: Console
) -> dict[str, Any] | None:
    """Both attentions from the same seed, without dropout; None where no steps are asked for."""
    if not steps:
        return None
    both = [replace(settings, attention=kind, dropout=0.0) for kind in ATTENTION]
    with bar(console) as progress:
        task = progress.add_task("side by side, without dropout", total=steps)
        found = side_by_side(both, examples, steps, lambda: progress.advance(task))
    runs = {
        one.attention: {
            "loss": run["loss"],
            "seconds_to_compile": run["seconds"][0],
            "seconds_per_step": median(run["seconds"][1:] or run["seconds"]),
        }
        for one, run in zip(both, found, strict=True)
    }
    pairs = zip(*(run["loss"] for run in found), strict=True)
    return {"runs": runs, "difference": max(abs(a - b) / b for a, b in pairs)}


def bar(console: Console) -> Progress:
    """Steps done, time left, and a text."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console, transient=True)


def most_frequent(examples: Examples) -> float:
    """Accuracy of always saying the same."""
    counts = [int((examples.labels == label).sum()) for label in range(len(data.PACKAGES))]
    return max(counts) / len(examples.labels)


def show(results: dict[str, Any]) -> None:
    """One line per evaluation, and one per attention."""
    from rich.table import Table

    console, curve = Console(), results["curve"]
    table = Table(caption=f"the most frequent label alone: {results['most_frequent']:.1%}")
    for column in ("step", "training loss", "held-out loss", "accuracy"):
        table.add_column(column, justify="right")
    for step, loss, accuracy in zip(
        curve["steps"], curve["held_out_loss"], curve["accuracy"], strict=True
    ):
        last = curve["loss"][max(0, step - 20) : step]
        table.add_row(str(step), f"{sum(last) / len(last):.3f}", f"{loss:.3f}", f"{accuracy:.1%}")
    console.print(table)
    if beside := results["side_by_side"]:
        for name, run in beside["runs"].items():
            console.print(
                f"attention by {name}: {1e3 * run['seconds_per_step']:.0f} ms per step, first step "
                f"{run['seconds_to_compile']:.1f} s",
                highlight=False,
            )
        console.print(
            f"largest relative difference of a loss: {beside['difference']:.1e}", highlight=False
        )


if __name__ == "__main__":
    main()
