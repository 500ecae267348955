"""What happens to every tensor in multi-head attention, and what do its options cost?"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments import figures, records
from experiments.benchmarks.fleet import ROOT, environment
from experiments.dataflow import figure, walk
from experiments.dataflow.choices import CHOICES, ROUNDS, SHAPES, THREADS, ratio
from experiments.dataflow.page import COMMAND
from experiments.dataflow.programs import PROGRAMS
from jaxmha.cli.console import one_message

HERE = Path(__file__).parent
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def measured(framework: str, index: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by program, from a process of its own."""
    command = [sys.executable, "-m", "experiments.dataflow.programs", framework, str(index)]
    done = subprocess.run(
        [*command, str(rounds)],
        cwd=ROOT,
        env=environment(framework, THREADS),
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{framework}, {SHAPES[index].name}: {done.stderr.strip()[-2000:]}")
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def find(rounds: int, console: Console) -> dict[str, Any]:
    """Everything that the page says."""
    jobs = [(framework, i) for framework in PROGRAMS for i in range(len(SHAPES))]
    seconds: dict[str, dict[str, Any]] = {framework: {} for framework in PROGRAMS}
    for framework, i in track(jobs, "measuring", console=console, transient=True):
        times = measured(framework, i, rounds)
        seconds[framework][SHAPES[i].name] = {
            name: [float(f"{t:.4g}") for t in row] for name, row in times.items()
        }
    flow = walk.flow().to_json()
    return {
        "threads": THREADS,
        "rounds": rounds,
        "flow": {k: flow[k] for k in ("sizes", "dtype", "flops", "bytes", "bytes_fused")}
        | {"nodes": [{k: v for k, v in n.items() if k != "differences"} for n in flow["nodes"]]},
        "predicted": {shape.name: walk.predicted(*shape) for shape in SHAPES},
        "seconds": seconds,
    }


def table(found: dict[str, Any]) -> Table:
    """Ratios, with quartiles."""
    made = Table(caption=f"median of {found['rounds']} rounds, with quartiles")
    made.add_column("option")
    for framework in found["seconds"]:
        for shape in SHAPES:
            made.add_column(f"{framework}, {shape.name}", justify="right")
    for choice in CHOICES:
        cells = [
            str(ratio(found, framework, shape.name, choice) or "")
            for framework in found["seconds"]
            for shape in SHAPES
        ]
        made.add_row(choice.name, *cells)
    return made


@app.command(
    epilog="Examples:\n\n  python -m experiments.dataflow\n\n  python -m experiments.dataflow --write"
)
def main(
    write: Annotated[bool, typer.Option("--write", help="Write result and figures.")] = False,
    rounds: Annotated[int, typer.Option(help="Of every program.", min=2)] = ROUNDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the graph and what every option costs."""
    console = Console(stderr=as_json)
    with one_message():
        found = find(rounds, console)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        console.print(str(walk.flow()), highlight=False, soft_wrap=True, markup=False)
        console.print(table(found))
    if write:
        records.save(HERE / "results.json", found, command=COMMAND, seed=0)
        figures.save(
            figure.draw(found),
            HERE / "costs.svg",
            about="Time with an option relative to the time without, in torch and jaxmha",
        )
        (HERE / "flow.svg").write_text(walk.flow().svg())


if __name__ == "__main__":
    app()
