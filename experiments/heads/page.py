"""Functions for page.md: statistics of layers with one head and with several."""

from typing import Any

import numpy as np

from experiments.pages import percent  # noqa: F401  the page calls it
from experiments.train import variants  # noqa: F401  the page calls it


def as_much(found: dict[str, Any]) -> str:
    """Which gradients differ at least as much as outputs do, by their medians."""
    layers = [of_layers(found, h) for h in found["settings"]["heads"] if h > 1]
    names_by_phrase: dict[str, list[str]] = {}
    for i, name in enumerate(("Wq", "Wk", "Wv")):
        most = [of["gradients"][i] >= of["output"] for of in layers]
        phrase = "at least as much" if all(most) else "more or less" if any(most) else "less"
        names_by_phrase.setdefault(phrase, []).append(name)
    parts = [f"{phrase} for {' and '.join(names)}" for phrase, names in names_by_phrase.items()]
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


def of_layers(found: dict[str, Any], h: int) -> dict[str, Any]:
    """Medians over draws; ranks: smallest and largest."""
    records = [r for seed in found["layers"] for r in seed if r["heads"] == h]
    medians = {x: float(np.median([r[x] for r in records])) for x in ("output", "same_key")}
    ranks = {
        name: (min(r[name][0] for r in records), max(r[name][1] for r in records))
        for name in ("logits_rank", "weights_rank")
    }
    norms = np.median([r["gradients"] for r in records], axis=0).tolist()
    return {**medians, **ranks, "gradients": norms, "logits": records[0]["logits"]}
