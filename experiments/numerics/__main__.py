"""How far from float64 are attention layers, and where do they break?

Every way through torch, Keras, Flax, jax.nn and jaxmha on the same rows and exact projections, over
dtypes, lengths and sizes of logits. Keras' two backends are in processes of their own.
"""

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments import frame, records
from experiments.numerics import figure

WORKERS = ("jax", "torch", "tensorflow")  # the one that takes longest first
EXAMPLES = """examples:
  python -m experiments.numerics                   tables, about two minutes
  python -m experiments.numerics --only torch      of one process
  python -m experiments.numerics --write           and results.json with its figures
"""


def work(worker: str) -> None:
    """In a process of its own: lines of what is done, then the results."""
    os.environ["KERAS_BACKEND"] = "tensorflow" if worker == "tensorflow" else "jax"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["JAX_ENABLE_X64"] = "1"
    from experiments.numerics import measure

    runs = importlib.import_module(f"experiments.numerics.{worker}_runs").RUNS
    found = measure.measure(runs, lambda text: print(text, flush=True))
    print(json.dumps({"found": found, "sources": records.loaded()}))


def collect(chosen: Namespace) -> dict[str, Any]:
    """Implementation -> what was measured, and the sources of all processes."""
    if chosen.write and chosen.only:
        raise ValueError("--write stores all of it: leave --only out")
    from experiments.numerics import inputs, measure

    workers = (chosen.only,) if chosen.only else WORKERS
    with (
        ThreadPoolExecutor(2) as pool,
        frame.bars(implementations=None if chosen.only else 3 * 13) as tick,
    ):
        found = list(pool.map(lambda w: ask(w, lambda s: tick("implementations", s)), workers))
    sizes = {name: getattr(inputs, name) for name in ("N", "H", "T")}
    tried = {"seeds": measure.SEEDS, "lengths": measure.LENGTHS, "scales": measure.SCALES}
    return {
        "settings": {**sizes, "S": measure.FIXED, **tried},
        "implementations": {k: v for one in found for k, v in one["found"].items()},
        "worker_sources": {k: v for one in found for k, v in one["sources"].items()},
    }


def ask(worker: str, say: Callable[[str], None]) -> dict[str, Any]:
    """The answer of one process."""
    command = [sys.executable, "-m", "experiments.numerics", "--worker", worker]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=records.ROOT) as process:
        assert process.stdout is not None
        for last in process.stdout:
            if not last.startswith("{"):
                say(last.strip())
    if process.returncode:
        raise RuntimeError(f"the process of {worker} ended with {process.returncode}")
    answer: dict[str, Any] = json.loads(last)
    return answer


EXPERIMENT = frame.Experiment(
    "numerics",
    __doc__,
    EXAMPLES,
    collect,
    options={"--only": {"choices": WORKERS, "help": "one process"}},
    figures=figure.FIGURES,
    seed=0,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:  # what this program calls itself with
        work(sys.argv[2])
    else:
        sys.exit(frame.run(EXPERIMENT))
