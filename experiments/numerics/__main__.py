"""How far from float64 are attention layers, and where do they break?

Every way through torch, Keras, Flax, jax.nn and jaxmha on the same rows and exact projections, over
dtypes, lengths and sizes of logits. Keras' two backends are in processes of their own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments import command

WORKERS = ("jax", "torch", "tensorflow")  # the one that takes longest first
EXAMPLES = """examples:
  python -m experiments.numerics                   tables, about two minutes
  python -m experiments.numerics --only torch      of one process
  python -m experiments.numerics --write           and results.json with its figures
"""
HERE = Path(__file__).parent


def work(worker: str) -> None:
    """In a process of its own: lines of what is done, then the results."""
    os.environ["KERAS_BACKEND"] = "tensorflow" if worker == "tensorflow" else "jax"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    from experiments.numerics import measure

    if worker == "torch":
        from experiments.numerics import torch_runs

        runs = torch_runs.RUNS
    elif worker == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
        from experiments.numerics import jax_runs

        runs = jax_runs.RUNS
    else:
        from experiments.numerics import keras_runs

        runs = keras_runs.runs("tensorflow")
    found = measure.measure(runs, lambda text: print(text, flush=True))
    from experiments import records

    print(json.dumps({"found": found, "sources": records.sources()}))


def collect(workers: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    """Implementation -> what was measured, and the sources of all processes."""
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda worker: ask(worker, say), workers))
    found: dict[str, Any] = {"implementations": {}, "worker_sources": {}}
    for answer in answers:
        found["implementations"] |= answer["found"]
        found["worker_sources"] |= answer["sources"]
    return found


def ask(worker: str, say: Callable[[str], None]) -> dict[str, Any]:
    """The answer of one process."""
    command = [sys.executable, "-m", "experiments.numerics", "--worker", worker]
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]
    ) as process:
        assert process.stdout is not None
        for last in process.stdout:
            if not last.startswith("{"):
                say(last.strip())
    if process.returncode:
        raise RuntimeError(f"the process of {worker} ended with {process.returncode}")
    answer: dict[str, Any] = json.loads(last)
    return answer


def show(found: dict[str, Any]) -> None:
    """One line per implementation."""
    from rich.console import Console
    from rich.table import Table

    from experiments.numerics import measure, page

    for dtype in measure.NARROW:
        table = Table(title=f"{dtype}: RMS error in rounding floors", title_justify="left")
        table.add_column("implementation", no_wrap=True)
        for S in measure.LENGTHS:
            table.add_column(f"S={S}", justify="right")
        for scale in measure.SCALES[1:]:
            table.add_column(f"logits x{scale}", justify="right")
        for name, row in found["implementations"].items():
            errors = [*row["lengths"][dtype], *row["scales"][dtype][1:]]
            table.add_row(name, *map(page.number, errors))
        Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and writes where asked."""
    parser = command.parser("numerics", __doc__, EXAMPLES)
    parser.add_argument("--only", choices=WORKERS, help="one process")
    parser.add_argument("--worker", choices=WORKERS, help="what this program calls itself with")
    options = parser.parse_args(arguments)
    if options.write and options.only:
        parser.error("--write stores all of it: leave --only out")
    if options.worker:
        work(options.worker)
        return 0
    from rich.console import Console
    from rich.progress import Progress

    workers = (options.only,) if options.only else WORKERS
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None if options.only else 3 * 13)
        found = collect(workers, lambda s: progress.update(task, description=s, advance=1))
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    if options.write:
        store(found)
    return 0


def store(found: dict[str, Any]) -> None:
    """Writes results.json and the figures."""
    from experiments import records
    from experiments.numerics import figure, inputs, measure, page

    settings = {
        "settings": {
            "N": inputs.N,
            "H": inputs.H,
            "T": inputs.T,
            "S": measure.FIXED,
            "seeds": measure.SEEDS,
            "lengths": measure.LENGTHS,
            "scales": measure.SCALES,
        }
    }
    workers = found.pop("worker_sources")
    stored = {**settings, **found}
    figure.draw(stored, HERE)
    path = HERE / "results.json"
    records.save(path, stored, command=page.COMMAND, seed=0, workers=workers)


if __name__ == "__main__":
    sys.exit(main())
