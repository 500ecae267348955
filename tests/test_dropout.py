"""Dropout: when it acts, what it drops, and that a key means the same thing everywhere."""

from itertools import combinations
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import dropout
from tests import cases, conformance, tolerance
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("every_size")

CASE = Case("drops", B=2, T=5, S=7, K=3, G=2, bias="BNTS")
ARRAYS = cases.arrays(CASE)
RATE = 0.3
by_implementation = pytest.mark.parametrize(
    "implementation",
    [name for name in conformance.PLAIN if name not in conformance.WITHOUT_WEIGHTS],
)


def attend(implementation: str, kind: Any = "after_dropout", **options: Any) -> Any:
    options = {"dropout_rate": RATE, **options}
    return jaxmha.dot_product_attention(
        **ARRAYS, return_weights=kind, implementation=implementation, **options
    )


@pytest.mark.slow
@by_implementation
def test_acts_only_with_a_key(implementation: str) -> None:
    jax.tree.map(
        tolerance.assert_same, attend(implementation), attend(implementation, dropout_rate=0.0)
    )
    still = attend(implementation, dropout_rate=0.0, dropout_key=jax.random.key(1))
    chex.assert_trees_all_equal(still, attend(implementation), strict=True)
    moved = attend(implementation, dropout_key=jax.random.key(1))
    assert not np.array_equal(moved[0], still[0])


@pytest.mark.slow
@by_implementation
def test_after_is_what_is_kept_of_before(implementation: str) -> None:
    key = jax.random.key(1)
    out, before = attend(implementation, "before_dropout", dropout_key=key)
    same, after = attend(implementation, "after_dropout", dropout_key=key)
    tolerance.assert_same(out, same)
    tolerance.assert_close(before.sum(-1), np.ones(before.shape[:-1]))
    kept = np.asarray(after) != 0
    assert 0 < kept.mean() < 1
    want = np.where(kept, np.asarray(before, np.float64) / (1 - RATE), 0.0)
    tolerance.assert_close(after, want)
    value = np.repeat(ARRAYS["value"], CASE.G, axis=2).astype(np.float64)
    tolerance.assert_close(out, np.einsum("bnts,bsnh->btnh", want, value))
    draws = dropout.keep(key, RATE, (2, CASE.N, CASE.T, CASE.S))
    tolerance.assert_same(kept, draws)


@pytest.mark.slow
@by_implementation
def test_a_key_means_one_draw(implementation: str) -> None:
    """Eager, jit and vmap; typed and raw keys."""
    run = jax.jit(lambda key: attend(implementation, dropout_key=key)[1])
    keys = [jax.random.key(seed) for seed in range(3)]
    eager = [attend(implementation, dropout_key=key)[1] for key in keys]
    together = jax.vmap(run)(jnp.stack(keys))
    for row, (key, weights) in enumerate(zip(keys, eager, strict=True)):
        tolerance.assert_same(np.asarray(run(key)) == 0, np.asarray(weights) == 0)
        tolerance.assert_same(np.asarray(together[row]) == 0, np.asarray(weights) == 0)
        raw = attend(implementation, dropout_key=jax.random.key_data(key))[1]
        tolerance.assert_same(np.asarray(raw) == 0, np.asarray(weights) == 0)
    for one, other in combinations(eager, 2):
        assert not np.array_equal(one, other)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_fraction_kept(rate: float) -> None:
    shape = (3, 5, 31, 37)
    kept = np.asarray(dropout.keep(jax.random.key(3), rate, shape))
    assert kept.dtype == bool
    # Five standard deviations, of the whole and of every marginal.
    for axes in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        count = np.prod([shape[axis] for axis in axes])
        sigma = np.sqrt(rate * (1 - rate) / count)
        assert np.abs(kept.mean(axes) - (1 - rate)).max() < 5 * sigma
    # Neighbours are independent.
    for axis in range(4):
        ahead, behind = (np.delete(kept, end, axis) for end in (0, -1))
        correlation = np.corrcoef(ahead.ravel(), behind.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(ahead.size)


def test_rates_at_the_ends() -> None:
    key, shape = jax.random.key(0), (1, 1, 2, 3)
    assert np.asarray(dropout.keep(key, 0.0, shape)).all()
    assert not np.asarray(dropout.keep(key, 1 - 1e-9, shape)).any()
    assert not np.asarray(dropout.keep(key, float(np.nextafter(1.0, 0.0)), shape)).any()


def test_an_entry_does_not_depend_on_the_sizes_after_it() -> None:
    """A longer S, T of one head, N of one batch row, or B draws the same for entries there are."""
    key = jax.random.key(2)
    sizes = (3, 2, 5, 7), (3, 2, 5, 4), (2, 2, 5, 7)
    whole, shorter, fewer = jax.jit(lambda key: [dropout.keep(key, 0.5, x) for x in sizes])(key)
    tolerance.assert_same(shorter, np.asarray(whole)[..., :4])
    tolerance.assert_same(fewer, np.asarray(whole)[:2])


@pytest.mark.slow
@by_implementation
@pytest.mark.parametrize("shared", [("B", "N"), ("T",), ("S",)])
def test_shared_draws(implementation: str, shared: tuple[str, ...]) -> None:
    _, weights = attend(
        implementation, dropout_key=jax.random.key(4), dropout_broadcast=shared, dropout_rate=0.5
    )
    kept = np.asarray(weights) != 0
    for axis, letter in enumerate("BNTS"):
        first = np.take(kept, [0], axis)
        assert (kept == first).all() == (letter in shared), letter


@pytest.mark.slow_variants("*few_queries*", "unsafe*")
@by_implementation
@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_other_generators(implementation: str, generator: str) -> None:
    """Keys of generators whose vectorised draws repeat still draw entry by entry."""
    key = jax.random.key(5, impl=generator)
    kept = np.asarray(attend(implementation, dropout_key=key, dropout_rate=0.5)[1]) != 0
    tolerance.assert_same(kept, dropout.keep(key, 0.5, kept.shape))
    rows = kept.reshape(-1, kept.shape[-1])
    assert len(np.unique(rows, axis=0)) > len(rows) / 2
    other = attend(implementation, dropout_key=jax.random.key(6, impl=generator), dropout_rate=0.5)
    assert not np.array_equal(kept, np.asarray(other[1]) != 0)
