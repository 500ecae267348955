"""Why do two hand-written attention layers of PyTorch and TensorFlow give different results?

Two classes that are often set side by side run as they are written; where they do not, with the
smallest repair; and are then repaired step by step until only rounding is left. At every step the
difference is taken apart: weights, masks, constants, rounding.
"""

import os
from argparse import Namespace
from typing import Any

from experiments import frame
from experiments.attribution import figure

EXAMPLES = """examples:
  python -m experiments.attribution            tables
  python -m experiments.attribution --write    results.json and the figures
  python -m experiments.attribution --seed 7 --json
"""


def measure(chosen: Namespace) -> dict[str, Any]:
    """Everything that the page says."""
    seed = chosen.seed
    os.environ["KERAS_BACKEND"] = "tensorflow"  # before keras is imported
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from experiments.attribution import steps
    except ImportError as error:
        raise ValueError(f"{error}: `make .venv/installed` brings torch and tensorflow") from error

    repaired = []
    with frame.bars(repairing=steps.REPAIRS) as tick:
        for step in steps.repair(seed):
            repaired.append({"name": step.name, "away": list(step.away), **step.found.to_json()})
            tick("repairing")
    sizes = {name: getattr(steps, name) for name in ("D", "N", "T", "B")}
    return {
        "sizes": {**sizes, "written": steps.WRITTEN, "lengths": steps.LENGTHS.tolist()},
        "errors": steps.errors(steps.build(seed), steps.draw(seed, steps.WRITTEN)),
        "printed": steps.as_printed(seed),
        "builds": steps.drawn_again(seed),
        "steps": repaired,
    }


EXPERIMENT = frame.of(
    measure,
    EXAMPLES,
    options={"--seed": frame.number(42, "of weights and input")},
    figures=figure.FIGURES,
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
