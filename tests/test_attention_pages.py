"""The pages on data flow and on heads follow from the result files."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import records
from experiments.dataflow import walk
from experiments.dataflow.choices import CHOICES, SHAPES, Choice, ratio
from experiments.pages import Page
from experiments.pictures import figure
from jaxmha.converters import describe
from tests.promotion import foreign

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
dataflow, pictures = Page("dataflow/page.md"), Page("pictures/page.md")


def found(name: str) -> dict[str, Any]:
    return records.load(EXPERIMENTS / name / "results.json")


def test_a_ratio_is_of_times_in_one_round() -> None:
    seconds = {"a": [2.0, 20.0, 6.0], "b": [1.0, 10.0, 2.0]}
    record = {"seconds": {"torch": {"x": seconds}}}
    one = ratio(record, "torch", "x", Choice("", "a", "b", ""))
    assert one is not None
    assert (one.low, one.middle, one.high) == (2.0, 2.0, 2.5)
    assert str(one) == "2.00 (2.00 to 2.50)"
    assert ratio(record, "torch", "x", Choice("", "a", "c", "")) is None


def test_costs_follow_the_results() -> None:
    record = found("dataflow")
    text = dataflow.text(record)
    for framework, shapes in record["seconds"].items():
        assert shapes.keys() == {shape.name for shape in SHAPES}
        for shape in SHAPES:
            assert str(ratio(record, framework, shape.name, CHOICES[0])) in text
    slower = copy.deepcopy(record)
    times = slower["seconds"]["torch"][SHAPES[0].name]
    times["weights"] = [7.25 * t for t in times["no weights"]]
    assert "torch 7.25 times as long" in dataflow.conclusion(slower)
    assert "torch 7.25 times as long" not in dataflow.conclusion(record)
    assert "7.25 (7.25 to 7.25)" in dataflow.text(slower)


def test_the_walk_is_that_of_describe() -> None:
    record, flow = found("dataflow"), walk.flow()
    assert {node["name"]: tuple(node["shape"]) for node in record["flow"]["nodes"]} == {
        node.name: node.shape for node in flow.nodes
    }
    named = {name for step in walk.STEPS for name in step.nodes}
    left = {node.name for node in flow.nodes if node.kind != "input"} - named
    assert left == set()
    assert (EXPERIMENTS / "dataflow" / "flow.svg").read_text() == flow.svg()


def test_predictions_are_shares() -> None:
    shares = walk.predicted(*SHAPES[0])
    flow = describe(**walk.SIZES, query_len=SHAPES[0].T, batch=SHAPES[0].B)
    assert shares["flops"] == flow.flops
    rest = flow["scaled_query"].flops / flow.flops
    assert shares["projections"] + shares["pairs"] + rest == pytest.approx(1.0)
    assert shares["fused"] > 1


def test_heads_follow_the_results() -> None:
    record = found("pictures")
    text = pictures.text(record)
    assert len(record["heads"]) * len(record["heads"][0]) == text.count("\n| ") - sum(
        text.count(line) for line in ("\n| what", "\n| layer.head", "\n| all keys")
    ) - len(figure.KINDS)
    other = copy.deepcopy(record)
    other["heads"][3][7]["next"] = 0.9876
    assert figure.best(other, "next") == (3, 7)
    assert "head 7 of layer 3 99% to the next" in pictures.conclusion(other)
    assert "| next token | 3.7 | 98.8% |" in pictures.text(other)
    assert "98.8%" not in text


@pytest.mark.slow
def test_weights_of_the_encoder() -> None:
    from experiments.pictures import run
    from experiments.pictures.__main__ import MODEL

    path = EXPERIMENTS.parent / ".weights" / MODEL
    with foreign():
        rows = run.attended(path, ["Short.", run.SHOWN])
    assert [len(row.tokens) for row in rows] == [4, 16]
    for row in rows:
        T = len(row.tokens)
        assert row.weights.shape == (6, 12, T, T)
        np.testing.assert_allclose(row.weights.sum(-1), 1.0, atol=1e-5)
        assert np.diagonal(row.weights[0, 2], -1).min() > 0.99  # the token before
    assert run.statistics(rows[:1])[0][2].same is None
    assert run.statistics(rows)[0][2].same is not None
    alike = run.uniform(rows)
    assert alike.entropy == pytest.approx((np.log(4) + np.log(16)) / 2)
