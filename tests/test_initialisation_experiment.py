"""Starts of the frameworks: the statistics see a wrong spread, and the page says what was found."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from experiments import records
from experiments.initialisation import __main__ as command
from experiments.initialisation import frameworks, measure
from experiments.initialisation.frameworks import STARTS
from experiments.pages import Page
from experiments.train.training import Trainer
from tests.promotion import foreign
from tests.test_train import BOTH, TINY

page = Page("initialisation/page.md")


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    """The committed results."""
    return records.load(command.EXPERIMENT.path)


def test_the_distance_of_two_samples() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.uniform(-1, 1, (3, 37, 41)), rng.uniform(-1, 1, 4001)
    found = measure.apart(a, b)
    known = stats.ks_2samp(a.ravel(), b, method="asymp")
    assert found["distance"] == pytest.approx(known.statistic, rel=1e-12)
    assert found["p"] == pytest.approx(known.pvalue, rel=0.05)
    assert found["p"] > 1e-3
    assert measure.apart(a, 1.1 * b)["p"] < 1e-3
    assert measure.apart(a, rng.normal(0, a.std(), 4001))["p"] < 1e-6


def test_moments() -> None:
    even = np.linspace(-3, 3, 10007)
    found = measure.moments(even)
    assert found["std"] == pytest.approx(3**0.5, rel=1e-3)
    assert found["kurtosis"] == pytest.approx(-1.2, rel=1e-3)
    assert found["max"] == 3


@pytest.mark.everyday(name=["torch, packed", "torch, four Linear"])
@pytest.mark.parametrize("name", STARTS)
def test_fresh_layers_are_ours(name: str) -> None:
    """And a start of one and a half times the spread would be seen."""
    with foreign():
        found = measure.compare(name, D=92, N=4, seeds=1)
        theirs = STARTS[name].theirs(0, 92, 4)
    for kernel, of in found["kernels"].items():
        assert of["test"]["p"] > 1e-6, kernel
        assert of["theirs"]["std"] == pytest.approx(of["ours"]["std"], rel=0.06), kernel
        assert measure.apart(theirs[kernel], 1.5 * theirs[kernel])["p"] < 1e-6, kernel
    linear = name == "torch, four Linear"
    assert bool(found["biases"] and found["biases"]["max"]) == linear
    assert found["noise"][0]["logits"] == pytest.approx(found["expected_logits"], rel=0.25)


@pytest.mark.slow
def test_haiku_has_no_default() -> None:
    assert "w_init" in frameworks.haiku_refuses(14, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", command.TRAINED)
def test_training_begins_with_the_framework_s_layer(name: str) -> None:
    with foreign():
        model = Trainer(replace(TINY, blocks=2), BOTH).model
        command.begin(name)(model, 5)
        for i, block in enumerate(model.blocks):
            drawn = STARTS[name].theirs(5000 + i, TINY.D, TINY.N)
            for projection in ("query", "key", "value", "out"):
                part = getattr(block.attention, projection)
                np.testing.assert_array_equal(part.kernel[...], drawn[f"{projection}.kernel"])
                bias: Any = drawn.get(f"{projection}.bias", 0.0)
                np.testing.assert_array_equal(
                    part.bias[...], np.broadcast_to(bias, part.bias.shape)
                )


def test_the_stored_results_say_what_the_page_says(stored: dict[str, Any]) -> None:
    assert {"torch", "keras", "flax", "equinox", "dm-haiku"} <= stored["versions"].keys()
    assert stored["starts"].keys() == STARTS.keys()
    tests = [k for of in stored["starts"].values() for k in of["kernels"].values()]
    assert min(k["test"]["p"] for k in tests) > 0.01 / len(tests)  # one of all in a hundred runs
    assert max(k["test_of_more_spread"]["p"] for k in tests) < 1e-6
    for name, of in stored["starts"].items():
        logits = np.mean([draw["logits"] for draw in of["noise"]])
        assert logits == pytest.approx(of["expected_logits"], rel=0.1), name


def test_numbers_of_the_page_come_from_the_results(stored: dict[str, Any]) -> None:
    other = copy.deepcopy(stored)
    other["starts"]["keras"]["kernels"]["key.kernel"]["test"]["p"] = 1.25e-7
    assert "1.2e-07" in page.conclusion(other)
    assert page.text(other) != page.text(stored)


def test_every_start_that_is_not_trained_has_a_reason(stored: dict[str, Any]) -> None:
    text = page.text(stored)
    for name in stored["starts"].keys() - stored["training"]["runs"].keys():
        assert f"“{name}” as “" in text or (
            name == "torch, separate" and f"“{name}” is left" in text
        )
