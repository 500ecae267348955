"""Loss and accuracy of the run; loss of both attentions side by side."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

# A legend under its panel, where no curve can be: curves end where they like.
BELOW: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "fontsize": 8, "ncols": 2,
              "title_fontsize": 8, "frameon": False}  # fmt: skip


def curves(results: dict[str, Any]) -> Any:
    """Loss and accuracy, and both attentions."""
    curve, compared = results["curve"], results["side_by_side"]
    count = 3 if compared else 2
    figure, axes = plt.subplots(1, count, figsize=(4.2 * count, 4.1), layout="constrained")
    loss = np.array(curve["loss"])
    window = min(20, len(loss))
    smooth = np.convolve(loss, np.full(window, 1 / window), "valid")
    axes[0].plot(range(1, len(loss) + 1), loss, color="C0", alpha=0.25, linewidth=0.7)
    axes[0].plot(range(window, len(loss) + 1), smooth, color="C0", label="training")
    axes[0].plot(curve["steps"], curve["held_out_loss"], "ko-", markersize=4, label="held out")
    axes[0].set_ylabel("cross entropy (nats)")
    axes[1].plot(curve["steps"], [100 * x for x in curve["accuracy"]], "ko-", markersize=4)
    always = 100 * results["most_frequent"]
    axes[1].axhline(always, color="C3", linestyle=":", linewidth=1)
    axes[1].text(9, always + 1, "most frequent label", color="C3", fontsize=8)
    axes[1].set_ylim(0, 100)
    axes[1].set_xlim(left=0)
    axes[1].set_ylabel("accuracy on held-out functions (%)")
    if compared:
        for name, style in zip(compared["runs"], ("-", "k--"), strict=True):
            run = compared["runs"][name]
            label = f"{name}: {1e3 * run['seconds_per_step']:.0f} ms per step"
            steps = range(1, len(run["loss"]) + 1)
            axes[2].plot(steps, run["loss"], style, label=label, linewidth=3 if style == "-" else 1)
        axes[2].set_ylabel("training loss, same seed, no dropout")
        title = f"largest relative difference {compared['difference']:.0e}"
        axes[2].legend(title=title, **BELOW)
    axes[0].legend(**BELOW)
    for panel in axes:
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
    settings, versions = results["settings"], results["versions"]
    figure.suptitle(
        f"Which package is this function from? {settings['blocks']} blocks of width "
        f"{settings['D']}, {settings['T']} bytes, attention by {settings['attention']} "
        f"(jax {versions['jax']}, flax {versions['flax']}, CPU)",
        fontsize=10,
    )
    return figure
