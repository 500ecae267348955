"""Functions for page.md: time and error under every environment setting."""

from statistics import geometric_mean
from typing import Any


def relative(found: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Setting -> time and error of every case, relative to no setting.

    >>> one, two = {"x": {"seconds": 2.0, "error": 1.0}}, {"x": {"seconds": 1.0, "error": 3.0}}
    >>> relative({"results": {"none": one, "fast": two}})
    {'fast': [(0.5, 3.0)]}
    """
    none, *names = found["results"]
    return {
        name: [
            (case["seconds"] / plain["seconds"], case["error"] / plain["error"])
            for case, plain in zip(
                found["results"][name].values(), found["results"][none].values(), strict=True
            )
        ]
        for name in names
    }


def best(found: dict[str, Any]) -> tuple[str, list[float]]:
    """The setting with the smallest mean time, and its times relative to no setting."""
    times = {name: [time for time, _ in cases] for name, cases in relative(found).items()}
    return min(times.items(), key=lambda item: geometric_mean(item[1]))
