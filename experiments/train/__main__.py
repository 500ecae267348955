"""Does a Flax model train the same with this attention, and faster?

A small transformer (flax.nnx, optax) reads the first bytes of functions of the Python standard
library and says which package each is from. Their lengths differ, so that padding masks matter.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import frame
from experiments.train import data, figure
from experiments.train.data import Examples
from experiments.train.model import ATTENTION, Settings
from experiments.train.training import Trainer, side_by_side, train

BUILD = Path("build") / "train"
EXAMPLES = """examples:
  python -m experiments.train                              train, with a checkpoint now and then
  python -m experiments.train --resume                     go on where the last one ended
  python -m experiments.train --attention flax --steps 200 --checkpoints /tmp/flax
  python -m experiments.train --side-by-side 50            both attentions step by step first
"""
DEFAULT = Settings()


def measure(chosen: Namespace) -> dict[str, Any]:
    """The training itself, after both attentions side by side where that is asked for."""
    if chosen.dropout >= 1:
        raise ValueError(f"--dropout must be below 1, got {chosen.dropout}")
    settings = Settings(chosen.attention, chosen.seed, chosen.steps, chosen.dropout)
    start, examples = time.perf_counter(), data.read(settings.T)
    totals = {"side by side": chosen.side_by_side} if chosen.side_by_side else {}
    with frame.bars(**totals, training=settings.steps) as tick:
        compared = compare(settings, examples, chosen.side_by_side, tick)
        trainer = train(
            settings,
            examples,
            chosen.checkpoints,
            resume=chosen.resume,
            progress=lambda trainer: tick("training", evaluated(trainer)),
        )
    return {
        "seconds": round(trainer.earlier + time.perf_counter() - start),
        "settings": asdict(settings),
        "examples": {"trained on": len(examples[0].labels), "held out": len(examples[1].labels)},
        # Accuracy of always saying the same.
        "most_frequent": float(np.bincount(examples[1].labels).max() / len(examples[1].labels)),
        "curve": asdict(trainer.curve),
        "side_by_side": compared,
    }


def evaluated(trainer: Trainer) -> str:
    """Of the last evaluation, right after it."""
    curve, done = trainer.curve, len(trainer.curve.loss)
    if curve.steps[-1:] != [done]:
        return ""
    held_out = f"held out: {curve.held_out_loss[-1]:.3f}, {curve.accuracy[-1]:.1%} right"
    return f"step {done}: loss {curve.loss[-1]:.3f}  {held_out}"


def compare(
    settings: Settings, examples: tuple[Examples, Examples], steps: int, tick: Callable[[str], None]
) -> dict[str, Any] | None:
    """Both attentions from the same seed, without dropout; None where no steps are asked for."""
    if not steps:
        return None
    both = [replace(settings, attention=kind, dropout=0.0) for kind in ATTENTION]
    found = side_by_side(both, examples, steps, lambda: tick("side by side"))
    runs = dict(zip(ATTENTION, found, strict=True))
    pairs = zip(*(run["loss"] for run in found), strict=True)
    return {"runs": runs, "difference": max(abs(a - b) / b for a, b in pairs)}


EXPERIMENT = frame.of(
    measure,
    EXAMPLES,
    options={
        "--attention": {"choices": ATTENTION, "default": "jaxmha", "help": "default jaxmha"},
        "--steps": frame.number(DEFAULT.steps, "of the optimiser", least=2),
        "--seed": frame.number(DEFAULT.seed, "of weights, batches and dropout"),
        "--dropout": frame.number(DEFAULT.dropout, "rate of attention weights and of residuals"),
        "--side-by-side": frame.number(
            0, "first so many steps of both attentions in turns, without dropout"
        ),
        "--checkpoints": {"type": Path, "default": BUILD, "help": f"folder, default {BUILD}"},
        "--resume": {"action": "store_true", "help": "from the last checkpoint there"},
    },
    figures={"curves.png": figure.curves},
    packages=("optax", "orbax-checkpoint"),
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
