"""Figures of the results: each says one thing."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from experiments.train import variants

LEAST = 1e-8  # where 0 is drawn on logarithmic axes


def blocks(found: dict[str, Any]) -> Any:
    """The terms q_c k_c on the diagonal, split into as many blocks as heads."""
    E, heads = found["settings"]["E"], found["settings"]["heads"]
    figure, axes = plt.subplots(1, len(heads), figsize=(8.4, 2.4), sharey=True)
    for panel, h in zip(axes, heads, strict=True):
        H = E // h
        for n in range(h):
            corner, colour = (n * H, n * H), f"C{n % 2}"
            panel.add_patch(Rectangle(corner, H, H, color=colour, alpha=0.3, linewidth=0))
            panel.plot([n * H, n * H + H], [n * H, n * H + H], color=colour, linewidth=2.5)
        panel.set(xlim=(0, E), ylim=(E, 0), aspect="equal", xticks=[0, E], yticks=[0, E])
        title = f"{h} softmaxes\nof {H} terms each" if h > 1 else f"1 softmax\nof {H} terms"
        panel.set_title(title, fontsize=9)
        panel.spines[["top", "right"]].set_visible(True)
    axes[0].set_ylabel("component of the query")
    axes[len(heads) // 2].set_xlabel("component of the key")
    return figure


def sums(found: dict[str, Any]) -> Any:
    """Products of eight heads add up to those of one head; weights do not."""
    picture = found["pictures"]
    products, weights = (np.array(picture[name]) for name in ("products", "weights"))
    one_product, one_weights = (np.array(picture[f"one_{n}"]) for n in ("product", "weights"))
    most = float(max(weights.max(), one_weights.max()))
    # Name, what heads have, what they have together and its name, what one head has; colours, limits.
    rows = (
        ("products q·k", products, products.sum(0), "sum", one_product, "PuOr", None),
        ("weights", weights, weights.mean(0), "mean", one_weights, "viridis", (0.0, most)),
    )
    h = len(products)
    figure, axes = plt.subplots(
        2, h + 2, figsize=(9.6, 2.7), gridspec_kw={"width_ratios": [1] * h + [1.4, 1.4]}
    )
    for line, (name, parts, whole, how, one, colours, limits) in zip(axes, rows, strict=True):
        titles = [*(f"head {n + 1}" for n in range(h)), f"{how} of heads", "one head"]
        for place, (panel, part) in enumerate(zip(line, [*parts, whole, one], strict=True)):
            widest = float(np.abs(parts if place < h else one).max())
            low, high = limits or (-widest, widest)
            image = panel.imshow(part, cmap=colours, vmin=low, vmax=high)
            panel.set(xticks=[], yticks=[])
            panel.set_title(titles[place], fontsize=8)
        line[0].set_ylabel(name, fontsize=9)
        bar = figure.colorbar(image, ax=list(line), pad=0.01, aspect=12)
        if limits:
            bar.set_ticks([0, most], labels=["0", f"{most:.2g}"])
        else:  # heads have a scale of their own: a part of the sum is smaller than the sum
            bar.set_ticks([-widest, 0, widest], labels=["−", "0", "+"])
    return figure


def script(found: dict[str, Any]) -> Any:
    """Difference of eight heads from one over seeds, for four kinds of matrices."""
    figure, panel = plt.subplots(figsize=(8, 2.9))
    kinds = list(found["script"])
    for row, kind in enumerate(kinds):
        seeds = found["script"][kind]
        for equal, colour in ((True, "C1"), (False, "C0")):
            values = [max(s["difference"], LEAST) for s in seeds if s["equal"] == equal]
            if not values:
                continue
            offsets = np.linspace(-0.28, 0.28, len(values))
            panel.plot(values, row + offsets, ".", color=colour, markersize=5, alpha=0.8)
            if equal:
                panel.annotate(
                    f"{len(values)} of {len(seeds)} seeds print True",
                    (LEAST, row), xytext=(8, 0), textcoords="offset points", va="center",
                    color=colour, fontsize=9,
                )  # fmt: skip
    panel.set_xscale("log")
    panel.set_xlim(LEAST / 2, 4)
    ticks = [LEAST, *(10.0**k for k in range(-6, 1, 2))]
    panel.set_xticks(ticks, ["0", *(f"$10^{{{k}}}$" for k in range(-6, 1, 2))])
    panel.set_yticks(range(len(kinds)), kinds)
    panel.set_ylim(len(kinds) - 0.5, -0.5)
    panel.set_xlabel("difference of the outputs, relative to those of one head")
    panel.grid(axis="x")
    return figure


def ranks(found: dict[str, Any]) -> Any:
    """Singular values of logits and of attention weights, by number of heads."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    spectra, E = found["spectra"], found["settings"]["E"]
    for panel, name in zip(axes, ("logits", "weights"), strict=True):
        for i, (h, values) in enumerate(spectra[name].items()):
            above = [max(v, 1e-18) for v in values]
            label = f"{h} head{'s' if int(h) > 1 else ''} of {E // int(h)}"
            panel.plot(range(1, len(above) + 1), above, color=f"C{i}", label=label)
        panel.set_yscale("log")
        panel.set_ylim(1e-18, 3)
        panel.set_title(f"{name} of one head", fontsize=9)
        panel.set_xlabel("index")
        panel.grid()
    axes[0].set_ylabel("singular value, relative to the largest")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure


def gradients(found: dict[str, Any]) -> Any:
    """Differences of output and gradients from one head."""
    figure, axes = plt.subplots(1, 4, figsize=(8.4, 2.5), sharey=True)
    names = ("output", "gradients of Wq", "gradients of Wk", "gradients of Wv")
    heads = [h for h in found["settings"]["heads"] if h > 1]
    most = max(v for seed in found["layers"] for r in seed for v in (r["output"], *r["gradients"]))
    for place, (panel, name) in enumerate(zip(axes, names, strict=True)):
        for i, h in enumerate(heads):
            records = [r for seed in found["layers"] for r in seed if r["heads"] == h]
            values = [r["output"] if place == 0 else r["gradients"][place - 1] for r in records]
            panel.plot([i] * len(values), [100 * v for v in values], ".", color="C0", alpha=0.6)
        panel.set_xticks(range(len(heads)), heads)
        panel.set_xlim(-0.5, len(heads) - 0.5)
        panel.set_ylim(0, 110 * most)
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("heads")
        panel.grid(axis="y")
    axes[0].set_ylabel("difference from one head (%)")
    return figure


FIGURES = {
    **{f"{draw.__name__}.svg": draw for draw in (blocks, sums, script, ranks, gradients)},
    "training.svg": variants.draw,
}
