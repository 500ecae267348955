"""Gradients of the modules are those of flax, for every constructor argument."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmha
from jaxmha.flax import linen as ours_linen
from tests.flax.common import N, Row, inputs, normal, pairs, randomise, theirs
from tests.flax.rows import LINEN, NNX, agree_in_gradients, both, widths


@pytest.mark.everyday(row=["normalize_qk"])
@pytest.mark.parametrize("row", LINEN)
def test_gradients_of_linen(row: Row) -> None:
    flax, ours = (m.MultiHeadDotProductAttention(**row.settings) for m in (nn, ours_linen))
    x = inputs(row, widths(row))
    variables = randomise(theirs(jax.eval_shape, flax.init, jax.random.key(0), *x))
    mask = pairs(x[-1].shape[1])

    def loss(module: Any) -> Any:
        def of(variables: Any, x: Any) -> Any:
            out = module.apply(variables, *x, mask=mask).astype(jnp.float32)
            return jnp.vdot(out, normal("cotangent", out.shape))

        return jax.jit(jax.grad(of, (0, 1)))

    agree_in_gradients(theirs(loss(flax), variables, x), loss(ours)(variables, x), row)


@pytest.mark.slow
@pytest.mark.parametrize("row", NNX)
def test_gradients_of_nnx(row: Row) -> None:
    flax, ours, x = both(row)
    mask = np.repeat(pairs(x[-1].shape[1]), row.settings["num_heads"] // N, axis=1)

    def loss(module: Any, x: Any) -> Any:
        out = module(*x, mask=mask).astype(jnp.float32)
        return jnp.vdot(out, normal("cotangent", out.shape))

    step = nnx.jit(nnx.grad(loss, argnums=(0, 1)))
    agree_in_gradients(theirs(step, flax, x), step(ours, x), row)


@pytest.mark.slow
def test_gradients_of_gradients() -> None:
    for is_causal, implementation in ((False, "blocked"), (True, "reference")):
        assert gradient_of_gradient(is_causal, implementation).shape == (1, 1031, 1, 2)


@pytest.mark.slow
def test_gradients_of_gradients_over_blocks_of_a_mask_have_no_rule() -> None:
    """As how_to/flax.md says; the error is JAX's own."""
    with pytest.raises(ValueError, match=r"Reverse-mode differentiation .* lax\.while_loop"):
        gradient_of_gradient(True, "blocked")


def gradient_of_gradient(is_causal: bool, implementation: str) -> Any:
    """Traced alone, since the rules of differentiation do not depend on values."""
    x = jnp.zeros((1, 1031, 1, 2))

    def norm(x: jax.Array) -> jax.Array:
        out = jaxmha.dot_product_attention(
            x, x, x, is_causal=is_causal, implementation=implementation
        )
        return (out**2).sum()

    return jax.eval_shape(jax.grad(lambda x: (jax.grad(norm)(x) ** 2).sum()), x)
