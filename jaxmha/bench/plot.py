"""Bars of the times of one case."""

from pathlib import Path
from typing import Any


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws milliseconds of every peer, fastest first, with quartiles. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sorted((x for x in found["rows"] if "seconds" in x), key=lambda x: -x["seconds"])
    figure = Figure(figsize=(8, 1.4 + 0.35 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    times = [1e3 * row["seconds"] for row in rows]
    axes.barh(
        [row["peer"] + " (chosen)" * row["chosen"] for row in rows],
        times,
        xerr=[time * row["spread"] / 2 for time, row in zip(times, rows, strict=True)],
        color=["C1" if row["chosen"] else "C0" for row in rows],
    )
    for number, row in enumerate(rows):
        axes.text(
            0, number, f" {times[number]:.3g} ms, {row['share']:.0%} of the limit", va="center"
        )
    axes.set_xlabel("milliseconds (median, quartiles)")
    axes.set_title(f"{found['name']}\n{found['device']}", fontsize=9)
    figure.savefig(path, dpi=120)
