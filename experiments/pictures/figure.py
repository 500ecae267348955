"""Two figures: where every head looks, and the most extreme heads on one sentence."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from jaxmha.introspect.heatmaps import plot_attention

# Field of `HeadStatistics` -> the kind of head for which it is large.
KINDS = {
    "previous": "previous token",
    "next": "next token",
    "same": "same token",
    "named": "[CLS], [SEP]",
}
TITLES = {
    "previous": "previous token",
    "next": "next token",
    "itself": "the token itself",
    "same": "same token elsewhere",
    "named": "[CLS] and [SEP]",
    "entropy": "entropy (nats)",
}


def best(found: dict[str, Any], field: str) -> tuple[int, int]:
    """Layer and head with the largest share."""
    shares = np.array([[head[field] for head in layer] for layer in found["heads"]])
    last = shares.size - 1 - int(shares[::-1, ::-1].argmax())
    return last // shares.shape[1], last % shares.shape[1]


def overview(found: dict[str, Any]) -> Any:
    """Share of attention on adjacent tokens, [CLS] and [SEP], and equal tokens, by layer and head."""
    L, N = len(found["heads"]), len(found["heads"][0])
    figure, grid = plt.subplots(2, 3, figsize=(8.6, 4.6), sharex=True, sharey=True)
    for axes, (field, title) in zip(grid.flat, TITLES.items(), strict=True):
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


def extremes(found: dict[str, Any]) -> Any:
    """Heat maps of the most pronounced heads on one sentence."""
    titles = []
    for kind, name in KINDS.items():
        layer, head = best(found, kind)
        titles.append(f"layer {layer}, head {head}: {name}")
    shown = found["shown"]
    return plot_attention(np.array(shown["maps"]), shown["tokens"], titles=titles, columns=2)


FIGURES = {"overview.svg": overview, "heads.svg": extremes}
