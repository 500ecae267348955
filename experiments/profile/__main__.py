"""Where does the time of a layer go on this CPU, and what keeps it from torch's?

The layer, and each of its parts alone and at its best, in XLA and in torch, in processes of their
own by turns; then XLA's trace of the layer's kernels, and what process-wide flags do.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from experiments import command, records
from experiments.benchmarks import cases
from experiments.benchmarks.peers import OURS
from experiments.profile import dispatch, flags, kernels, parts

HERE = Path(__file__).parent
EXAMPLES = """examples:
  python -m experiments.profile                    ten minutes on a quiet machine
  python -m experiments.profile --rounds 3 --json
  python -m experiments.profile.kernels layer-forward-causal-B1-T2048-E512 --peer flax-nnx
  python -m experiments.profile.flags --rounds 5
"""


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints, and writes where asked."""
    command.in_rounds(HERE, __doc__, EXAMPLES, arguments, collect, show, rounds=5)


def collect(rounds: int) -> dict[str, Any]:
    """Medians of all rounds, in milliseconds; says on stderr what it is at."""
    runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in parts.WHOLE}
    for i in range(rounds):
        for backend, found in runs.items():
            print(f"parts in {backend}, round {i + 1} of {rounds}", file=sys.stderr, flush=True)
            found.append(_measured(backend))
    by_case = {
        name: {
            backend: {
                part: 1e3 * median(run[name][part] for run in found) for part in found[0][name]
            }
            for backend, found in runs.items()
        }
        for name in parts.CASES
    }
    rates = {backend: median(run["sgemm"] for run in found) for backend, found in runs.items()}
    print("trace of the kernels", file=sys.stderr, flush=True)
    traced = [
        kernels.profile(OURS, case)
        for case in cases.select([*parts.CASES, "layer-forward-causal-B1-T2048-E512"])
    ]
    return {
        "rounds": rounds,
        "parts": by_case,
        "sgemm": rates,
        "kernels": traced,
        "dispatch": dispatch.collect(),
        "flags": {"settings": flags.FLAGS, "results": flags.collect(max(rounds // 2, 1))},
    }


def _measured(backend: str) -> dict[str, Any]:
    """Seconds by case and part, from a process of its own.

    Raises:
      ValueError: it ended with an error.
    """
    command = [sys.executable, "-m", "experiments.profile.parts", backend]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=records.ROOT)
    if ran.returncode:
        raise ValueError(f"parts in {backend}: {ran.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def show(found: dict[str, Any]) -> None:
    """Milliseconds of every part."""
    from rich.console import Console
    from rich.table import Table

    names = list(parts.COUNTS["forward"])
    table = Table("case", "in", "whole", *names, "rest", title="milliseconds", title_justify="left")
    for case, by_backend in found["parts"].items():
        for backend in by_backend:
            row = parts.split(case, by_backend[backend])
            table.add_row(case, parts.WHOLE[backend], *(f"{x:.1f}" for x in row.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
