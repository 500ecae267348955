"""Score and mask functions in the call of the modules: values, gradients, caches, dropout."""

from functools import partial
from typing import Any

import chex
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import MHAParams, Semantics, latent, mods, multi_head_attention, rope
from jaxmha.flax import linen, nnx
from tests import drawn
from tests.drawn import to_jax
from tests.flax import test_latent
from tests.flax.common import normal
from tests.flax.test_extras import SIZES, parameters
from tests.tolerance import assert_close, assert_same

B, T, D, N = 2, 5, 17, SIZES["N"]
EXTRA: MHAParams = parameters({**SIZES, "Dk": D, "Dv": D})
PLAIN = MHAParams(*EXTRA[:4])
X = normal("features of mods", (B, T, D))
RATES, POSITIONS = normal("rates", (N,)), normal("by position", (T,))
ALLOWED = np.random.default_rng(5).random((B, T, T)) < 0.6
ALLOWED[1, 2] = False  # a row with nothing to attend
KINDS = ("linen", "nnx")
CHUNKS = (slice(0, 2), slice(2, 3), slice(3, 5))


def functions(rates: Any = RATES, positions: Any = POSITIONS) -> dict[str, Any]:
    """Functions of every index; i and j must be absolute."""
    allowed = to_jax(ALLOWED)

    def score_mod(score: jax.Array, b: Any, n: Any, i: Any, j: Any) -> Any:
        distance = (i - 2 * j + b).astype(score.dtype)
        return score * jnp.cos(rates[n]) + 0.1 * rates[n] * distance + positions[i] * positions[j]

    return {"score_mod": score_mod, "mask_mod": lambda b, n, i, j: allowed[b, i, j]}


class Layer:
    """A module of either kind, called alike, which decodes from an empty cache."""

    def __init__(self, kind: str, params: MHAParams, length: int = T, **settings: Any) -> None:
        self.cache: Any = {}
        if kind == "nnx":
            self.module = nnx.MultiHeadAttention.from_params(params, **settings)
            self.module.init_cache((B, length, D))
            return
        self.module, variables = linen.MultiHeadAttention.from_params(params, **settings)
        self.variables = variables
        made = self.module.clone(decode=True).init(jax.random.key(0), jnp.zeros((B, length, D)))
        self.cache = {"cache": jax.tree.map(jnp.zeros_like, made["cache"])}

    def __call__(self, x: Any, decode: bool = False, **options: Any) -> Any:
        if not self.cache:
            return self.module(x, decode=decode, **options)
        layer = self.module.clone(decode=decode)
        out, changed = layer.apply(self.variables | self.cache, x, mutable=["cache"], **options)
        self.cache = {**self.cache, **changed}
        return out

    def steps(self, **options: Any) -> Any:
        """The outputs for all tokens, a few at a time."""
        return jnp.concatenate([self(X[:, at], decode=True, **options) for at in CHUNKS], 1)


def in_float64() -> Any:
    """The output for PLAIN under a causal mask in NumPy, with every score materialised."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), PLAIN)
    x, rates, positions = (np.asarray(x, np.float64) for x in (X, RATES, POSITIONS))
    q, k, v = (np.einsum("btd,dnh->btnh", x, a.kernel) + a.bias for a in p[:3])
    k, v = (np.repeat(y, N // SIZES["K"], 2) for y in (k, v))
    b, n, i, j = np.ogrid[:B, :N, :T, :T]
    score = np.einsum("btnh,bsnh->bnts", q, k) * SIZES["H"] ** -0.5 * np.cos(rates[n])
    score += 0.1 * rates[n] * (i - 2 * j + b) + positions[i] * positions[j]
    exps = np.where(ALLOWED[:, None] & (j <= i), np.exp(score), 0.0)
    total = exps.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnh->btnh", exps / np.where(total == 0, 1, total), v)
    return np.einsum("btnh,nho->bto", out, p.out.kernel) + p.out.bias


@pytest.mark.slow_variants("linen")
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_steps_are_those_of_a_materialised_oracle(kind: str) -> None:
    layer, expected = Layer(kind, PLAIN), in_float64()
    assert_close(layer(X, is_causal=True, **functions()), expected)
    assert_close(layer.steps(**functions()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotate", [None, partial(rope, base=50.0)], ids=["plain", "rotated"])
def test_extra_positions_sinks_and_gates(kind: str, rotate: Any) -> None:
    """Functions do not apply to extra positions; a cache has room for more than the sequence."""
    semantics = Semantics(add_zero_attn=True, logits_soft_cap=2.0, qk_norm="rms")
    layer = Layer(kind, EXTRA, length=7, semantics=semantics, rotate=rotate)
    whole = layer(X, is_causal=True, **functions())
    assert_close(layer.steps(**functions()), whole)
    if rotate is None:
        arguments: dict[str, Any] = {"semantics": semantics, "is_causal": True}
        expected = multi_head_attention(EXTRA, X, **arguments, **functions())
        assert_same(whole, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_block_masks_and_arrays_for_a_prompt_fit_steps(kind: str) -> None:
    """As in steps over a cache of jaxmha, B and N alone are known."""
    layer, rows = Layer(kind, PLAIN, length=7), to_jax(ALLOWED)
    made = mods.block_mask(lambda b, n, i, j: rows[b, i, j], T, block=2, B=B)
    expected = layer(X, is_causal=True, mask_mod=made)
    assert_close(layer.steps(mask_mod=made), np.asarray(expected))
    alibi = mods.alibi(mods.alibi_slopes(N + 1))
    with pytest.raises(ValueError, match=f"score_mod: .* N={N + 1}, the call has N={N}"):
        layer(X[:, :1], decode=True, score_mod=alibi)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_closed_over_arrays(kind: str) -> None:
    """Under jit and rematerialisation, with and without rotation."""
    weight = normal("cotangent", (B, T, SIZES["Do"]))

    def loss(call: Any, arrays: Any) -> Any:
        return (call(X, is_causal=True, **functions(*arrays)) * weight).sum()

    found = jax.grad(partial(loss, partial(multi_head_attention, PLAIN)))((RATES, POSITIONS))
    for rotate in (None, lambda heads, positions: heads):
        if kind == "nnx":
            module = nnx.MultiHeadAttention.from_params(PLAIN, rotate=rotate)

            def gradient(module: Any, arrays: Any) -> Any:
                remat = flax.nnx.remat(lambda module, arrays: loss(module, arrays))
                return flax.nnx.grad(remat, argnums=1)(module, arrays)

            actual = flax.nnx.jit(gradient)(module, (RATES, POSITIONS))
        else:
            layer, variables = linen.MultiHeadAttention.from_params(PLAIN, rotate=rotate)
            remat = jax.checkpoint(partial(loss, partial(layer.apply, variables)))
            actual = jax.jit(jax.grad(remat))((RATES, POSITIONS))
        chex.assert_trees_all_close(actual, found, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_variants("nnx")
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_and_weights(kind: str) -> None:
    key = jax.random.key(3)
    semantics = Semantics(dropout_rate=0.4)
    arguments: dict[str, Any] = {"semantics": semantics, "return_weights": True}
    options: dict[str, Any] = {"sow_weights": True, "deterministic": False}
    if kind == "linen":
        layer, variables = linen.MultiHeadAttention.from_params(PLAIN, semantics)
        out, sown = layer.apply(
            variables, X, dropout_rng=key, mutable=["intermediates"], **options, **functions()
        )
        (weights,) = sown["intermediates"]["attention_weights"]
    else:
        module = nnx.MultiHeadAttention.from_params(PLAIN, semantics, rngs=flax.nnx.Rngs(7))
        key = flax.nnx.clone(module).rngs()
        captured = flax.nnx.capture(
            lambda module: module(X, **options, **functions()), flax.nnx.Intermediate
        )
        out, sown = captured(module)
        (weights,) = jax.tree.leaves(sown)
    expected = multi_head_attention(PLAIN, X, dropout_key=key, **arguments, **functions())
    assert_same(out, expected[0])
    assert_same(weights, expected[1])
    assert not np.asarray(weights)[~np.broadcast_to(ALLOWED[:, None], weights.shape)].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_latent_modules(kind: str) -> None:
    given = drawn.latent_params(num_heads=N, features=D, **test_latent.SIZES)
    expected = latent.latent_attention(given, X, is_causal=True, **functions())
    made = test_latent.Made(kind, given, rotate=None)
    assert_same(made(X, is_causal=True, **functions()), expected)
    if kind == "nnx":
        made.module.init_cache(B, T)
        outs = [made(X[:, at], decode=True, **functions()) for at in CHUNKS]
        assert_close(jnp.concatenate(outs, 1), np.asarray(expected))
        return
    module = made.module.clone(decode=True)
    cache = module.init(jax.random.key(0), X)["cache"]
    outs = []
    for at in CHUNKS:
        variables = made.variables | {"cache": cache}
        out, left = module.apply(variables, X[:, at], mutable=["cache"], **functions())
        outs, cache = [*outs, out], left["cache"]
    assert_close(jnp.concatenate(outs, 1), np.asarray(expected))
