"""The page of this experiment, with every number from its results."""

from typing import Any

from experiments.pages import fill
from jaxmha.converters.verify.attribution import percent

QUESTION = "Why do two hand-written layers of PyTorch and TensorFlow give different results?"
COMMAND = "python -m experiments.attribution --write"


def conclusion(found: dict[str, Any]) -> str:
    """In one or two sentences."""
    first, last = found["steps"][0], found["steps"][-1]
    weights, mask = _split(first)
    return (
        f"Weights that were never shared ({percent(weights)} of the difference) and a mask that means "
        f"the opposite ({percent(mask)}); with both repaired {last['relative']:.0e} of the output is "
        "left, which is rounding"
    )


def text(found: dict[str, Any]) -> str:
    """Markdown."""
    steps, first = found["steps"], found["steps"][0]
    weights, mask = _split(first)
    errors = "\n".join(f"| {name} | `{what}` |" for name, what in found["errors"].items())
    parts = "\n".join(
        f"| {part['name']} | {percent(part['share'])} | {part['size']:.2g} | {part['sentence']} |"
        for part in first["parts"]
    )
    states = "\n".join(
        f"| {step['name']} | {step['total']:.1e} | {step['away'][0]:.1e} | {step['away'][1]:.1e} | "
        f"{step['parts'][0]['name']} |"
        for step in steps
    )
    printed = "\n".join(
        f"| {row['weights']} | {row['mask']} | {row['sum']:.3g} | {row['largest']:.2g} |"
        for row in found["printed"]
    )
    idle = "; ".join(first["idle"])
    rounding = next(p["rms"] for p in first["parts"] if p["name"] == "rounding") / first["total"]
    floors = steps[-1]["total"] / steps[-1]["floor"]
    return fill(
        globals(),
        found=found,
        weights=weights,
        mask=mask,
        rounding=rounding,
        errors=errors,
        states=states,
        floors=floors,
        parts=parts,
        idle=idle,
        printed=printed,
        builds="all differ"
        if found["builds"] == 3
        else f"have {found['builds']} different weights",
    )


def _split(step: dict[str, Any]) -> tuple[float, float]:
    """Shares of all weights, and of what the mask means."""
    weights = sum(
        part["share"]
        for part in step["parts"]
        if part["name"].endswith("weights")
        or part["name"] in ("biases", "dropped bias", "zero bias")
    )
    return weights, _share(step, "mask polarity")


def _share(step: dict[str, Any], name: str) -> float:
    return float(sum(part["share"] for part in step["parts"] if part["name"] == name))
