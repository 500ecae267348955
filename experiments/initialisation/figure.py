"""Figures of the results: each says one thing."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.train import variants

SHORT = {"query.kernel": "query", "out.kernel": "output"}


def histograms(found: dict[str, Any]) -> Any:
    """Kernels of every framework and those of jaxmha."""
    starts = found["starts"]
    figure, axes = plt.subplots(
        len(SHORT), len(starts), figsize=(10.4, 3.4), sharex=True, sharey="row"
    )
    widest = max(of["kernels"][kernel]["edge"] for of in starts.values() for kernel in SHORT)
    for row, (line, kernel) in enumerate(zip(axes, SHORT, strict=True)):
        for panel, (name, of) in zip(line, starts.items(), strict=True):
            edge = of["kernels"][kernel]["edge"]
            theirs, ours = of["kernels"][kernel]["histograms"]
            edges = np.linspace(-edge, edge, len(theirs) + 1)
            panel.stairs(theirs, edges, fill=True, color="C0", alpha=0.45)
            panel.stairs(ours, edges, color="C1", linewidth=1.2)
            panel.set(xlim=(-widest, widest), yticks=[])
            panel.spines["left"].set_visible(False)
            if row == 0:
                panel.set_title(name.replace(", ", ",\n"), fontsize=9)
            std = of["kernels"][kernel]["theirs"]["std"]
            panel.set_xlabel(f"std {std:.4f}", fontsize=8)
            panel.tick_params(labelsize=8)
        line[0].set_ylabel(f"{SHORT[kernel]} kernel")
    return figure


def logits(found: dict[str, Any]) -> Any:
    """Logits, weights and outputs of a new layer on inputs of unit variance."""
    starts = found["starts"]
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 2.7), sharey=True)
    titles = {
        "logits": "variance of the logits",
        "entropy": "entropy of the weights / log S",
        "output": "variance of the output",
    }
    for panel, (name, title) in zip(axes, titles.items(), strict=True):
        for row, of in enumerate(starts.values()):
            values = [draw[name] for draw in of["noise"]]
            panel.plot(values, [row] * len(values), "o", color="C0", markersize=4, alpha=0.7)
            if name == "logits":
                panel.plot(of["expected_logits"], row, "|", color="C1", markersize=14)
        panel.set_title(title, fontsize=9)
        panel.grid()
        if name != "entropy":
            panel.set_xlim(left=0)
    axes[0].set_yticks(range(len(starts)), list(starts))
    axes[0].set_ylim(len(starts) - 0.5, -0.5)
    return figure


FIGURES = {"histograms.svg": histograms, "logits.svg": logits, "training.svg": variants.draw}
