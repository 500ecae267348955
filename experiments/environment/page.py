"""The page of settings and calls; every number from results.json."""

from typing import Any

from experiments.benchmarks.statistics import mean
from experiments.environment import __main__ as settings
from experiments.environment import calls
from experiments.pages import fill
from experiments.tables import markdown

QUESTION = "Which flags of XLA and settings of the allocator help on a CPU, and how long is a call?"
COMMAND = "python -m experiments.environment --write"


def conclusion(found: dict[str, Any]) -> str:
    """Mean of the best setting, and its extremes."""
    results = found["results"]
    none = results[settings.NONE]
    ratios = {
        name: [x["seconds"] / none[case]["seconds"] for case, x in by_case.items()]
        for name, by_case in results.items()
        if name != settings.NONE
    }
    best = min(ratios, key=lambda name: mean(ratios[name]))
    shown = mean(ratios[best]), min(ratios[best]), max(ratios[best])
    eager = found["calls"]["dot_product_attention"]
    return (
        "The setting that helps most, {}, takes {:.2f} of the time on average "
        "({:.2f} to {:.2f}). A call on the smallest arrays takes {:.0f} microseconds eager, {:.0f} under jit"
    ).format(best, *shown, eager["eager"], eager["under jit"])


def text(found: dict[str, Any]) -> str:
    """Two tables."""
    return fill(globals(), found=found)
