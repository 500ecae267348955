"""How far from float64 are attention layers, and where do they break?

Every way through torch, Keras, Flax, jax.nn and jaxmha on the same rows and exact projections, over
dtypes, lengths and sizes of logits. Keras' two backends are in processes of their own.
"""

import importlib
import os
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from experiments import frame, records
from experiments.numerics import figure

WORKERS = ("jax", "torch", "tensorflow")  # the one that takes longest first
EXAMPLES = """examples:
  python -m experiments.numerics                   tables, about two minutes
  python -m experiments.numerics --only torch      of one process
  python -m experiments.numerics --write           and results.json with its figures
"""


def work(worker: str) -> dict[str, Any]:
    """Measures in a process of its own; returns the results and their sources."""
    os.environ["KERAS_BACKEND"] = "tensorflow" if worker == "tensorflow" else "jax"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import jax

    from experiments.numerics import measure

    jax.config.update("jax_enable_x64", worker == "jax")  # type: ignore[no-untyped-call]
    runs = importlib.import_module(f"experiments.numerics.{worker}_runs").RUNS
    return {"found": measure.measure(runs), "sources": records.loaded()}


def collect(chosen: Namespace) -> dict[str, Any]:
    """Implementation -> what was measured, and the sources of all processes."""
    if chosen.write and chosen.only:
        raise ValueError("--write stores all of it: leave --only out")
    from experiments.numerics import inputs, measure

    workers = (chosen.only,) if chosen.only else WORKERS
    with ThreadPoolExecutor(2) as pool, frame.bars(processes=len(workers)) as tick:
        done = pool.map(partial(frame.alone, work), workers)
        found = list(frame.each(tick, "processes", done))
    sizes = {name: getattr(inputs, name) for name in ("N", "H", "T")}
    tried = {"seeds": measure.SEEDS, "lengths": measure.LENGTHS, "scales": measure.SCALES}
    return {
        "settings": {**sizes, "S": measure.FIXED, **tried},
        "implementations": {k: v for one in found for k, v in one["found"].items()},
        "worker_sources": {k: v for one in found for k, v in one["sources"].items()},
    }


EXPERIMENT = frame.of(
    collect,
    EXAMPLES,
    options={"--only": {"choices": WORKERS, "help": "one process"}},
    figures=figure.FIGURES,
    seed=0,
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
