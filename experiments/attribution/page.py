"""Functions for page.md: shares of the difference between two layers."""

from typing import Any

from jaxmha.converters.verify.attribution import percent  # noqa: F401  the page calls it

BIASES = ("biases", "dropped bias", "zero bias")


def split(step: dict[str, Any]) -> tuple[float, float]:
    """Shares of all weights, and of what the mask means."""
    shares = {part["name"]: float(part["share"]) for part in step["parts"]}
    weights = sum(x for name, x in shares.items() if name.endswith("weights") or name in BIASES)
    return weights, shares.get("mask polarity", 0.0)
