"""Counts for the page of ways to tile."""

from statistics import geometric_mean
from typing import Any


def ratio(found: dict[str, Any], what: str, to: str) -> float:
    """Time of the way that the library chooses relative to another, over the cases of a question."""
    (entry,) = (entry for entry in found["questions"] if entry["what"] == what)
    ways = [case["ways"] for case in entry["cases"]]
    return geometric_mean(way[entry["chosen"]]["median"] / way[to]["median"] for way in ways)
