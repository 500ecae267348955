"""One training from several seeds: weights and batches differ, the program is one."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from experiments import frame
from experiments.train import data
from experiments.train.data import Examples
from experiments.train.model import Settings
from experiments.train.training import Trainer

WINDOW = 10  # steps of which losses are means
# Small enough that several seeds of several variants take a minute on two cores.
SMALL = Settings(steps=200, dropout=0.0, T=64, blocks=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "--steps": frame.number(SMALL.steps, "of training", least=WINDOW),
    "--seeds": frame.number(5, "of training, for a spread", least=2),
}


def check(chosen: Namespace) -> None:
    """Raises ValueError where the steps are no whole number of windows."""
    if chosen.steps % WINDOW:
        raise ValueError(f"--steps must be a multiple of {WINDOW}, got {chosen.steps}")


def compare(
    chosen: Namespace,
    variants: Mapping[str, dict[str, Any]],
    progress: Callable[[], None],
    begin: Callable[[str], Callable[[Any, int], None]] = lambda name: lambda model, seed: None,
) -> dict[str, Any]:
    """Trains variants of `SMALL`: name -> the settings that differ; all else is the same.

    Returns:
      The settings that all have, seeds and window; `runs`: name -> what `train` returns.
    """
    settings = replace(SMALL, steps=chosen.steps)
    examples, count = data.read(settings.T), range(chosen.seeds)
    runs = {
        name: train(
            replace(settings, **other), examples, count, begin=begin(name), progress=progress
        )
        for name, other in variants.items()
    }
    different = {name for other in variants.values() for name in other}
    names = {"D", "N", "T", "blocks", "batch", "steps"} - different
    used = {name: x for name, x in asdict(settings).items() if name in names}
    return {**used, "seeds": chosen.seeds, "window": WINDOW, "runs": runs}


def train(
    settings: Settings,
    examples: tuple[Examples, Examples],
    seeds: Sequence[int],
    *,
    window: int = WINDOW,
    begin: Callable[[Any, int], None] = lambda model, seed: None,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[Any]]:
    """Trains `settings` from each of `seeds`.

    Args:
      window: steps of which training losses are means.
      begin: may change a seed's model in place before the first step.
      progress: hears of every step.

    Returns:
      `loss` by seed and window; `held_out_loss` and `accuracy` by seed, after the last step.
    """
    found: dict[str, list[Any]] = {"loss": [], "held_out_loss": [], "accuracy": []}
    for seed in seeds:
        trainer = Trainer(replace(settings, seed=seed), examples)
        begin(trainer.model, seed)
        for _ in range(settings.steps):
            trainer.step()
            progress()
        trainer.evaluate()
        losses = np.array(trainer.curve.loss).reshape(-1, window).mean(1)
        found["loss"].append(np.round(losses, 4).tolist())
        found["held_out_loss"] += np.round(trainer.curve.held_out_loss, 4).tolist()
        found["accuracy"] += np.round(trainer.curve.accuracy, 4).tolist()
    return found
