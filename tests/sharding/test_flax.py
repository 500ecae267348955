"""Flax modules and attention_fn where positions or types say where features lie."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import sharding
from jaxmha.flax import attention_fn
from jaxmha.flax import linen as own_linen
from jaxmha.flax import nnx as own_nnx
from tests.sharding.devices import assert_alike, mesh

B, T, D, N, K, H = 2, 12, 20, 4, 2, 6
RNG = np.random.default_rng(2)
X = jnp.asarray(RNG.standard_normal((B, T, D)), jnp.float32)
Q, KEYS = (jnp.asarray(RNG.standard_normal((B, T, n, H)), jnp.float32) for n in (N, K))
ROTATE = partial(jaxmha.rope, base=50.0)
PARAMS = jaxmha.init_params(jax.random.key(0), num_heads=N, num_kv_heads=K, features=D, head_dim=H)


def linen(x: Any) -> Any:
    module, variables = own_linen.MultiHeadDotProductAttention.from_params(PARAMS, rotate=ROTATE)
    return module.apply(variables, x, mask=jaxmha.Mask.causal())


def nnx(x: Any) -> Any:
    module = own_nnx.MultiHeadAttention.from_params(PARAMS, rotate=ROTATE, decode=False)
    return module(x, is_causal=True)


def by_hand(x: Any) -> Any:
    """Who rotates between projection and attention gives true positions."""
    q, k, v = jaxmha.project(PARAMS, x)
    axes = sharding.current()
    places = jnp.asarray(sharding.zigzag_order(T, 2)) if axes else jnp.arange(T)
    q, k = ROTATE(q, places), ROTATE(k, places)
    return jaxmha.combine(PARAMS, jaxmha.dot_product_attention(q, k, v, is_causal=True))


def function(x: Any) -> Any:
    keys = sharding.zigzag(KEYS, 2) if sharding.current() else KEYS
    return attention_fn(x, keys, keys, rotate=ROTATE, is_causal=True)


@pytest.mark.parametrize(
    ("run", "x"),
    [(linen, X), (nnx, X), (function, Q), (by_hand, X)],
    ids=["linen", "nnx", "attention_fn", "by hand"],
)
def test_rotations_are_by_true_position(run: Callable[[Any], Any], x: Any) -> None:
    expected = jax.jit(run)(x)
    devices = mesh(context=2)
    with sharding.use(devices, context="context", zigzag=True):
        found = jax.jit(run)(sharding.zigzag(x, 2))
    assert_alike(sharding.unzigzag(found, 2), expected)


def test_caches_hold_natural_order() -> None:
    devices = mesh(context=2)
    cache = jaxmha.KVCache.empty(PARAMS, B, T)
    with sharding.use(devices, context="context", zigzag=True):
        for fill in (jaxmha.prefill, jaxmha.decode_step):
            with pytest.raises(ValueError, match="T=12 tokens in zig-zag order, and a cache"):
                fill(PARAMS, X, cache)
