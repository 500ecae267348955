"""Dropout of the modules: where it is asked for, and distributed as in flax."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmha.flax import attention_fn
from jaxmha.flax import linen as ours_linen
from jaxmha.flax import nnx as ours_nnx
from tests.flax.common import B, N, Row, T, inputs, normal, theirs
from tests.tolerance import assert_same

EYE, RATE = jnp.eye(2), 0.3


def linen_pair(how: str, settings: dict[str, Any]) -> list[Any]:
    """flax's layer and another with the same dropout: with values of one, outputs are kept weights."""
    flax = nn.MultiHeadAttention(**settings)
    module = ours_linen.MultiHeadAttention(**settings)
    other = module if how == "module" else flax.clone(attention_fn=attention_fn)
    params = {name: {"kernel": EYE.reshape(2, 2, 1)} for name in ("query", "key", "value")}
    variables = {"params": params | {"out": {"kernel": EYE.reshape(2, 1, 2)}}}
    rngs = {"dropout": jax.random.key(1)}
    return [partial(layer.apply, variables, rngs=rngs) for layer in (flax, other)]


def nnx_pair(how: str, settings: dict[str, Any]) -> list[Any]:
    """As `linen_pair`."""
    settings = {**settings, "in_features": 2, "decode": False}
    made, more = (ours_nnx, {}) if how == "module" else (nnx, {"attention_fn": attention_fn})
    pair = [
        nnx.MultiHeadAttention(rngs=nnx.Rngs(1), **settings),
        made.MultiHeadAttention(rngs=nnx.Rngs(1), **settings, **more),
    ]
    for layer in pair:
        for side in (layer.query, layer.key, layer.value):
            side.kernel.set_value(EYE.reshape(2, 2, 1))
        layer.out.kernel.set_value(EYE.reshape(2, 1, 2))
    return pair


@pytest.mark.slow
@pytest.mark.parametrize("pair", [linen_pair, nnx_pair])
@pytest.mark.parametrize("how", ["module", "attention_fn"])
@pytest.mark.parametrize("broadcast", [None, False, True])
def test_dropout_is_distributed_as_in_flax(pair: Any, how: str, broadcast: bool | None) -> None:
    """An output is the kept weight of its row over the rate kept."""
    T, S, shared = 101, 103, broadcast is not False
    settings: dict[str, Any] = {
        "num_heads": 2, "qkv_features": 2, "out_features": 2, "dropout_rate": RATE,
        "deterministic": False, "use_bias": False,
    }  # fmt: skip
    if broadcast is not None:
        settings["broadcast_dropout"] = broadcast
    x, y = jnp.zeros((2, T, 2)), jnp.ones((2, S, 2))
    rows, odds = 1 if shared else 4, RATE / (1 - RATE)
    for layer in pair(how, settings):
        out = theirs(layer, x, y)
        assert bool(jnp.array_equal(out[0], out[1])) == shared
        assert bool(jnp.array_equal(out[..., 0], out[..., 1])) == shared
        assert abs(float(out.mean()) - 1) < 5 * (odds / (rows * T * S)) ** 0.5
        assert abs(float(out.std()) / (odds / S) ** 0.5 - 1) < 5 / (2 * rows * T) ** 0.5


def test_dropout_needs_to_be_asked_for() -> None:
    (x,) = inputs(Row("", {}))
    layer = ours_nnx.MultiHeadAttention(N, 21, dropout_rate=0.5, rngs=nnx.Rngs(0))
    x = normal("x", (B, T, 21))
    with pytest.raises(ValueError, match="deterministic"):
        layer(x)
    first, second = layer(x, deterministic=False), layer(x, deterministic=False)
    assert not np.array_equal(first, second)
    layer.eval()
    assert_same(layer(x), layer(x, deterministic=True))
    bare = ours_nnx.MultiHeadAttention(
        N, 21, dropout_rate=0.5, keep_rngs=False, rngs=nnx.Rngs(0), deterministic=False
    )
    with pytest.raises(ValueError, match="rngs"):
        bare(x)
    assert_same(bare(x, rngs=nnx.Rngs(5)), bare(x, rngs=nnx.Rngs(5)))
    assert_same(bare(x, rngs=nnx.Rngs(5).dropout), bare(x, rngs=nnx.Rngs(5)))
    linen = ours_linen.MultiHeadAttention(N, dropout_rate=0.5)
    with pytest.raises(ValueError, match="deterministic"):
        linen.init(jax.random.key(0), x)
    variables = linen.init(jax.random.key(0), x, deterministic=True)
    given = linen.apply(variables, x, deterministic=False, dropout_rng=jax.random.key(7))
    again = linen.apply(variables, x, deterministic=False, dropout_rng=jax.random.key(7))
    assert_same(given, again)
    assert not np.array_equal(given, linen.apply(variables, x, deterministic=True))
