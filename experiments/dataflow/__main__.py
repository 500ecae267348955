"""What happens to every tensor in multi-head attention, and what do its options cost?"""

import json
import subprocess
import sys
from argparse import Namespace
from typing import Any

from experiments import frame, records
from experiments.dataflow import figure, walk
from experiments.dataflow.choices import ROUNDS, SHAPES, THREADS
from experiments.dataflow.programs import PROGRAMS
from jaxmha.bench.fleet import environment

EXAMPLES = """examples:
  python -m experiments.dataflow                   what every option costs, a minute
  python -m experiments.dataflow --write           and results.json with its figures
  jaxmha describe --num-heads 8 --features 512     the graph of any layer
"""


def measured(framework: str, index: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by program, from a process of its own."""
    command = [sys.executable, "-m", "experiments.dataflow.programs", framework, str(index)]
    done = subprocess.run(
        [*command, str(rounds)],
        cwd=records.ROOT,
        env=environment(framework, THREADS),
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{framework}, {SHAPES[index].name}: {done.stderr.strip()[-2000:]}")
    found: dict[str, list[float]] = json.loads(done.stdout)
    return {name: [float(f"{t:.4g}") for t in row] for name, row in found.items()}


def find(chosen: Namespace) -> dict[str, Any]:
    """Everything that the page says."""
    rounds = chosen.rounds
    if rounds < 2:
        raise ValueError(f"--rounds must be at least 2, got {rounds}")
    seconds: dict[str, dict[str, Any]] = {framework: {} for framework in PROGRAMS}
    with frame.bars(measuring=len(PROGRAMS) * len(SHAPES)) as tick:
        for framework, of in seconds.items():
            for i, shape in enumerate(SHAPES):
                of[shape.name] = measured(framework, i, rounds)
                tick("measuring")
    flow = walk.flow().to_json()
    nodes = [{k: v for k, v in n.items() if k != "differences"} for n in flow["nodes"]]
    kept = {k: flow[k] for k in ("sizes", "dtype", "flops", "bytes", "bytes_fused")}
    return {
        "threads": THREADS,
        "rounds": rounds,
        "flow": kept | {"nodes": nodes},
        "predicted": {shape.name: walk.predicted(*shape) for shape in SHAPES},
        "seconds": seconds,
    }


EXPERIMENT = frame.Experiment(
    "dataflow",
    __doc__,
    EXAMPLES,
    find,
    options={"--rounds": {"type": int, "default": ROUNDS, "help": f"default {ROUNDS}"}},
    figures=figure.FIGURES,
    seed=0,
)

if __name__ == "__main__":
    sys.exit(frame.run(EXPERIMENT))
