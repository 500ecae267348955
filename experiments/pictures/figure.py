"""Two figures: where every head looks, and the most extreme heads on one sentence."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.figures import style

KINDS = {
    "previous": "previous token",
    "next": "next token",
    "itself": "the token itself",
    "same": "same token elsewhere",
    "named": "[CLS] and [SEP]",
    "entropy": "entropy (nats)",
}


def overview(found: dict[str, Any]) -> Any:
    """A map of layers and heads for every statistic."""
    L, N = len(found["heads"]), len(found["heads"][0])
    with style():
        figure, grid = plt.subplots(2, 3, figsize=(8.6, 4.6), sharex=True, sharey=True)
        for axes, (field, title) in zip(grid.flat, KINDS.items(), strict=True):
            values = np.array([[head[field] for head in layer] for layer in found["heads"]])
            share = field != "entropy"
            top = 1.0 if share else found["uniform"]["entropy"]
            image = axes.imshow(values, cmap="cividis", vmin=0.0, vmax=top, aspect="auto")
            axes.set_title(title)
            axes.set_xticks(range(0, N, 2))
            axes.set_yticks(range(L))
            bar = figure.colorbar(image, ax=axes)
            if share:
                bar.set_ticks([0.0, 0.5, 1.0], labels=["0 %", "50 %", "100 %"])
        for axes in grid[:, 0]:
            axes.set_ylabel("layer")
        for axes in grid[-1]:
            axes.set_xlabel("head")
    return figure
