"""The difference in parts, as a waterfall; and what is left of it after every repair."""

from typing import Any

import matplotlib.pyplot as plt

SHOWN = 5e-4  # parts below this share are no longer bars


def waterfall(found: dict[str, Any]) -> Any:
    """Parts of the difference between the two layers, by cause."""
    step = found["steps"][0]
    parts = sorted(step["parts"], key=lambda part: abs(part["share"]) < SHOWN)
    rows = [(part["name"], part["share"]) for part in parts]
    figure, axes = plt.subplots(figsize=(7, 0.34 * len(rows) + 1.2))
    start = 0.0
    for place, (_, share) in enumerate(rows):
        axes.barh(place, 100 * share, left=100 * start, color="C0" if share >= 0 else "C1")
        start += share
        text = f"{100 * share:.0f} %" if abs(share) >= SHOWN * 10 else f"{100 * share:.1g} %"
        axes.text(100 * max(start, start - share) + 1, place, text, va="center")
    axes.barh(len(rows), 100 * start, color="C2")
    axes.text(100 * start + 1, len(rows), f"RMS {step['total']:.2f}", va="center")
    axes.set_yticks(range(len(rows) + 1), [*(name for name, _ in rows), "all together"])
    axes.invert_yaxis()
    axes.set_xlim(min(0, 100 * min(share for _, share in rows)), 116)
    axes.set_xlabel("% of the difference")
    return figure


def repairs(found: dict[str, Any]) -> Any:
    """Difference between the two layers after every repair."""
    steps = found["steps"]
    figure, axes = plt.subplots(figsize=(7, 0.42 * len(steps) + 1.2))
    for place, step in enumerate(steps):
        axes.plot(step["total"], place, "o", color="C0")
        axes.text(step["total"] * 1.5, place, f"{step['total']:.2g}", va="center")
    floor = steps[-1]["floor"]
    axes.axvline(floor, color="C1", linestyle="--")
    axes.text(floor * 1.2, -0.62, "rounding of the output alone", color="C1", va="center")
    axes.set_xscale("log")
    axes.set_xlim(floor / 3, 30)
    axes.set_yticks(range(len(steps)), [step["name"] for step in steps])
    axes.set_ylim(len(steps) - 0.5, -0.9)
    axes.set_xlabel("RMS difference")
    axes.grid(axis="x")
    return figure


FIGURES = {"waterfall.svg": waterfall, "repairs.svg": repairs}
