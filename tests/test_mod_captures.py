"""Values that score and mask functions capture are read in every call, and the call compiles once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import attention, mods
from tests.drawn import to_jax

X = to_jax(np.random.default_rng(0).standard_normal((2, 6, 4, 4)), "float32")
RATES = jnp.arange(1.0, 5.0)
FACTOR: float = 1.0


def attend(**functions: Any) -> jax.Array:
    found: jax.Array = jaxmha.dot_product_attention(X, X, X, **functions)
    return found


class Scaled:
    """A score function whose factor is an attribute."""

    factor: Any = 1.0

    def __call__(self, score: jax.Array, *_: Any) -> jax.Array:
        scaled: jax.Array = score * self.factor
        return scaled


def test_a_captured_array_that_is_replaced() -> None:
    rates, last = RATES, 3

    def score_mod(score: jax.Array, b: Any, n: Any, i: Any, j: Any) -> jax.Array:
        found: jax.Array = score - rates[n] * (i - j).astype(score.dtype)
        return found

    def mask_mod(b: Any, n: Any, i: Any, j: Any) -> Any:
        return j < last

    made = [str(mods.block_mask(mask_mod, 6, block=1))]
    attend(score_mod=score_mod, mask_mod=mask_mod)
    rates, last = -RATES, 5
    want = attend(
        score_mod=lambda score, b, n, i, j: score + RATES[n] * (i - j).astype(score.dtype),
        mask_mod=lambda b, n, i, j: j < 5,
    )
    np.testing.assert_allclose(attend(score_mod=score_mod, mask_mod=mask_mod), want, atol=1e-6)
    assert str(mods.block_mask(mask_mod, 6, block=1)) not in made


def test_a_global_number_and_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    def score_mod(score: jax.Array, *_: Any) -> jax.Array:
        return score * FACTOR

    mod = Scaled()
    before = attend(score_mod=score_mod)
    np.testing.assert_array_equal(attend(score_mod=mod), before)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)

    def loss(factor: Any) -> jax.Array:
        mod.factor = factor
        return (attend(score_mod=mod) ** 2).sum()

    value, gradient = jax.value_and_grad(loss)(3.0)
    after = attend(score_mod=score_mod)
    assert jnp.abs(after - before).max() > 0.01
    np.testing.assert_allclose(value, (after**2).sum(), rtol=1e-5)
    step = (loss(3.01) - loss(2.99)) / 0.02
    np.testing.assert_allclose(gradient, step, rtol=0.02)
    attend(score_mod=score_mod)


@jax.custom_jvp
def broken(x: jax.Array) -> jax.Array:
    return x * 2


@broken.defjvp
def rule(*_: Any) -> Any:
    raise ValueError


# Score functions with a rule for their derivative.
DERIVED: list[Any] = [
    lambda score, *_: jax.nn.relu(score),
    lambda score, *_: broken(score),
    lambda score, *_: jax.jit(lambda x: jax.nn.softplus(x))(score),
]


@pytest.mark.parametrize("function", DERIVED)
def test_a_derivative_with_a_rule_compiles_once(function: Any) -> None:
    core: Any = attention._dot_product_attention
    attend(score_mod=function)
    before = core._cache_size()
    attend(score_mod=function)
    assert core._cache_size() == before


def test_arrays_of_an_inner_jit_are_compared() -> None:
    def made(table: jax.Array) -> Any:
        scaled = jax.jit(lambda score, n: score * table[n])
        return lambda score, b, n, i, j: scaled(score, n)

    one, other = (attend(score_mod=made(x)) for x in (RATES, -RATES))
    assert jnp.abs(one - other).max() > 0.01
