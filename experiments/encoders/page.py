"""What was found, in words; every number from results.json."""

from typing import Any

from experiments.benchmarks.statistics import mean
from experiments.pages import Tables, fill

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
    return (
        f"{'Yes' if same == len(models) else 'No'}: {same} of {len(models)} files verified bit by "
        f"bit, with an error against float64 {mean(ratios):.2f} times torch's on average and "
        f"{max(ratios):.2f} times at most. After three steps of training weights differ from "
        f"torch's by this much: {tuned}."
    )


def tables(found: dict[str, Any]) -> Tables:
    """Of every encoder and of every optimiser."""
    sizes = ("tensors", "parameters", "layers", "heads")
    models = [["model", *sizes, "weights", "Flax", "torch", "1 - cos"]]
    for model in found["encoders"]:
        weights = "0 ULP" if model["verified"] else "changed"
        errors = (f"{model['flax']:.1f}", f"{model['torch']:.1f}", f"{1 - model['cosine']:.0e}")
        models.append([model["model"], *(str(model[name]) for name in sizes), weights, *errors])
    tuned = [("optimiser", "weights moved by", "then differ by", "outputs differ by")]
    for run in found["fine_tuning"]:
        differ = (f"{run['weights']:.1e}", f"{run['outputs']:.1e}")
        tuned.append((run["optimiser"], f"{run['moved']:.3f}", *differ))
    return {"Encoders": models, "Trained further": tuned}


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    return fill(globals(), found=found)
