"""Forward error of every framework on every block."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(results: dict[str, Any], path: Path) -> None:
    """One column of points per block, one colour per framework."""
    blocks = results["blocks"]
    figure, axes = plt.subplots(figsize=(11, 4.2), layout="constrained")
    for name, marker in zip(blocks[0]["errors"], "oxs+D", strict=True):
        errors = [block["errors"][name] for block in blocks]
        size = 46 if name == "jaxmha" else 22
        axes.scatter(range(len(blocks)), errors, s=size, marker=marker, label=name, alpha=0.8)
    axes.set_xticks(range(len(blocks)), [b["block"] for b in blocks], rotation=90, fontsize=6)
    highest = max(max(block["errors"].values()) for block in blocks)
    axes.set_ylim(0, 1.25 * highest)  # room for the legend
    axes.set_ylabel("RMS error against float64\n(rounding floors of the output)")
    axes.set_title(
        f"Published attention blocks in five implementations, float32 on a padded batch "
        f"(jax {results['versions']['jax']}, torch {results['versions']['torch']})",
        fontsize=10,
    )
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=5, fontsize=8, loc="upper center")
    figure.savefig(path, dpi=110)
    plt.close(figure)
