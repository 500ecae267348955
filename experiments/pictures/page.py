"""Counts for the page of heads."""

from typing import Any

from experiments.pictures.figure import KINDS, best  # noqa: F401  the page calls them


def of_layers(found: dict[str, Any], field: str) -> list[float]:
    """The mean of a share over the heads of every layer."""
    return [sum(head[field] for head in layer) / len(layer) for layer in found["heads"]]
