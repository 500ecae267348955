"""What was found, in words; every number from results.json."""

from typing import Any

from experiments.benchmarks.report import table
from experiments.benchmarks.statistics import mean
from experiments.pages import fill

QUESTION = (
    "Do whole migrated encoders compute what torch computes, and can they be trained further?"
)
COMMAND = "python -m experiments.encoders .weights --write"


def conclusion(found: dict[str, Any]) -> str:
    """Two sentences."""
    models = found["encoders"]
    same = sum(model["verified"] for model in models)
    ratios = [model["flax"] / model["torch"] for model in models]
    tuned = ", ".join(f"{run['optimiser']} {run['weights']:.0e}" for run in found["fine_tuning"])
    answer = "Yes" if same == len(models) else "No"
    return (
        f"{answer}: {same} of {len(models)} files verified bit by bit, with an error against float64 "
        f"{mean(ratios):.2f} times torch's on average and {max(ratios):.2f} times at most. After "
        f"three steps of training weights differ from torch's by this much: {tuned}."
    )


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    rows = [
        [
            model["model"],
            *(str(model[name]) for name in ("tensors", "parameters", "layers", "heads")),
            "0 ULP" if model["verified"] else "changed",
            f"{model['flax']:.1f}",
            f"{model['torch']:.1f}",
            f"{1 - model['cosine']:.0e}",
        ]
        for model in found["encoders"]
    ]
    head = [
        "model",
        "tensors",
        "parameters",
        "layers",
        "heads",
        "weights",
        "Flax",
        "torch",
        "1 - cos",
    ]
    tuned = [
        [run["optimiser"], f"{run['moved']:.3f}", f"{run['weights']:.1e}", f"{run['outputs']:.1e}"]
        for run in found["fine_tuning"]
    ]
    return fill(globals(), head=head, rows=rows, tuned=tuned)
