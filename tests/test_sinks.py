"""Gradients of sinks keep their digits where sinks weigh little."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha.implementations import sinks

B, T, N, K, H = 2, 67, 4, 2, 8


def test_a_gradient_of_a_faint_sink() -> None:
    lse = np.array([3.0, 9.0, 12.0, 17.0], "float32")
    found = jax.jit(jax.vmap(jax.grad(sinks.share_of_keys, 1), (0, None)))(lse, jnp.float32(0.0))
    exact = 1 / (1 + np.exp(-lse.astype(np.float64)))
    want = -exact / (1 + np.exp(lse.astype(np.float64)))
    np.testing.assert_allclose(found, want, rtol=3e-7)


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
def test_gradients_of_sinks_and_heads(implementation: str) -> None:
    rng = np.random.default_rng(1)
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (N,), (B, T, N, H)
    *given, d_out = (rng.standard_normal(shape).astype("f") for shape in shapes)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, logits: jax.Array) -> jax.Array:
        return jaxmha.dot_product_attention(
            query, key, value, is_causal=True, sinks=logits, implementation=implementation
        )

    def oracle(query: jax.Array, key: jax.Array, value: jax.Array, logits: jax.Array) -> jax.Array:
        key, value = (jnp.repeat(x, N // K, 2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * H**-0.5
        scores = jnp.where(np.tri(T, dtype=bool), scores, -jnp.inf)
        wide = jnp.broadcast_to(logits.reshape(1, N, 1, 1), (B, N, T, 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, wide], -1), -1)[..., :T]
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    def both(call: Any, *arrays: Any) -> Any:
        out, pull = jax.vjp(call, *arrays[:-1])
        return out, *pull(arrays[-1])

    found = jax.jit(partial(both, attend))(*given, d_out)
    with jax.enable_x64(True):
        want = jax.jit(partial(both, oracle))(*(x.astype("d") for x in (*given, d_out)))
    for x, y in zip(found, map(np.asarray, want), strict=True):
        assert np.abs(np.asarray(x, np.float64) - y).max() <= 1e-6 * np.abs(y).max()
