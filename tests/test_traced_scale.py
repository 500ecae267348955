"""A scale that is an array, such as a learned temperature, against the specification."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask
from tests import cases, conformance, tolerance
from tests.cases import CASES, SMALL, Case
from tests.drawn import to_jax

pytestmark = pytest.mark.usefixtures("every_size")
by_implementation = pytest.mark.parametrize("implementation", conformance.PLAIN)
SCALE = 0.37


def functional(case: Case, implementation: str, dtype: str) -> Any:
    """The functional of a case, of arrays with gradients and of the others; a scale may be one."""
    parts = conformance.coefficients(replace(case, scale=SCALE), dtype)
    run = conformance.call(case, implementation, return_lse=True)

    def of(inside: dict[str, Any], others: dict[str, Any]) -> Any:
        found = run(inside | others)
        return conformance.weighted(parts, *found), found

    return jax.jit(jax.grad(of, has_aux=True))


def gradient_of_scale(case: Case, dtype: str) -> float:
    """By central differences of the specification."""
    arrays = cases.arrays(case, dtype)
    parts = conformance.coefficients(replace(case, scale=SCALE), dtype)

    def at(scale: float) -> float:
        found = conformance.expected(replace(case, scale=scale), arrays)
        pairs = zip(parts, (found.out, found.lse), strict=True)
        return sum(float((part * np.where(part == 0, 0.0, x)).sum()) for part, x in pairs)

    return (at(SCALE + tolerance.STEP) - at(SCALE - tolerance.STEP)) / (2 * tolerance.STEP)


def check(case: Case, implementation: str, dtype: str) -> None:
    """Output, lse and every gradient of one compiled program."""
    if conformance.declines(replace(case, scale=None), implementation, dtype):
        return
    case, wide = replace(case, scale=None), "float64" if dtype == "float64" else "float32"
    arrays = cases.arrays(case, dtype)
    inside, others = conformance.split(arrays)
    scale = to_jax(SCALE, wide)
    found, (out, lse) = functional(case, implementation, dtype)(inside | {"scale": scale}, others)
    want = conformance.expected(replace(case, scale=SCALE), arrays)
    assert out.dtype == arrays["query"].dtype
    assert found["scale"].dtype == lse.dtype == wide
    tolerance.assert_close(out, want.out, "output")
    tolerance.assert_close(lse, want.lse, "lse")
    # A sum over all queries, whose terms may cancel.
    terms = np.abs(np.asarray(found["query"], np.float64) * np.asarray(arrays["query"], np.float64))
    floors = tolerance.FLOORS[wide] * float(np.finfo(wide).eps) * terms.sum() / SCALE
    missed = abs(float(found["scale"]) - gradient_of_scale(case, dtype))
    assert missed <= floors + tolerance.GRADIENTS * max(1.0, terms.sum())
    with jax.enable_x64(True):
        exact = {name: x.astype(np.float64) for name, x in inside.items()}
        static = functional(replace(case, scale=SCALE), "reference", dtype)
        gradients, _ = static(exact, others)
    for name, gradient in gradients.items():
        tolerance.assert_gradients(found[name], np.asarray(gradient), f"gradient of {name}")


@pytest.mark.everyday(case=("empty_nan_lengths", "dropout", "everything"))
@pytest.mark.slow_variants("dropout-blocked", "*few_queries*", "empty_nan*", "*reference")
@by_implementation
@pytest.mark.parametrize("case", [*CASES, SMALL])
@pytest.mark.usefixtures("x64")
def test_gradients(implementation: str, case: Case) -> None:
    check(case, implementation, "float64")


@pytest.mark.everyday(case=["everything"], dtype=["bfloat16"])
@pytest.mark.slow_variants("*few_queries*", "*reference", "*blocked")
@by_implementation
@pytest.mark.parametrize("case", [*CASES, SMALL])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_of_rounded_heads(implementation: str, case: Case, dtype: str) -> None:
    check(case, implementation, dtype)


# Masks that leave rows no key: their queries may hold anything.
EMPTIED: dict[str, Any] = {
    "query lengths": {"query_seq_lengths": np.array([3, 0])},
    "no keys": {"key_value_seq_lengths": np.array([0, 4])},
    "mask": {"mask": np.arange(5)[:, None] % 2 == [0] * 7},
    "bias": {"bias": np.where(np.arange(5)[:, None] % 2 == [0] * 7, -np.inf, 0.3).astype("f")},
    "padding": {"mask": Mask.padding(query=np.arange(10).reshape(2, 5) % 3 > 0)},
    "segments": {
        "segment_ids": (np.array([[0, 1, 2, 3, 3]] * 2), np.array([[1] * 3 + [3] * 4] * 2))
    },
    "offset": {"mask": Mask.causal(np.array([-2, -4]))},
    "window": {"local_window_size": (1, 0), "key_value_seq_lengths": np.array([2, 7])},
}


@pytest.mark.everyday(name=["bias", "segments"])
@pytest.mark.slow_variants("*few_queries*", "*reference", "segments*")
@by_implementation
@pytest.mark.parametrize("name", EMPTIED)
def test_queries_that_attend_nothing(implementation: str, name: str) -> None:
    """NaN of theirs reaches neither the gradient of the scale nor another one."""
    arrays = cases.arrays(Case("emptied"))
    heads = arrays["query"], arrays["key"], arrays["value"]

    def loss(scale: Any, *heads: Any) -> Any:
        out, lse = jaxmha.dot_product_attention(
            *heads, scale=scale, return_lse=True, implementation=implementation, **EMPTIED[name]
        )
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0.0).sum(), lse

    run = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))
    want, lse = run(jnp.float32(SCALE), *heads)
    empty = np.moveaxis(np.asarray(lse) == -np.inf, 1, 2)
    assert empty.any()
    assert not empty.all()
    spoiled = np.where(empty[..., None], np.float32(np.nan), heads[0])
    found, _ = run(jnp.float32(SCALE), spoiled, *heads[1:])
    for x, y in zip(found, want, strict=True):
        assert np.isfinite(y).all()
        tolerance.assert_same(x, y)


@pytest.mark.everyday(implementation=["blocked"])
@pytest.mark.slow_variants("*few_queries*")
@pytest.mark.parametrize("implementation", conformance.PLAIN)
def test_a_scale_for_each_member(implementation: str) -> None:
    """Mapped, and differentiated in the map."""
    arrays = cases.arrays(Case("members"))

    def loss(scale: Any) -> Any:
        run = functools.partial(jaxmha.dot_product_attention, implementation=implementation)
        return (run(**arrays, scale=scale, is_causal=True) ** 2).sum()

    scales = jnp.asarray([0.0, -0.4, 1.1])
    run = jax.value_and_grad(loss)
    found = jax.jit(jax.vmap(run))(scales)
    want = [*map(jax.jit(run), scales)]
    for i, parts in enumerate(zip(*want, strict=True)):
        np.testing.assert_allclose(found[i], np.stack(parts), rtol=2e-5, atol=2e-5)
