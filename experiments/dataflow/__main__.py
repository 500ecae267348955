"""What happens to every tensor in multi-head attention, and what do its options cost?"""

from argparse import Namespace
from typing import Any

from experiments import frame
from experiments.dataflow import figure, programs, walk
from experiments.dataflow.choices import ROUNDS, SHAPES, THREADS
from jaxmha.bench.fleet import environment

EXAMPLES = """examples:
  python -m experiments.dataflow                   what every option costs, a minute
  python -m experiments.dataflow --write           and results.json with its figures
  jaxmha describe --num-heads 8 --features 512     the graph of any layer
"""


def find(chosen: Namespace) -> dict[str, Any]:
    """Everything that the page says."""
    rounds = chosen.rounds
    seconds: dict[str, dict[str, Any]] = {framework: {} for framework in programs.PROGRAMS}
    with frame.bars(measuring=len(programs.PROGRAMS) * len(SHAPES)) as tick:
        for framework, of in seconds.items():
            for i, shape in enumerate(SHAPES):
                taken = frame.alone(
                    programs.run, framework, i, rounds, environment=environment(framework, THREADS)
                )
                of[shape.name] = {k: [float(f"{t:.4g}") for t in x] for k, x in taken.items()}
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


EXPERIMENT = frame.of(
    find,
    EXAMPLES,
    options={"--rounds": frame.number(ROUNDS, least=2)},
    figures=figure.FIGURES,
    seed=0,
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
