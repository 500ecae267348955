"""How does every framework start an attention layer, and does it matter?

Kernels and biases of fresh layers of the frameworks themselves and those of `init_params`, what
they do to noise, and the first steps of training from each.
"""

import os
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from experiments import frame
from experiments.initialisation import figure, frameworks, measure
from experiments.train import seeds

os.environ.setdefault("KERAS_BACKEND", "jax")  # before it is imported

EXAMPLES = """examples:
  python -m experiments.initialisation                    tables; two minutes
  python -m experiments.initialisation --steps 20         shorter training
  python -m experiments.initialisation --write            and results.json and the figures
"""
# One of every kind: torch's other needs other widths, and equinox is `Linear` without biases.
TRAINED = ("torch, packed", "torch, four Linear", "keras", "flax nnx")


def measured(chosen: Namespace) -> dict[str, Any]:
    """Everything, part by part."""
    seeds.check(chosen)
    start, names = time.perf_counter(), list(frameworks.STARTS)
    training = chosen.steps * chosen.seeds * len(TRAINED)
    with frame.bars(layers=len(names), training=training) as tick:
        starts = {name: measure.compare(name) for name in frame.each(tick, "layers", names)}
        variants: dict[str, dict[str, Any]] = {name: {} for name in TRAINED}
        trained = seeds.compare(chosen, variants, partial(tick, "training"), begin)
    return {
        "settings": {"D": measure.D, "N": measure.N, "seeds": measure.SEEDS},
        "starts": starts,
        "haiku": frameworks.haiku_refuses(measure.D, measure.N),
        "training": trained,
        "seconds": round(time.perf_counter() - start),
    }


def begin(name: str) -> Callable[[Any, int], None]:
    """Puts a framework's own fresh layers in place of a model's; all else stays."""

    def begun(model: Any, seed: int) -> None:
        for i, block in enumerate(model.blocks):
            attention = block.attention
            D, N, _ = attention.query.kernel.shape
            drawn = frameworks.STARTS[name].theirs(1000 * seed + i, D, N)
            for projection in ("query", "key", "value", "out"):
                part = getattr(attention, projection)
                part.kernel[...] = drawn[f"{projection}.kernel"]
                part.bias[...] = drawn.get(f"{projection}.bias", 0.0)

    return begun


EXPERIMENT = frame.of(
    measured,
    EXAMPLES,
    options=seeds.OPTIONS,
    figures=figure.FIGURES,
    seed=0,
    packages=("optax", "scipy", "equinox", "dm-haiku"),
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
