"""What was found, in words; every number from results.json."""

from typing import Any

from experiments.pages import Tables, fill

QUESTION = "Does a Flax model train the same with this attention, and faster?"
COMMAND = "make train"


def conclusion(found: dict[str, Any]) -> str:
    """One sentence."""
    compared = found["side_by_side"]
    if not compared:
        return "Not compared: --side-by-side takes steps of both attentions."
    steps = len(compared["runs"]["jaxmha"]["loss"])
    ours, theirs = (compared["runs"][name]["seconds_per_step"] for name in ("jaxmha", "flax"))
    return (
        f"The same: losses of {steps} steps equal those of Flax's own attention within "
        f"{compared['difference']:.0e}; a step takes {ours / theirs:.2f} times as long."
    )


def tables(found: dict[str, Any]) -> Tables:
    """Both attentions step by step, and evaluations of the whole training."""
    runs = [("attention", "first loss", "last loss", "ms per step", "s to compile")]
    for name, run in found["side_by_side"]["runs"].items() if found["side_by_side"] else ():
        losses = (f"{run['loss'][0]:.4f}", f"{run['loss'][-1]:.4f}")
        milliseconds = f"{1e3 * run['seconds_per_step']:.0f}"
        runs.append((name, *losses, milliseconds, f"{run['seconds_to_compile']:.1f}"))
    curve, learned = found["curve"], [("step", "held-out loss", "accuracy")]
    columns = (curve["steps"], curve["held_out_loss"], curve["accuracy"])
    for step, loss, accuracy in zip(*columns, strict=True):
        learned.append((str(step), f"{loss:.3f}", f"{accuracy:.1%}"))
    return {"Step by step": runs, "The whole training": learned}


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    return fill(globals(), found=found)
