"""Functions for page.md: time ratios, and a table of the steps of attention."""

from typing import Any

from experiments.dataflow.choices import CHOICES, SHAPES, ratio
from experiments.dataflow.walk import STEPS
from experiments.pages import Rows


def middle(found: dict[str, Any], framework: str, shape: int, choice: int) -> float:
    """The median time ratio of a choice; `shape` and `choice` are indices."""
    one = ratio(found, framework, SHAPES[shape].name, CHOICES[choice])
    assert one is not None
    return one.middle


def factor(found: dict[str, Any], framework: str) -> float:
    """The largest effect of axis order and packing on time, as a factor of at least 1."""
    ratios = [
        one.middle
        for shape in SHAPES
        for choice in CHOICES[3:5]
        if (one := ratio(found, framework, shape.name, choice)) is not None
    ]
    return max(max(one, 1 / one) for one in ratios)


def walk(found: dict[str, Any]) -> Rows:
    """A table of the document's steps and the graph nodes that correspond to them."""
    nodes = {node["name"]: node for node in found["flow"]["nodes"]}

    def shape(name: str) -> str:
        return f"`{nodes[name]['axes']}` = {' × '.join(map(str, nodes[name]['shape']))}"

    rows = [("step of the document", "its shape", "here", "shape", "so?")]
    for step in STEPS:
        here, shapes = ("<br>".join(map(cell, step.nodes)) for cell in ("`{}`".format, shape))
        given = f"`{step.shape}`" if step.shape else "–"
        rows.append((step.name, given, here, shapes, step.verdict))
    return rows
