"""What the experiment found, in words; every number is from the result file."""

from typing import Any

from experiments.dataflow.choices import CHOICES, SHAPES, Choice, Ratio, ratio
from experiments.dataflow.walk import STEPS
from experiments.pages import Tables, fill

QUESTION = "What happens to every tensor in multi-head attention, and what do torch's options cost?"
COMMAND = "python -m experiments.dataflow --write"


def _one(found: dict[str, Any], framework: str, shape: int, choice: Choice) -> Ratio:
    one = ratio(found, framework, SHAPES[shape].name, choice)
    assert one is not None
    return one


def conclusion(found: dict[str, Any]) -> str:
    """One or two sentences."""
    short, long = (_one(found, "torch", i, CHOICES[0]).middle for i in (0, 1))
    ours = [_one(found, "jaxmha", i, CHOICES[0]).middle for i in (0, 1)]
    most = {
        framework: max(
            max(one, 1 / one)
            for i in (0, 1)
            for choice in CHOICES[3:5]
            if (of := ratio(found, framework, SHAPES[i].name, choice)) is not None
            for one in [of.middle]
        )
        for framework in ("torch", "jaxmha")
    }
    return (
        f"Returning the weights takes torch {short:.2f} times as long at {SHAPES[0].name} and "
        f"{long:.2f} times at {SHAPES[1].name} (jaxmha {ours[0]:.2f} and {ours[1]:.2f} times), and "
        "changes its results, as the fast path does; axis order and packing change none and make a "
        f"factor of {most['torch']:.2f} at most (jaxmha {most['jaxmha']:.2f})."
    )


def tables(found: dict[str, Any]) -> Tables:
    """The walk of the document, and what every option costs."""
    nodes = {node["name"]: node for node in found["flow"]["nodes"]}
    walk = [("step of the document", "its shape", "here", "shape", "so?")]
    for step in STEPS:
        shapes = "<br>".join(
            f"`{nodes[name]['axes']}` = {' × '.join(map(str, nodes[name]['shape']))}"
            for name in step.nodes
        )
        here = "<br>".join(f"`{name}`" for name in step.nodes)
        given = f"`{step.shape}`" if step.shape else "–"
        walk.append((step.name, given, here, shapes, step.verdict))
    columns = [(framework, shape.name) for framework in found["seconds"] for shape in SHAPES]
    costs: list[Any] = [("option", "the document", *map(", ".join, columns))]
    for choice in CHOICES:
        cells = [str(ratio(found, *column, choice) or "has none") for column in columns]
        costs.append((choice.name, choice.says, *cells))
    return {"Every tensor": walk, "What the options cost": costs}


def text(found: dict[str, Any]) -> str:
    """The page."""
    return fill(
        globals(),
        found=found,
        off=[_one(found, "torch", i, CHOICES[5]).middle for i in (0, 1)],
    )
