"""The page of this experiment, with every number from its results."""

from typing import Any

from experiments.pages import Tables, fill
from jaxmha.converters.verify.attribution import percent

QUESTION = "Why do two hand-written layers of PyTorch and TensorFlow give different results?"
COMMAND = "python -m experiments.attribution --write"


def conclusion(found: dict[str, Any]) -> str:
    """In one or two sentences."""
    first, last = found["steps"][0], found["steps"][-1]
    weights, mask = split(first)
    return (
        f"Weights that were never shared ({percent(weights)} of the difference) and a mask that means "
        f"the opposite ({percent(mask)}); with both repaired {last['relative']:.0e} of the output is "
        "left, which is rounding"
    )


def tables(found: dict[str, Any]) -> Tables:
    """By title."""
    steps = found["steps"]
    meant = ("PyTorch from what is meant", "TensorFlow from what is meant")
    return {
        "As written": [("", "ends with"), *((n, f"`{x}`") for n, x in found["errors"].items())],
        "Repaired step by step": [
            ("repaired", "RMS difference", *meant, "mostly from"),
            *(
                (s["name"], *(f"{x:.1e}" for x in (s["total"], *s["away"])), s["parts"][0]["name"])
                for s in steps
            ),
        ],
        "Parts of the difference": [
            ("part", "share", "size (RMS)", "what"),
            *(
                (part["name"], percent(part["share"]), f"{part['size']:.2g}", part["sentence"])
                for part in steps[0]["parts"]
            ),
        ],
        "What the text prints": [
            ("weights", "mask", "sum", "largest"),
            *(
                (row["weights"], row["mask"], f"{row['sum']:.3g}", f"{row['largest']:.2g}")
                for row in found["printed"]
            ),
        ],
    }


def text(found: dict[str, Any]) -> str:
    """Markdown."""
    first, last = found["steps"][0], found["steps"][-1]
    weights, mask = split(first)
    rounding = next(p["rms"] for p in first["parts"] if p["name"] == "rounding") / first["total"]
    return fill(
        globals(),
        found=found,
        first=first,
        last=last,
        weights=weights,
        mask=mask,
        rounding=rounding,
    )


def split(step: dict[str, Any]) -> tuple[float, float]:
    """Shares of all weights, and of what the mask means."""
    weights = sum(
        part["share"]
        for part in step["parts"]
        if part["name"].endswith("weights")
        or part["name"] in ("biases", "dropped bias", "zero bias")
    )
    mask = sum(part["share"] for part in step["parts"] if part["name"] == "mask polarity")
    return weights, float(mask)
