"""Are eight heads of 64 the same as one head of 512?

The same three matrices, split into 1, 2, 4, 8 and 16 heads: outputs, ranks and gradients; a script
that prints True, over 40 seeds; cases where they are equal, in float64; and learning curves.
"""

import time
from argparse import Namespace
from collections.abc import Iterable
from functools import partial
from typing import Any

from experiments import frame
from experiments.heads import cases, figure, measure, script
from experiments.train import seeds

OF_LAYERS = 5  # seeds
EXAMPLES = """examples:
  python -m experiments.heads                       tables; two minutes
  python -m experiments.heads --steps 20            shorter training
  python -m experiments.heads --write               and results.json and the figures next to it
"""


def measured(chosen: Namespace) -> dict[str, Any]:
    """Everything, part by part."""
    seeds.check(chosen)
    start, heads = time.perf_counter(), measure.HEADS
    with frame.bars(
        script=40 * len(script.WEIGHTS),
        layers=OF_LAYERS,
        cases=10,
        training=chosen.steps * chosen.seeds * len(heads),
    ) as tick:

        def each(name: str, found: Iterable[Any]) -> list[Any]:
            return list(frame.each(tick, name, found))

        variants = {f"{h} head{'s' if h > 1 else ''}": {"N": h} for h in heads}
        made = cases.cases(8, measure.E, 10, 10)
        found = {
            "settings": {"E": measure.E, "B": measure.B, "T": measure.T, "heads": list(heads)},
            "script": {
                kind: each("script", (seed._asdict() for seed in script.run(kind, 40)))
                for kind in script.WEIGHTS
            },
            "layers": each("layers", (measure.of_seed(s, heads) for s in range(OF_LAYERS))),
            "spectra": measure.spectra(0, heads),
            "pictures": measure.pictures(0, script.N),
            "cases": each("cases", (cases.outcome(case, 8) for case in made)),
            "training": seeds.compare(chosen, variants, partial(tick, "training")),
        }
    return found | {"seconds": round(time.perf_counter() - start)}


EXPERIMENT = frame.of(
    measured, EXAMPLES, options=seeds.OPTIONS, figures=figure.FIGURES, seed=0, packages=("optax",)
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
