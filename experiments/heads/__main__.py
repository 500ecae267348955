"""Are eight heads of 64 the same as one head of 512?

The same three matrices, cut into 1, 2, 4, 8 and 16 heads: outputs, ranks and gradients; a script
that prints True, over 40 seeds; cases where they are equal, in float64; and learning curves.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from experiments.heads import cases, figure, measure, script
from experiments.train import data, seeds, several

HERE = Path(__file__).parent
PACKAGES = ("optax",)  # beside those of every record
OF_LAYERS = 5  # seeds
EXAMPLES = """examples:
  python -m experiments.heads                       tables; two minutes
  python -m experiments.heads --steps 20            shorter training
  python -m experiments.heads --write               and results.json and the figures beside it
"""


def parsed(arguments: list[str] | None = None) -> Namespace:
    """The command line; exits with 2 and one message where it is wrong."""
    return several.parsed("heads", __doc__, EXAMPLES, arguments)


def measured(chosen: Namespace, progress: Progress) -> dict[str, Any]:
    """Everything, part by part."""
    heads = measure.HEADS
    parts = {
        "script": 40 * len(script.WEIGHTS),
        "layers": OF_LAYERS,
        "cases": 10,
        "training": chosen.steps * chosen.seeds * len(heads),
    }
    bars = {name: progress.add_task(name, total=total) for name, total in parts.items()}

    def each(name: str, found: Iterable[Any]) -> Iterator[Any]:
        for one in found:
            yield one
            progress.advance(bars[name])

    made = cases.cases(8, measure.E, 10, 10)
    settings = replace(seeds.SMALL, steps=chosen.steps)
    results: dict[str, Any] = {
        "settings": {"E": measure.E, "B": measure.B, "T": measure.T, "heads": list(heads)},
        "script": {
            kind: [seed._asdict() for seed in each("script", script.run(kind, 40))]
            for kind in script.WEIGHTS
        },
        "layers": list(each("layers", (measure.of_seed(seed, heads) for seed in range(OF_LAYERS)))),
        "spectra": measure.spectra(0, heads),
        "pictures": measure.pictures(0, script.N),
        "cases": list(each("cases", (cases.outcome(case, 8) for case in made))),
    }
    examples = data.read(settings.T)
    runs = {
        f"{h} head{'s' if h > 1 else ''}": seeds.train(
            replace(settings, N=h),
            examples,
            range(chosen.seeds),
            window=several.WINDOW,
            progress=lambda: progress.advance(bars["training"]),
        )
        for h in heads
    }
    used = {name: getattr(settings, name) for name in ("D", "T", "blocks", "batch", "steps")}
    results["training"] = {**used, "seeds": chosen.seeds, "window": several.WINDOW, "runs": runs}
    return results


def said(found: dict[str, Any]) -> tuple[several.Tables, str]:
    """The tables of the page, and its conclusion."""
    from experiments.heads import page

    return page.tables(found), page.conclusion(found)


def main() -> None:
    """Measures, prints tables, and writes where asked."""
    several.run(parsed(), HERE, PACKAGES, measured, figure.draw, said)


if __name__ == "__main__":
    main()
