"""The experiment on rounding: what it measures by, and that its stored results are complete."""

from typing import Any

import numpy as np
import pytest

from experiments import frame
from experiments.numerics import inputs, measure, page, torch_runs
from experiments.numerics.inputs import DTYPES, E, H, N, T
from experiments.report import registry
from jaxmha import Semantics
from jaxmha.converters.verify import oracle

(RESULTS,) = (registry.found(e) for e in registry.EXPERIMENTS if e.name == "numerics")


@pytest.mark.parametrize("dtype", DTYPES)
def test_projections_are_exact(dtype: str) -> None:
    """Permutations and powers of two: heads hold what features hold, and nothing is rounded."""
    weights, x = inputs.params(dtype, 2.0**10), inputs.features(dtype, 17)
    stages = oracle.run(weights, Semantics(), x, x, x)
    for heads, factor in ((stages.query, 2.0**10), (stages.key, 1.0), (stages.value, 1.0)):
        assert heads.shape == (1, 17, N, H)
        rounded = heads.astype(DTYPES[dtype]).astype(np.float64)
        np.testing.assert_array_equal(rounded, heads)
        exact = np.sort(factor * x.astype(np.float64), axis=-1)
        np.testing.assert_array_equal(np.sort(heads.reshape(1, 17, E), axis=-1), exact)
    flat = [np.argmax(p.kernel.reshape(E, E), axis=0).tolist() for p in weights[:3]]
    assert flat[0] != flat[1] != flat[2] != flat[0]


@pytest.mark.parametrize("dtype", measure.NARROW)
def test_an_exact_output_is_one_floor_away(dtype: str) -> None:
    expected = inputs.exact(inputs.params(dtype), inputs.features(dtype, 128))
    assert expected.shape == (T, E)
    rounded = expected.astype(DTYPES[dtype])
    error = inputs.floors(rounded, expected, dtype)
    assert error == pytest.approx(1, rel=0.15)
    off = inputs.floors(rounded * rounded.dtype.type(1.25), expected, dtype)
    assert off is not None
    assert off > 20
    assert inputs.floors(np.where(expected > 0, np.inf, rounded), expected, dtype) is None


def test_outputs_of_rows_without_keys() -> None:
    weights, x = inputs.params("float32"), inputs.features("float32", 128)
    exact = inputs.exact(weights, x)
    value = np.asarray(weights.value.kernel).reshape(E, E)
    mean = np.broadcast_to((x[0] @ value).mean(0), exact.shape)
    outcomes = {"NaN": exact * np.nan, "zero": exact * 0, "mean": mean, "unmasked": exact}
    for name, out in outcomes.items():
        assert measure.outcome(weights, x, out) == name
    assert measure.outcome(weights, x, exact + 1) == "neither"


def test_curves_that_lie_on_each_other_are_one() -> None:
    from experiments.numerics import figure

    rows = {name: {"lengths": {"float16": errors}} for name, errors in {
        "a": [1.0, 2.0], "b": [5.0, 2.0], "c": [1.05, "not run"],
    }.items()}  # fmt: skip
    assert list(figure.groups(rows, "lengths")) == ["b", "a = c"]


def test_torch_is_measured_as_it_is_stored() -> None:
    """The cheapest of the runs again: the path that returns no weights."""
    assert RESULTS is not None
    run, stored = torch_runs.RUNS["torch sdpa"], RESULTS["implementations"]["torch sdpa"]
    for dtype in measure.NARROW:
        assert measure.fully_masked(run, dtype) == stored["blocked"][dtype] == "zero"
        assert measure.constants(run, dtype) == stored["constants"][dtype]
        again = measure.floors(run, dtype, S=16)
        assert again == pytest.approx(stored["lengths"][dtype][0], rel=0.5)
    assert measure.padding(run) == stored["padding"] == "NaN"


def test_no_implementation_is_missing() -> None:
    assert RESULTS is not None
    rows: dict[str, Any] = RESULTS["implementations"]
    kinds = ["torch", "jaxmha", "jax.nn", "flax linen", "flax nnx", "keras on jax"]
    kinds += ["keras on tensorflow"]
    assert all(any(name.startswith(kind) for name in rows) for kind in kinds)
    for row in rows.values():
        for dtype in measure.NARROW:
            assert len(row["lengths"][dtype]) == len(RESULTS["settings"]["lengths"])
            errors = page.finite(row["lengths"][dtype])
            assert all(0 < error < 100 for error in errors)
    own = {name: row for name, row in rows.items() if name.startswith("jaxmha")}
    assert all(row["largest"] == "no bound" for row in own.values())
    assert all(row["padding"] == "nothing" for row in own.values())
    assert all(set(row["blocked"].values()) == {"zero"} for row in own.values())
    assert all(row["float64"] < 1e-14 for row in own.values())
    assert all(page.worst(row) < 1.5 for row in own.values())


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["torch", "tensorflow", "jax"])
def test_measures_again(worker: str) -> None:
    """A whole process of it: answers are as stored."""
    from experiments.numerics.__main__ import work

    assert RESULTS is not None
    for name, row in frame.alone(work, worker)["found"].items():
        stored = RESULTS["implementations"][name]
        for key in ("blocked", "constants", "below", "padding", "largest", "uncompiled"):
            assert row[key] == stored[key], (name, key)
