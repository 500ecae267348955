"""The page of settings and calls; every number from results.json."""

from typing import Any

from experiments.benchmarks.statistics import mean
from experiments.pages import Rows, Tables, fill

QUESTION = "Which flags of XLA and settings of the allocator help on a CPU, and how long is a call?"
COMMAND = "python -m experiments.environment --write"
NONE = "none"


def conclusion(found: dict[str, Any]) -> str:
    """Mean of the best setting, and its extremes."""
    results = found["results"]
    ratios = {
        name: [x["seconds"] / results[NONE][case]["seconds"] for case, x in by_case.items()]
        for name, by_case in results.items()
        if name != NONE
    }
    best = min(ratios, key=lambda name: mean(ratios[name]))
    low, high = min(ratios[best]), max(ratios[best])
    call = found["calls"]["dot_product_attention"]
    return (
        f"The setting that helps most, {best}, takes {mean(ratios[best]):.2f} of the time on average "
        f"({low:.2f} to {high:.2f}). A call on the smallest arrays takes {call['eager']:.0f} "
        f"microseconds eager, {call['under jit']:.0f} under jit"
    )


def tables(found: dict[str, Any]) -> Tables:
    """Time and error of every setting relative to none, by case; microseconds by function."""
    ways = found["calls"]
    rows = [(f"`{name}`", *(f"{x:.0f}" for x in of.values())) for name, of in ways.items()]
    return {
        "Settings": settings(found),
        "Calls": [("function", *next(iter(ways.values()))), *rows],
    }


def settings(found: dict[str, Any]) -> Rows:
    """Of every setting time and error relative to none, by case.

    >>> one, two = {"x": {"seconds": 2.0, "error": 1.0}}, {"x": {"seconds": 1.0, "error": 3.0}}
    >>> settings = {"none": {}, "fast": {"A": "1"}}
    >>> from experiments.environment import page
    >>> page.settings({"settings": settings, "results": {"none": one, "fast": two}})
    [('setting', '`x`'), ('fast (`A=1`)', '0.50 / 3.00')]
    """
    none = found["results"][NONE]
    rows: list[tuple[str, ...]] = [("setting", *(f"`{case}`" for case in none))]
    for name, by_case in found["results"].items():
        if name != NONE:
            shown = " ".join(f"{key}={value}" for key, value in found["settings"][name].items())
            ratios = [[x[key] / none[case][key] for key in x] for case, x in by_case.items()]
            cells = (" / ".join(f"{x:.2f}" for x in both) for both in ratios)
            rows.append((f"{name} (`{shown}`)", *cells))
    return rows


def text(found: dict[str, Any]) -> str:
    """Two tables."""
    return fill(globals(), found=found)
