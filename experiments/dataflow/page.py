"""Counts for the page of the data flow."""

from typing import Any

from experiments.dataflow.choices import CHOICES, SHAPES, ratio
from experiments.dataflow.walk import STEPS
from experiments.pages import Rows


def middle(found: dict[str, Any], framework: str, shape: int, choice: int) -> float:
    """The median ratio of a choice."""
    one = ratio(found, framework, SHAPES[shape].name, CHOICES[choice])
    assert one is not None
    return one.middle


def factor(found: dict[str, Any], framework: str) -> float:
    """The most that axis order and packing change, in either direction."""
    ratios = [
        one.middle
        for shape in SHAPES
        for choice in CHOICES[3:5]
        if (one := ratio(found, framework, shape.name, choice)) is not None
    ]
    return max(max(one, 1 / one) for one in ratios)


def walk(found: dict[str, Any]) -> Rows:
    """The steps of the document, and the nodes of the graph that they mean."""
    nodes = {node["name"]: node for node in found["flow"]["nodes"]}

    def shape(name: str) -> str:
        return f"`{nodes[name]['axes']}` = {' × '.join(map(str, nodes[name]['shape']))}"

    rows = [("step of the document", "its shape", "here", "shape", "so?")]
    for step in STEPS:
        here, shapes = ("<br>".join(map(cell, step.nodes)) for cell in ("`{}`".format, shape))
        given = f"`{step.shape}`" if step.shape else "–"
        rows.append((step.name, given, here, shapes, step.verdict))
    return rows
