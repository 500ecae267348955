"""The page of this experiment; every number comes from its result file."""

from typing import Any

import numpy as np

from experiments.pages import Rows, fill, markdown
from experiments.train import variants

QUESTION = "Are eight heads of 64 the same as one head of 512?"
COMMAND = "python -m experiments.heads --write"


def conclusion(found: dict[str, Any]) -> str:
    """In one or two sentences."""
    of_eight, script = of_layers(found, 8), kinds(found)
    equal, seeds = script[0]["equal"], script[0]["seeds"]
    return (
        f"No: with the same weights, outputs differ by {percent(of_eight['output'])} and "
        f"gradients by {', '.join(percent(g) for g in of_eight['gradients'])} (Wq, Wk, Wv), "
        f"and after {found['training']['steps']} steps of training "
        f"{variants.extremes(found['training']['runs'])}. The script that prints True does so for {equal} of {seeds} seeds, because its positive "
        "weights saturate the softmax; with centred weights for "
        f"{sum(kind['equal'] for kind in script[1:])} of "
        f"{sum(kind['seeds'] for kind in script[1:])}."
    )


def tables(found: dict[str, Any]) -> dict[str, Rows]:
    """By title."""
    return {
        "The script, for four kinds of matrices": _script_rows(found),
        "The same matrices, split into heads": _layer_rows(found),
        "When they are equal": _case_rows(found),
        "Training": variants.rows("heads", found["training"]["runs"]),
    }


def text(found: dict[str, Any]) -> str:
    """Markdown."""
    layers = [record for seed in found["layers"] for record in seed]
    return fill(
        globals(),
        found=found,
        shown={title: markdown(rows) for title, rows in tables(found).items()},
        sums=max(record["sum_of_logits"] for record in layers),
        error=max(record["float32_error"] for record in layers),
        rounding=max(case["output"] for case in found["cases"] if case["equal"]),
        apart=min(case["output"] for case in found["cases"] if not case["equal"]),
    )


def percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def as_much(found: dict[str, Any]) -> str:
    """Which gradients differ at least as much as outputs do, by their medians."""
    layers = [of_layers(found, h) for h in found["settings"]["heads"] if h > 1]
    said: dict[str, list[str]] = {}
    for i, name in enumerate(("Wq", "Wk", "Wv")):
        most = [of["gradients"][i] >= of["output"] for of in layers]
        words = "at least as much" if all(most) else "more or less" if any(most) else "less"
        said.setdefault(words, []).append(name)
    parts = [f"{words} for {' and '.join(names)}" for words, names in said.items()]
    return f"Beside outputs, gradients differ {', '.join(parts)}, whatever the number of heads."


def kinds(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every kind of matrices: counts and extremes over its seeds."""
    kinds = []
    for kind, seeds in found["script"].items():
        other = [s["difference"] for s in seeds if not s["equal"]] or [0.0]
        kinds.append(
            {
                "kind": kind,
                "seeds": len(seeds),
                "equal": sum(s["equal"] for s in seeds),
                "explained": sum(s["equal"] == (s["same_key"] == 1) for s in seeds),
                "one_hot": sum(s["least_top_weight"] == 1 for s in seeds),
                "dead": sum(s["query_gradient"] == 0 for s in seeds),
                "median": float(np.median(other)),
                "worst": max(other),
                "largest_logit": max(s["largest_logit"] for s in seeds),
                "same_key": float(np.mean([s["same_key"] for s in seeds])),
                "least_top_weight": min(s["least_top_weight"] for s in seeds),
                "query_gradient": float(np.median([s["query_gradient"] for s in seeds])),
            }
        )
    return kinds


def _script_rows(found: dict[str, Any]) -> Rows:
    head = (
        "matrices", "True", "difference, where not: median (largest)", "largest logit", "same key",
        "least top weight", "gradients of Wq (median)",
    )  # fmt: skip
    rows = [
        (
            kind["kind"],
            f"{kind['equal']} of {kind['seeds']}",
            f"{percent(kind['median'])} ({percent(kind['worst'])})",
            f"{kind['largest_logit']:.2g}",
            percent(kind["same_key"]),
            f"{kind['least_top_weight']:.2g}",
            f"{kind['query_gradient']:.1g}",
        )
        for kind in kinds(found)
    ]
    return [head, *rows]


def of_layers(found: dict[str, Any], h: int) -> dict[str, Any]:
    """Medians over draws; ranks: smallest and largest."""
    records = [r for seed in found["layers"] for r in seed if r["heads"] == h]
    medians = {
        name: float(np.median([r[name] for r in records])) for name in ("output", "same_key")
    }
    ranks = {
        name: (min(r[name][0] for r in records), max(r[name][1] for r in records))
        for name in ("logits_rank", "weights_rank")
    }
    norms = np.median([r["gradients"] for r in records], axis=0).tolist()
    return {**medians, **ranks, "gradients": norms, "logits": records[0]["logits"]}


def _layer_rows(found: dict[str, Any]) -> Rows:
    head = (
        "heads", "logits", "output", "gradients of Wq, Wk, Wv", "same key", "rank of logits",
        "rank of weights",
    )  # fmt: skip
    rows = []
    for h in found["settings"]["heads"]:
        of = of_layers(found, h)
        ranks = [
            str(a) if a == b else f"{a} to {b}" for a, b in (of["logits_rank"], of["weights_rank"])
        ]
        rows.append(
            (
                f"{h} of {found['settings']['E'] // h}",
                " × ".join(str(size) for size in of["logits"]),
                percent(of["output"]),
                ", ".join(percent(g) for g in of["gradients"]),
                percent(of["same_key"]),
                *ranks,
            )
        )
    return [head, *rows]


def _case_rows(found: dict[str, Any]) -> Rows:
    rows = [
        (
            case["name"],
            "equal" if case["equal"] else "not equal",
            f"{case['output']:.1e}" if case["output"] else "0",
            f"{case['weights']:.1e}" if case["weights"] else "0",
        )
        for case in found["cases"]
    ]
    return [("case", "outputs", "relative difference", "largest difference of weights"), *rows]
