"""Decoding with flax's own cache: same trees, same outputs, and what flax cannot."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmha
from jaxmha import KVCache, Mask, MHAParams, Semantics, rope
from jaxmha.flax import linen as ours_linen
from jaxmha.flax import nnx as ours_nnx
from jaxmha.flax.latent.linen import LatentAttention
from tests.drawn import to_jax
from tests.flax.common import (
    DQ,
    B,
    H,
    N,
    T,
    by_numpy,
    normal,
    plain,
    randomise,
    shapes,
    state_of,
    theirs,
)
from tests.flax.test_extras import SMALL, replace_widths
from tests.tolerance import assert_close, assert_same

DRAWN: dict[str, Any] = {"kernel_init": by_numpy}
X = normal("decoded", (B, T, DQ))
WIDE: dict[str, Any] = {"num_heads": N, "qkv_features": N * H}
# Over slots; the second one leaves row 0 nothing at first, and the mean of all slots in flax.
MASK = np.ones((B, 1, 1, T), bool)
MASK[0, ..., :2] = False
SELF: MHAParams = replace_widths(SMALL)
EXTRA = SELF._replace(bias_k=normal("bias_k", (3, 10)), bias_v=normal("bias_v", (3, 13)))


@pytest.mark.slow
def test_linen() -> None:
    settings = {**WIDE, "normalize_qk": True, "decode": True}
    flax = nn.MultiHeadDotProductAttention(**settings)
    ours = ours_linen.MultiHeadDotProductAttention(**settings, semantics=Semantics.flax())
    expected = theirs(jax.eval_shape, flax.init, jax.random.key(0), X)
    actual = jax.eval_shape(ours.init, jax.random.key(0), X)
    assert shapes(actual) == shapes(expected)
    params = {"params": randomise(expected["params"])}
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), expected["cache"])
    steps = [jax.jit(partial(module.apply, mutable=["cache"])) for module in (flax, ours)]
    caches = [cache, cache]
    for t in range(T):
        token = X[:, t : t + 1]
        (out, left), (mine, right) = (
            theirs(step, {**params, "cache": cache}, token, mask=MASK)
            for step, cache in zip(steps, caches, strict=True)
        )
        caches = [left["cache"], right["cache"]]
        assert_close(mine, out, f"step {t}")
        for (name, a), e in zip(plain(right).items(), plain(left).values(), strict=True):
            assert_close(a, e, name) if a.dtype == np.float32 else assert_same(a, e, name)
    whole = ours_linen.MultiHeadDotProductAttention(
        **{**settings, "decode": False}, semantics=Semantics.flax()
    )
    causal = whole.apply(params, X, mask=MASK, is_causal=True)
    assert_close(mine, causal[:, -1:])


def test_nnx() -> None:
    settings = {**WIDE, "in_features": DQ, "decode": True, "num_kv_heads": 1}
    flax, ours = (
        theirs(nnx.eval_shape, lambda: module.MultiHeadAttention(rngs=nnx.Rngs(3), **settings))  # noqa: B023
        for module in (nnx, ours_nnx)
    )
    state = randomise(nnx.state(flax, nnx.Param))
    for module in (flax, ours):
        nnx.update(module, state)
        module.init_cache(X.shape)
    assert shapes(nnx.state(ours)) == shapes(nnx.state(flax))
    step, whole = (nnx.jit(lambda module, x, d=d: module(x, decode=d)) for d in (None, False))
    for t in range(3):
        out = theirs(step, flax, X[:, t : t + 1])
        assert_close(ours(X[:, t : t + 1]), out, f"step {t}")
    for name, array in state_of(flax, nnx.Cache).items():
        mine = state_of(ours, nnx.Cache)[name]
        assert_close(mine, array, name) if mine.dtype == np.float32 else assert_same(mine, array)
    before = ours(X[:, 3:4], decode=False)
    assert_close(before, theirs(whole, flax, X[:, 3:4]))
    # Unlike flax's, a causal step sees what came before it.
    again = nnx.clone(ours)
    assert_same(again(X[:, 3:4], is_causal=True), ours(X[:, 3:4]))


def modules(params: MHAParams, semantics: Semantics = Semantics(), **settings: Any) -> Any:
    return ours_nnx.MultiHeadAttention.from_params(params, semantics, decode=True, **settings)


@pytest.mark.slow
def test_many_tokens_windows_rotations_and_extras() -> None:
    semantics = Semantics(add_zero_attn=True, logits_soft_cap=2.0)
    settings = {"local_window_size": (2, 0), "rotate": partial(rope, base=50.0)}
    layer = modules(EXTRA, semantics, **settings)
    layer.init_cache((B, 7, DQ))
    bias = normal("bias", (B, 6, T, 7))
    expected = layer(X, decode=False, is_causal=True, bias=bias[..., :T])
    outs, start = [], 0
    for size in (2, 2, 1):
        rows = slice(start, start + size)
        outs.append(layer(X[:, rows], bias=bias[:, :, rows]))
        start += size
    assert_close(jnp.concatenate(outs, 1), expected)
    assert int(layer.cache_index[...]) == T


def test_no_room_is_nan_and_no_cache_an_error() -> None:
    layer = modules(SELF)
    with pytest.raises(ValueError, match="init_cache"):
        layer(X)
    layer.init_cache((B, 3, DQ))
    with pytest.raises(ValueError, match="more than the S=3 slots"):
        layer(X)
    assert bool(jnp.isfinite(layer(X[:, :2])).all())
    assert bool(jnp.isnan(layer(X[:, :2])).all())
    with pytest.raises(ValueError, match="cached_key has room"):
        layer(X[:1, :1])


def test_prefill_runs_the_implementation_that_is_named() -> None:
    cache = KVCache.empty(SELF, B, T)
    message = "implementation must be among"
    for from_params in (ours_linen.MultiHeadAttention.from_params, modules):
        with pytest.raises(ValueError, match=message):
            from_params(SELF, implementation="flash")
    with pytest.raises(ValueError, match=message):
        jaxmha.prefill(SELF, X, cache, implementation="flash")
    outs = [
        jaxmha.prefill(SELF, X, cache, implementation=name)[0] for name in (None, ["reference"])
    ]
    assert_close(outs[1], np.asarray(outs[0]))


@pytest.mark.parametrize(
    "mask",
    [
        Mask.causal(offset=1),
        Mask.lengths(query=jnp.ones(B, int)),
        Mask.lengths(key_value=jnp.ones(B, int)),
        Mask.padding(query=jnp.ones((B, 1), bool)),
        Mask.segments(query_ids=jnp.ones((B, 1), int), key_value_ids=jnp.ones((B, 3), int)),
    ],
    ids=repr,
)
def test_structure_without_meaning_is_refused(mask: Mask) -> None:
    layer = modules(SELF)
    layer.init_cache((B, 3, DQ))
    with pytest.raises(ValueError, match="a decoding step is causal and knows its lengths"):
        layer(X[:, :1], mask=mask)


def test_weights_of_a_step_are_sown_as_in_flax() -> None:
    settings = {**WIDE, "decode": True}
    flax = nn.MultiHeadDotProductAttention(**settings)
    ours = ours_linen.MultiHeadDotProductAttention(**settings)
    made = theirs(jax.eval_shape, flax.init, jax.random.key(0), X)
    variables = {
        "params": randomise(made["params"]),
        "cache": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made["cache"]),
    }
    token, found = X[:, :1], []
    for module in (flax, ours):
        _, seen = theirs(
            module.apply, variables, token, sow_weights=True, mutable=["cache", "intermediates"]
        )
        found.append(seen["intermediates"]["attention_weights"][0])
    assert_close(found[1], found[0])


def test_steps_over_a_cache_force_float32_as_calls_do() -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), SELF)
    module, variables = ours_linen.MultiHeadAttention.from_params(
        params, force_fp32_for_softmax=True
    )
    x = X.astype(jnp.bfloat16)
    whole = module.apply(variables, x, is_causal=True)
    out, cache = module.apply(variables, x[:, :2], KVCache.empty(SELF, B, T), method="prefill")
    last, _ = module.apply(variables, x[:, 2:], cache, method="decode_step")
    assert whole.dtype == out.dtype == last.dtype == jnp.float32
    assert_close(jnp.concatenate([out, last], 1), np.asarray(whole))


def test_a_cache_has_the_dtype_that_is_given_or_none() -> None:
    layer = modules(SELF)
    for dtype, expected in ((None, np.float32), (jnp.bfloat16, jnp.bfloat16)):
        layer.init_cache((B, 3, DQ), dtype)
        assert layer.cached_key[...].dtype == layer.cached_value[...].dtype == expected
    wide: Any = {"param_dtype": "float64"}, {"dtype": "float64"}  # which float32 would round
    x, latent = np.ones((B, 3, 21)), {"latent_dim": 5, "rotary_dim": 4, "head_dim": 6}
    with jax.enable_x64(True):
        for settings in wide:
            layer = ours_nnx.MultiHeadAttention(N, 21, rngs=nnx.Rngs(0), **DRAWN, **settings)
            view = nnx.view(layer, decode=True, batch_size=B, max_length=3)
            layer.init_cache(x.shape)
            assert layer.cached_key[...].dtype == view.cached_key[...].dtype == np.float64
            module = LatentAttention(N, **latent, **settings, decode=True)
            made = jax.eval_shape(module.init, jax.random.key(0), x)
            assert made["cache"]["cached_latents"].dtype == np.float64


@pytest.mark.parametrize("decodes", [False, True])
def test_view_makes_a_cache(decodes: bool, no_shape_hook: None) -> None:
    layer = ours_nnx.MultiHeadAttention(
        N, 21, rngs=nnx.Rngs(0), **DRAWN, dropout_rate=0.1, decode=decodes
    )
    more = {} if decodes else {"decode": True}
    view = nnx.view(layer, **more, deterministic=True, batch_size=np.int64(B), max_length=3)
    x = normal("view", (B, 1, 21))
    assert_close(view(x), view(x, decode=False))
    assert view.cached_key[...].shape == (B, 3, N, 7)
    assert layer.cached_key is None


def decoding() -> tuple[Any, Any]:
    """A module of linen, and its variables."""
    layer = ours_linen.MultiHeadDotProductAttention(**WIDE, decode=True)
    made = jax.eval_shape(layer.init, jax.random.key(0), X)
    cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), made["cache"])
    return layer, {"params": randomise(made["params"]), "cache": cache}


@pytest.mark.parametrize("index", [T, 2**31 - 1])
def test_an_index_beyond_the_slots(index: int) -> None:
    """Its sum with the new tokens may wrap below 0, where there would be room."""
    layer, variables = decoding()
    cache = {**variables["cache"], "cache_index": to_jax(index, np.int32)}
    step = partial(layer.apply, {**variables, "cache": cache}, mutable=["cache"])
    for given in (X[:, :1], X[:, :2]):
        out, _ = step(given)
        assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", ["int8", "float64"])
def test_caches_that_hold_no_keys(dtype: str) -> None:
    """Keys cut to integers would attend in silence."""
    layer, variables = decoding()
    cached = np.asarray(variables["cache"]["cached_key"]).astype(dtype)
    cache = {**variables["cache"], "cached_key": cached}
    with pytest.raises(TypeError, match=f"cached_key.*{dtype}"):
        layer.apply({**variables, "cache": cache}, X[:, :1], mutable=["cache"])
