"""How does every framework start an attention layer, and does it matter?

Kernels and biases of fresh layers of the frameworks themselves beside those of `init_params`, what
they do to noise, and the first steps of training from each.
"""

import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from experiments.initialisation import figure, frameworks, learning, measure
from experiments.train import data, seeds, several

os.environ.setdefault("KERAS_BACKEND", "jax")  # before it is imported

HERE = Path(__file__).parent
PACKAGES = ("optax", "scipy", "equinox", "dm-haiku")  # beside those of every record
EXAMPLES = """examples:
  python -m experiments.initialisation                    tables; two minutes
  python -m experiments.initialisation --steps 20         shorter training
  python -m experiments.initialisation --write            and results.json and the figures beside it
"""


def parsed(arguments: list[str] | None = None) -> Namespace:
    """The command line; exits with 2 and one message where it is wrong."""
    return several.parsed("initialisation", __doc__, EXAMPLES, arguments)


def measured(chosen: Namespace, progress: Progress) -> dict[str, Any]:
    """Everything, part by part."""
    names = frameworks.STARTS
    layers = progress.add_task("layers", total=len(names))
    steps = progress.add_task("training", total=chosen.steps * chosen.seeds * len(learning.TRAINED))
    starts = {}
    for name in names:
        starts[name] = measure.compare(name)
        progress.advance(layers)
    settings = replace(seeds.SMALL, steps=chosen.steps)
    runs = learning.curves(
        settings,
        data.read(settings.T),
        chosen.seeds,
        several.WINDOW,
        lambda: progress.advance(steps),
    )
    used = {name: getattr(settings, name) for name in ("D", "N", "T", "blocks", "batch", "steps")}
    return {
        "settings": {"D": measure.D, "N": measure.N, "seeds": measure.SEEDS},
        "starts": starts,
        "haiku": frameworks.haiku_refuses(measure.D, measure.N),
        "training": {**used, "seeds": chosen.seeds, "window": several.WINDOW, "runs": runs},
    }


def said(found: dict[str, Any]) -> tuple[several.Tables, str]:
    """The tables of the page, and its conclusion."""
    from experiments.initialisation import page

    return page.tables(found), page.conclusion(found)


def main() -> None:
    """Measures, prints tables, and writes where asked."""
    several.run(parsed(), HERE, PACKAGES, measured, figure.draw, said)


if __name__ == "__main__":
    main()
