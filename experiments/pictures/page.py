"""Functions for page.md: shares of attention, by layer."""

from typing import Any

from experiments.pictures.figure import KINDS, best  # noqa: F401  the page calls them


def of_layers(found: dict[str, Any], field: str) -> list[float]:
    """For every layer, the mean over its heads of the statistic `field`."""
    return [sum(head[field] for head in layer) / len(layer) for layer in found["heads"]]
