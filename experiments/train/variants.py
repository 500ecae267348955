"""Variants of one training, each over the same seeds, compared with the first of them."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.pages import Rows
from jaxmha.introspect.svg import INK

Runs = dict[str, dict[str, Any]]  # by variant: what `seeds.train` returns


def draw(found: dict[str, Any]) -> Any:
    """Learning curves of every variant and of the first; held-out accuracy at the end."""
    runs, window = found["training"]["runs"], found["training"]["window"]
    first, *others = runs
    ratios = [1] * len(others) + [1.2]
    figure, axes = plt.subplots(
        1, len(runs), figsize=(10, 2.7), gridspec_kw={"width_ratios": ratios}
    )
    losses = np.concatenate([np.ravel(run["loss"]) for run in runs.values()])
    for panel, other in zip(axes, others, strict=False):
        for name, colour in ((first, "C1"), (other, "C0")):
            loss = np.array(runs[name]["loss"])
            steps = (np.arange(loss.shape[1]) + 0.5) * window
            panel.fill_between(steps, loss.min(0), loss.max(0), color=colour, alpha=0.25, lw=0)
            panel.plot(steps, loss.mean(0), color=colour, label=name)
        panel.set_ylim(losses.min() * 0.95, losses.max() * 1.03)
        panel.set_xlabel("step")
        panel.grid()
        panel.legend(fontsize=8)
        if panel is not axes[0]:
            panel.tick_params(labelleft=False)
    axes[0].set_ylabel("training loss (nats)")
    last = axes[-1]
    for row, (name, run) in enumerate(runs.items()):
        accuracy = [100 * a for a in run["accuracy"]]
        colour = "C1" if name == first else "C0"
        last.plot(accuracy, [row] * len(accuracy), ".", color=colour, alpha=0.7)
        last.plot([np.mean(accuracy)] * 2, [row - 0.3, row + 0.3], color=INK, lw=1)
    last.set_yticks(range(len(runs)), list(runs))
    last.set_ylim(len(runs) - 0.5, -0.5)
    last.set_xlabel("held-out accuracy (%)")
    last.grid(axis="x")
    return figure


def rows(kind: str, runs: Runs) -> Rows:
    """Means and standard deviations over seeds; seeds that do better than with the first."""
    first = next(iter(runs))
    alone = np.array(runs[first]["accuracy"])
    head = (kind, "training loss", "held-out loss", "held-out accuracy (%)", f"better than {first}")
    body = []
    for name, run in runs.items():
        accuracy = np.array(run["accuracy"])
        better = "" if name == first else f"{(accuracy > alone).sum()} of {len(alone)}"
        losses = [
            _with_deviation([x[-1] for x in run["loss"]], 3),
            _with_deviation(run["held_out_loss"], 3),
        ]
        body.append((name, *losses, _with_deviation(100 * accuracy, 1), better))
    return [head, *body]


def furthest(runs: Runs) -> str:
    """The variant whose accuracy is furthest from the first's, and those that all seeds agree about."""
    first, *others = runs
    gains = {
        name: 100 * (np.array(runs[name]["accuracy"]) - np.array(runs[first]["accuracy"]))
        for name in others
    }
    name = max(gains, key=lambda other: abs(float(gains[other].mean())))
    gain = gains[name]
    higher = int((gain > 0).sum())
    deviation = 100 * np.std(runs[first]["accuracy"], ddof=1)
    agreed = [
        f"{other} ({one.mean():+.1f})"
        for other, one in gains.items()
        if int((one > 0).sum()) in (0, len(one))
    ]
    return (
        f"Furthest from {first} in accuracy is {name}: {gain.mean():+.1f} ± "
        f"{gain.std(ddof=1):.1f} points seed by seed, higher for {higher} of {len(gain)} seeds; "
        f"seeds of {first} alone spread by {deviation:.1f} points. "
        f"All seeds agree on the sign for {', '.join(agreed) or 'no variant'}."
    )


def extremes(runs: Runs) -> str:
    """Accuracy of the variants with the lowest and the highest mean."""
    means = {name: float(np.mean(run["accuracy"])) for name, run in runs.items()}
    ends = [pick(means, key=lambda name: means[name]) for pick in (min, max)]
    low, high = (f"{_with_deviation(100 * np.array(runs[e]['accuracy']), 1)} % ({e})" for e in ends)
    return f"held-out accuracy is from {low} to {high}"


def about(training: dict[str, Any]) -> str:
    """A description of the training, from the settings in a result file."""
    blocks = f"{training['blocks']} block{'s' if training['blocks'] > 1 else ''}"
    return (
        f"Mean and standard deviation over {training['seeds']} seeds. A transformer of {blocks} of "
        f"width {training['D']} names the package that a function of the Python standard library is "
        f"from, by its first {training['T']} bytes; {training['steps']} steps of "
        f"{training['batch']} functions."
    )


def _with_deviation(values: Any, digits: int) -> str:
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"
