"""The page of this experiment; every number comes from its result file."""

from typing import Any

import numpy as np

from experiments.pages import Rows, fill, markdown
from experiments.train import variants

QUESTION = "How does every framework start an attention layer, and does it matter?"
COMMAND = "python -m experiments.initialisation --write"


def conclusion(found: dict[str, Any]) -> str:
    """In one or two sentences."""
    variances = {name: _mean(of, "logits") for name, of in found["starts"].items()}
    least, most = (
        min(variances, key=lambda n: variances[n]),
        max(variances, key=lambda n: variances[n]),
    )
    gap, spread = gap_and_spread(found)
    within = "within" if gap <= spread else "beyond"
    return (
        f"Kernels of `init_params` cannot be told from those of the frameworks "
        f"({_verdict(found)}). Schemes differ: logits of a fresh layer have a variance of "
        f"{variances[least]:.2f} ({least}) to {variances[most]:.2f} ({most}), and after "
        f"{found['training']['steps']} steps {variants.extremes(found['training']['runs'])}: {gap:.1f} "
        f"points apart, {within} the spread of seeds ({spread:.1f})."
    )


def gap_and_spread(found: dict[str, Any]) -> tuple[float, float]:
    """Points between the best and the worst start, and the largest deviation over seeds."""
    accuracy = [100 * np.array(run["accuracy"]) for run in found["training"]["runs"].values()]
    gap = max(a.mean() for a in accuracy) - min(a.mean() for a in accuracy)
    return float(gap), float(max(a.std(ddof=1) for a in accuracy))


def tables(found: dict[str, Any]) -> dict[str, Rows]:
    """By title."""
    return {
        "Kernels and biases": _kernel_rows(found),
        "jaxmha and the frameworks": _test_rows(found),
        "What a fresh layer does to noise": _noise_rows(found),
        "Training": variants.rows("start", found["training"]["runs"]),
    }


def text(found: dict[str, Any]) -> str:
    """Markdown."""
    starts = found["starts"]
    entropies = {name: _mean(of, "entropy") for name, of in starts.items()}
    return fill(
        globals(),
        found=found,
        shown={title: markdown(rows) for title, rows in tables(found).items()},
        starts=starts,
        entropies=entropies,
        least=min(entropies, key=lambda name: entropies[name]),
    )


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


def std(of: dict[str, Any], kernel: str) -> float:
    std: float = of["kernels"][kernel]["theirs"]["std"]
    return std


def _mean(of: dict[str, Any], name: str) -> float:
    return float(np.mean([draw[name] for draw in of["noise"]]))


def _verdict(found: dict[str, Any]) -> str:
    """The smallest p-value, among how many, and what a wrong spread would give."""
    tests = [kernel for of in found["starts"].values() for kernel in of["kernels"].values()]
    least = min(kernel["test"]["p"] for kernel in tests)
    seen = max(kernel["test_of_more_spread"]["p"] for kernel in tests)
    return (
        f"smallest p of {len(tests)} two-sample tests {least:.2g}; 2 % more spread would give "
        f"{seen:.0e} or less"
    )


def _kernel_rows(found: dict[str, Any]) -> Rows:
    head = (
        "framework", "query, key and value", "std: query", "key", "value", "output",
        "largest: query", "output", "excess kurtosis", "biases",
    )  # fmt: skip
    rows = []
    for name, of in found["starts"].items():
        kernels = {kernel: values["theirs"] for kernel, values in of["kernels"].items()}
        query, out, biases = kernels["query.kernel"], kernels["out.kernel"], of["biases"]
        rows.append(
            (
                name,
                of["formula"],
                *(f"{values['std']:.4f}" for values in kernels.values()),
                f"{query['max']:.4f}",
                f"{out['max']:.4f}",
                f"{query['kurtosis']:.2f}",
                "none" if biases is None else f"std {biases['std']:.4f}" if biases["max"] else "0",
            )
        )
    return [head, *rows]


def _test_rows(found: dict[str, Any]) -> Rows:
    head = ("framework", "`init_params`", "distance", "p", "p with 2 % more spread")
    rows = []
    for name, of in found["starts"].items():
        worst = min(of["kernels"].values(), key=lambda kernel: float(kernel["test"]["p"]))
        seen = max(kernel["test_of_more_spread"]["p"] for kernel in of["kernels"].values())
        test = worst["test"]
        rows.append(
            (name, of["counterpart"], f"{test['distance']:.5f}", f"{test['p']:.2g}", f"{seen:.0e}")
        )
    return [head, *rows]


def _noise_rows(found: dict[str, Any]) -> Rows:
    head = (
        "framework",
        "variance of logits",
        "by formula",
        "entropy / log S",
        "variance of output",
    )
    rows = [
        (
            name,
            f"{_mean(of, 'logits'):.3f}",
            f"{of['expected_logits']:.3f}",
            f"{_mean(of, 'entropy'):.3f}",
            f"{_mean(of, 'output'):.4f}",
        )
        for name, of in found["starts"].items()
    ]
    return [head, *rows]
