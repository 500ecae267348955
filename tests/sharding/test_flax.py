"""Flax modules, attention_fn and caches on many devices."""

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
from tests import drawn
from tests.drawn import to_jax
from tests.sharding.devices import assert_alike, mesh, put

B, T, D, N, K, H = 2, 12, 20, 4, 2, 6
RNG = np.random.default_rng(2)
X = to_jax(RNG.standard_normal((B, T, D)), jnp.float32)
Q, KEYS = (to_jax(RNG.standard_normal((B, T, n, H)), jnp.float32) for n in (N, K))
ROTATE = partial(jaxmha.rope, base=50.0)
PARAMS = drawn.params(num_heads=N, num_kv_heads=K, features=D, head_dim=H)


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
    places = to_jax(sharding.zigzag_order(T, 2)) if axes else jnp.arange(T)
    q, k = ROTATE(q, places), ROTATE(k, places)
    return jaxmha.combine(PARAMS, jaxmha.dot_product_attention(q, k, v, is_causal=True))


def function(x: Any) -> Any:
    keys = sharding.zigzag(KEYS, 2) if sharding.current() else KEYS
    return attention_fn(x, keys, keys, rotate=ROTATE, is_causal=True)


@pytest.mark.slow_variants("linen", "by hand")
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


def flax_nnx(x: Any) -> Any:
    """Flax's own module."""
    from flax import nnx

    turned = partial(attention_fn, rotate=ROTATE)
    layer = nnx.MultiHeadAttention(N, D, N * H, decode=False, rngs=nnx.Rngs(0), attention_fn=turned)
    return layer(x)


def linen_decode(x: Any) -> Any:
    make = own_linen.MultiHeadDotProductAttention.from_params
    module, variables = make(PARAMS, rotate=ROTATE, decode=True)
    cache = module.init(jax.random.key(0), x)["cache"]
    out = []
    for t in range(2):
        found, changed = module.apply(
            {**variables, "cache": cache}, x[:, t : t + 1], mutable=["cache"]
        )
        cache = changed["cache"]
        out.append(found)
    return jnp.concatenate(out, 1)


def nnx_decode(x: Any) -> Any:
    module = own_nnx.MultiHeadAttention.from_params(PARAMS, rotate=ROTATE, decode=True)
    module.init_cache(x.shape)
    return jnp.concatenate([module(x[:, t : t + 1]) for t in range(2)], 1)


def cache(x: Any) -> Any:
    """A prompt, and tokens one by one."""
    kept = jaxmha.KVCache.empty(PARAMS, B, T)
    out, kept = jaxmha.prefill(PARAMS, x[:, :7], kept, rotate=ROTATE)
    found = [out]
    for t in range(7, 9):
        out, kept = jaxmha.decode_step(PARAMS, x[:, t : t + 1], kept, rotate=ROTATE)
        found.append(out)
    return jnp.concatenate(found, 1), kept[:2]


def heads(x: Any) -> Any:
    return attention_fn(x, x, x, rotate=ROTATE, is_causal=True)


EXPLICIT: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "linen": (linen, X),
    "nnx": (nnx, X),
    "attention_fn": (heads, Q),
    "flax nnx": (flax_nnx, X),
    "linen decode": (linen_decode, X),
    "nnx decode": (nnx_decode, X),
    "cache": (cache, X),
}


@pytest.mark.everyday(name=["linen", "nnx decode"])
@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_types(name: str) -> None:
    """The sharding of the features is enough, and the output has it too."""
    run, x = EXPLICIT[name]
    expected = jax.jit(run)(x)
    devices = mesh(True, data=2, tensor=2)
    with jax.set_mesh(devices):
        found = jax.jit(run)(put(devices, x, "data"))
    assert jax.tree.leaves(found)[0].sharding.spec[0] == "data"
    assert_alike(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("run", [linen, nnx])
def test_gradients_of_explicit_types(run: Callable[[Any], Any]) -> None:
    def grads(x: Any) -> Any:
        out, pull = jax.vjp(run, x)
        return pull(out)

    devices = mesh(True, data=2, tensor=2, context=2)
    with jax.set_mesh(devices):
        found = jax.jit(grads)(put(devices, X, "data", "context"))
    assert_alike(found, jax.jit(grads)(X))


def test_explicit_caches_stay_where_they_lie() -> None:
    devices = mesh(True, data=2, tensor=2)
    kept = jaxmha.KVCache.empty(PARAMS, B, T)
    expected = jax.jit(jaxmha.decode_step)(PARAMS, X[:, :1], kept)
    params = jax.device_put(
        PARAMS, sharding.named(devices, sharding.specs(PARAMS, mesh=devices, tensor="tensor"))
    )
    placed = jax.tree.map(lambda x: put(devices, x, *("data", "tensor")[: x.ndim - 1]), kept)
    with jax.set_mesh(devices):
        found = jax.jit(jaxmha.decode_step)(params, put(devices, X[:, :1], "data"), placed)
    for after, before in zip(found[1], placed, strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
    assert_alike((found[0], *found[1][:2]), (expected[0], *expected[1][:2]))
