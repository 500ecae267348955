"""Functions for page.md: statistics of every initialisation."""

from typing import Any

import numpy as np

from experiments.train import variants  # noqa: F401  the page calls it


def gap_and_deviation(found: dict[str, Any]) -> tuple[float, float]:
    """Points between the best and the worst start, and the largest deviation over seeds."""
    accuracy = [100 * np.array(run["accuracy"]) for run in found["training"]["runs"].values()]
    gap = max(a.mean() for a in accuracy) - min(a.mean() for a in accuracy)
    return float(gap), float(max(a.std(ddof=1) for a in accuracy))


def means(starts: dict[str, Any], name: str) -> dict[str, float]:
    """Initialisation -> mean of the statistic `name` over its draws."""
    return {
        start: float(np.mean([draw[name] for draw in of["noise"]])) for start, of in starts.items()
    }


def least(values: dict[str, float]) -> str:
    """The initialisation with the smallest value."""
    return min(values, key=values.__getitem__)


def most(values: dict[str, float]) -> str:
    """The initialisation with the largest value."""
    return max(values, key=values.__getitem__)


def trained(found: dict[str, Any]) -> str:
    """Why some are trained and the others not, by their formulas."""
    starts, names = found["starts"], list(found["training"]["runs"])
    first: dict[str, str] = {}  # formula of the kernels -> who trains with it
    for name in names:
        first.setdefault(_kernel_formula(starts[name]), name)
    left = [name for name in starts if name not in names]
    same = [
        f"“{name}” as “{first[formula]}”"
        + ("" if _biased(starts[name]) == _biased(starts[first[formula]]) else " but for biases")
        for name in left
        if (formula := _kernel_formula(starts[name])) in first
    ]
    other = [name for name in left if _kernel_formula(starts[name]) not in first]
    sentence = (
        f"{len(names)} of {len(starts)} starts are trained, one of each formula. "
        f"Kernels of the others are drawn as theirs: {', '.join(same)}"
    )
    if other:
        one = len(other) == 1
        sentence += (
            f"; {', '.join(f'“{name}”' for name in other)} {'is' if one else 'are'} left out because "
            f"{'its' if one else 'their'} formula is for keys and values of other widths, which this "
            "model has not"
        )
    return sentence + "."


def _kernel_formula(start: dict[str, Any]) -> str:
    formula: str = start["formula"]
    return formula.split(", biases")[0].split(", no biases")[0]


def _biased(start: dict[str, Any]) -> bool:
    return bool(start["biases"] and start["biases"]["max"])


def verdict(found: dict[str, Any]) -> str:
    """The smallest p-value, among how many, and what a wrong spread would give."""
    tests = [kernel for of in found["starts"].values() for kernel in of["kernels"].values()]
    least = min(kernel["test"]["p"] for kernel in tests)
    seen = max(kernel["test_of_more_spread"]["p"] for kernel in tests)
    return (
        f"smallest p of {len(tests)} two-sample tests {least:.2g}; 2 % more spread would give "
        f"{seen:.0e} or less"
    )
