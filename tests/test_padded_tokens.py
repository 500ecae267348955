"""Padded tokens of prompts and steps over a cache may hold NaN, also for gradients of weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import KVCache, Mask, PagedKVCache, Projection, latent, read_tokens
from jaxmha.flax import linen
from tests import drawn
from tests.drawn import to_jax
from tests.tolerance import assert_same

B, T, S, D, N, H = 2, 5, 7, 6, 2, 3
LENGTHS = np.asarray([5, 3], np.int32)
RIGHT = np.arange(T) < LENGTHS[:, None]  # valid tokens of rows that are padded on the right
# Valid slots: a gap between two turns, and a row that is padded on both sides.
VALID = np.asarray([[1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1]], bool)
SLOTS = Mask.padding(key_value=VALID)
PARAMS = drawn.params(num_heads=N, features=D, use_bias_kv=True)
GATED = PARAMS._replace(gate=Projection(PARAMS.query.kernel))
LATENT = drawn.latent_params(num_heads=N, features=D, latent_dim=5, rotary_dim=2, head_dim=H)
LINEN = linen.MultiHeadDotProductAttention(N, decode=True)


def linen_step(params: Any, x: Any) -> Any:
    empty = jnp.zeros((B, S, N, H))
    cache = {"cached_key": empty, "cached_value": empty, "cache_index": jnp.int32(0)}
    variables = {"params": params, "cache": cache}
    return LINEN.apply(variables, x, mask=SLOTS, mutable=["cache"])


def paged_step(params: Any, x: Any) -> Any:
    cache = PagedKVCache.empty(params, B, 8, pages=4, page_size=4)
    return jaxmha.extend(params, x, cache, q_lengths=LENGTHS)


def prompts(params: Any, x: Any) -> Any:
    """Their lengths alone: padded queries attend the prompt."""
    mask = Mask.lengths(key_value=LENGTHS)
    return jaxmha.prefill(params, x, KVCache.empty(params, B, S), mask=mask)


def step(params: Any, x: Any) -> Any:
    return jaxmha.extend(params, x, KVCache.empty(params, B, S), mask=SLOTS)


def latent_prompts(params: Any, x: Any) -> Any:
    mask = Mask.padding(key_value=VALID[:, :T])
    return latent.prefill(params, x, latent.LatentCache.empty(params, B, S), mask=mask)


def latent_step(params: Any, x: Any) -> Any:
    return latent.extend(params, x, latent.LatentCache.empty(params, B, S), mask=SLOTS)


FLAX = {name: getattr(PARAMS, name)._asdict() for name in PARAMS._fields[:4]}
CALLS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "prompts": (prompts, GATED, RIGHT),
    "step": (step, GATED, VALID[:, :T]),
    "paged step": (paged_step, PARAMS, RIGHT),
    "linen step": (linen_step, FLAX, VALID[:, :T]),
    "latent prompts": (latent_prompts, LATENT, VALID[:, :T]),
    "latent step": (latent_step, LATENT, VALID[:, :T]),
}


@pytest.mark.slow_variants("paged step")
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_zeros(name: str) -> None:
    call, params, valid = CALLS[name]

    @jax.jit
    def gradients(params: Any, x: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            out, _ = call(params, x)
            return jnp.sum(jnp.where(valid[..., None], out, 0.0) ** 2)

        return jax.grad(loss)(params)

    x = np.random.default_rng(0).standard_normal((B, T, D)).astype("f")
    expected, found = (
        gradients(params, to_jax(np.where(valid[..., None], x, np.float32(padding))))
        for padding in (0, np.nan)
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    jax.tree.map(assert_same, found, expected)


def test_finite_tokens_are_stored_as_ever() -> None:
    """A later call with less padding attends keys that this one excludes."""
    slots = np.arange(T)[None].repeat(B, 0)
    found = read_tokens.of_step(to_jax(np.ones((B, T, D), "f")), to_jax(VALID), to_jax(slots))
    assert found.keys is not None
    assert np.all(found.keys)
