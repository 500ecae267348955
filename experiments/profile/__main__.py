"""Where does the time of a layer go on this CPU, and what keeps it from torch's?

The layer, and each of its parts alone and at its best, in XLA and in torch, in processes of their
own by turns; then XLA's trace of the layer's kernels, and what flags and settings of the environment do.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from experiments import command, machine, records
from experiments.benchmarks import cases
from experiments.benchmarks.fleet import Fleet
from experiments.benchmarks.peers import ON_JAX, OURS
from experiments.profile import dispatch, environment, kernels, parts

HERE = Path(__file__).parent
ONE_HEAD = (64, 2048)  # rows
EXAMPLES = """examples:
  python -m experiments.profile                    ten minutes on a quiet machine
  python -m experiments.profile --rounds 3 --json
  python -m experiments.profile.kernels layer-forward-causal-B1-T2048-E512 --peer flax-nnx
  python -m experiments.profile.environment --rounds 5
"""


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints, and writes where asked."""
    command.in_rounds(HERE, __doc__, EXAMPLES, arguments, collect, show, rounds=3)


def collect(rounds: int) -> dict[str, Any]:
    """Medians of all rounds, in milliseconds, and the best rate of a plain product; says on stderr
    what it is at."""
    runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in parts.WHOLE}
    for i in range(rounds):
        for backend, found in runs.items():
            print(f"parts in {backend}, round {i + 1} of {rounds}", file=sys.stderr, flush=True)
            found.append(_measured(backend))
    by_case = {
        name: {backend: _medians([run[name] for run in found]) for backend, found in runs.items()}
        for name in parts.CASES
    }
    rates = {backend: max(run["sgemm"] for run in found) for backend, found in runs.items()}
    print("trace of the kernels", file=sys.stderr, flush=True)
    traced = [kernels.profile(OURS, case) for case in cases.select(kernels.TRACED)]
    print("memory", file=sys.stderr, flush=True)
    return {
        "rounds": rounds,
        "parts": by_case,
        "sgemm": rates,
        "kernels": traced,
        "dispatch": dispatch.collect(),
        "memory": _grown(),
        "environment": environment.collect(rounds),
    }


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Milliseconds."""
    return {part: 1e3 * median(run[part] for run in found) for part in found[0]}


def _grown() -> dict[str, dict[str, float]]:
    """MiB that one head takes, by case and peer.

    Raises:
      ValueError: a peer failed.
    """
    found: dict[str, dict[str, float]] = {}
    with Fleet(machine.threads()) as fleet:
        for T in ONE_HEAD:
            case = cases.Case("layer", "forward", "plain", 1, T, T, N=1, K=1)
            for peer in (OURS, *ON_JAX):
                grown = fleet.fresh(peer, "memory", case=case.as_dict())
                if "failed" in grown:
                    raise ValueError(f"memory of {peer}: {grown['failed']}")
                found.setdefault(case.name, {})[peer] = grown["bytes"] / 2**20
    return found


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
    """What is the least that could be, and milliseconds of every part."""
    from rich.console import Console

    from experiments.profile import page
    from experiments.tables import terminal

    console = Console()
    console.width = max(console.width, 140)  # the tables need it
    console.print(terminal("limits", page.limits(found)))
    console.print(terminal("milliseconds", page.parts(found)))


if __name__ == "__main__":
    main()
