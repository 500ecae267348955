"""Forward error of every framework on every block."""

from typing import Any

import matplotlib.pyplot as plt


def errors(found: dict[str, Any]) -> Any:
    """One column of points per block, one colour per framework."""
    blocks, versions = found["blocks"], found["versions"]
    figure, axes = plt.subplots(figsize=(11, 4.2), layout="constrained")
    for name, marker in zip(blocks[0]["errors"], "oxs+D", strict=True):
        values = [block["errors"][name] for block in blocks]
        size = 46 if name == "jaxmha" else 22
        axes.scatter(range(len(blocks)), values, s=size, marker=marker, label=name, alpha=0.8)
    axes.set_xticks(range(len(blocks)), [b["block"] for b in blocks], rotation=90, fontsize=6)
    axes.set_ylim(0, 1.25 * max(max(b["errors"].values()) for b in blocks))  # room for the legend
    axes.set_ylabel("RMS error against float64\n(rounding floors of the output)")
    axes.set_title(
        "Published attention blocks in five implementations, float32 on a padded batch "
        f"(jax {versions['jax']}, torch {versions['torch']})",
        fontsize=10,
    )
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=5, fontsize=8, loc="upper center")
    return figure
