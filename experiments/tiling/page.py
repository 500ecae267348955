"""Functions for page.md: times of the library's tiling relative to others."""

from statistics import geometric_mean
from typing import Any


def ratio(found: dict[str, Any], what: str, to: str) -> float:
    """Mean time of the library's tiling relative to the tiling `to`, over all cases."""
    (entry,) = (entry for entry in found["questions"] if entry["what"] == what)
    ways = [case["ways"] for case in entry["cases"]]
    return geometric_mean(way[entry["chosen"]]["median"] / way[to]["median"] for way in ways)
