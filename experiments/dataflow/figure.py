"""A figure of the time of every option relative to its alternative."""

from typing import Any

import matplotlib.pyplot as plt

from experiments.dataflow import walk
from experiments.dataflow.choices import CHOICES, SHAPES, ratio

COLOURS = {"torch": "C1", "jaxmha": "C0"}
MARKERS = ("o", "s")


def costs(found: dict[str, Any]) -> Any:
    """Time with an option relative to the time without, in torch and jaxmha."""
    points = [(framework, shape) for framework in COLOURS for shape in SHAPES]
    figure, axes = plt.subplots(figsize=(8.2, 4.8))
    axes.axvline(1.0, color="0.5", linewidth=1)
    for place, (framework, shape) in enumerate(points):
        for row, choice in enumerate(CHOICES):
            if (one := ratio(found, framework, shape.name, choice)) is None:
                continue
            y = row + (place - 1.5) * 0.18
            colour, marker = COLOURS[framework], MARKERS[SHAPES.index(shape)]
            axes.plot([one.low, one.high], [y, y], color=colour, linewidth=1.5)
            label = f"{framework}, {shape.name}" if row == 0 else None
            axes.plot(one.middle, y, marker, color=colour, markersize=5, linestyle="", label=label)
    axes.set_yticks(range(len(CHOICES)), [choice.name for choice in CHOICES])
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
    low, high = axes.get_xlim()
    axes.set_xticks([t for t in ticks if low <= t <= high], minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("time of the first / time of the second (quartiles of the rounds)")
    axes.grid(axis="x")
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def flow(_: dict[str, Any]) -> str:
    """The data flow of multi-head attention."""
    return walk.flow().svg()


FIGURES = {"costs.svg": costs, "flow.svg": flow}
