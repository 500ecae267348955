"""Error of every whole encoder, in Flax and in torch."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(results: dict[str, Any], path: Path) -> None:
    """One row of two points per encoder."""
    rows = results["encoders"]
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for name, marker in (("torch", "x"), ("flax", "o")):
        errors = [row[name] for row in rows]
        axes.scatter(errors, range(len(rows)), marker=marker, s=40, label=name, alpha=0.8)
    axes.set_yticks(range(len(rows)), [row["model"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0)
    axes.set_xlabel("RMS error against torch in float64 (rounding floors of the output)")
    versions = results["versions"]
    axes.set_title(
        "Whole encoders on a padded batch, float32, same weights "
        f"(jax {versions['jax']}, torch {versions['torch']})",
        fontsize=10,
    )
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
