"""What was found, in words; every number from results.json."""

from typing import Any

from experiments.benchmarks.report import table
from experiments.pages import fill

QUESTION = "Does a Flax model train the same with this attention, and faster?"
COMMAND = "make train"


def conclusion(found: dict[str, Any]) -> str:
    """One sentence."""
    beside = found["side_by_side"]
    steps = len(beside["runs"]["jaxmha"]["loss"])
    ours, theirs = (beside["runs"][name]["seconds_per_step"] for name in ("jaxmha", "flax"))
    return (
        f"The same: losses of {steps} steps equal those of Flax's own attention within "
        f"{beside['difference']:.0e}; a step takes {ours / theirs:.2f} times as long."
    )


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    settings, curve, examples = found["settings"], found["curve"], found["examples"]
    runs = [
        [
            name,
            f"{run['loss'][0]:.4f}",
            f"{run['loss'][-1]:.4f}",
            f"{1e3 * run['seconds_per_step']:.0f}",
            f"{run['seconds_to_compile']:.1f}",
        ]
        for name, run in found["side_by_side"]["runs"].items()
    ]
    learned = [
        [str(step), f"{loss:.3f}", f"{accuracy:.1%}"]
        for step, loss, accuracy in zip(
            curve["steps"], curve["held_out_loss"], curve["accuracy"], strict=True
        )
    ]
    return fill(
        globals(), runs=runs, settings=settings, examples=examples, found=found, learned=learned
    )
