"""Dropout of the modules: where it is asked for, and distributed as in flax."""

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
from tests.flax.common import (
    B,
    N,
    Row,
    T,
    inputs,
    normal,
    theirs,
)
from tests.tolerance import assert_same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broadcast", "how"),
    [
        (False, "module"),
        pytest.param(None, "module", marks=pytest.mark.slow),
        pytest.param(False, "attention_fn", marks=pytest.mark.slow),
        pytest.param(True, "attention_fn", marks=pytest.mark.slow),
    ],
)
def test_dropout_is_distributed_as_in_flax(broadcast: bool | None, how: str) -> None:
    """With values of one, an output is the kept weight of its row over the rate kept."""
    rate, T, S = 0.3, 101, 103
    settings: dict[str, Any] = {"num_heads": 2, "qkv_features": 2, "dropout_rate": rate, "deterministic": False,
                "use_bias": False, "out_features": 2}  # fmt: skip
    if broadcast is not None:
        settings["broadcast_dropout"] = broadcast
    flax = nn.MultiHeadAttention(**settings)
    if how == "module":
        other = ours_linen.MultiHeadAttention(**settings)
    else:
        other = flax.clone(attention_fn=attention_fn)
    x, y = jnp.zeros((2, T, 2)), jnp.ones((2, S, 2))
    params = {name: {"kernel": jnp.eye(2).reshape(2, 2, 1)} for name in ("query", "key", "value")}
    params["out"] = {"kernel": jnp.eye(2).reshape(2, 1, 2)}
    outs = [
        theirs(layer.apply, {"params": params}, x, y, rngs={"dropout": jax.random.key(1)})
        for layer in (flax, other)
    ]
    kept = 1 - rate
    for out in outs:
        shared = broadcast is not False
        assert bool(jnp.array_equal(out[0], out[1])) == shared
        assert bool(jnp.array_equal(out[..., 0], out[..., 1])) == shared
        rows = 1 if shared else 4
        deviation = (rate / kept / (rows * T * S)) ** 0.5
        assert abs(float(out.mean()) - 1) < 5 * deviation
        row = (rate / kept / S) ** 0.5
        assert abs(float(out.std()) / row - 1) < 5 / (2 * rows * T) ** 0.5


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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["module", "attention_fn"])
@pytest.mark.parametrize("broadcast", [False, True])
def test_dropout_of_nnx_is_distributed_as_in_flax(broadcast: bool, how: str) -> None:
    """With values of one, an output is the kept weight of its row over the rate kept."""
    rate, T, S = 0.3, 101, 103
    settings: dict[str, Any] = {
        "num_heads": 2, "in_features": 2, "dropout_rate": rate, "deterministic": False,
        "use_bias": False, "decode": False, "broadcast_dropout": broadcast,
    }  # fmt: skip
    own = nnx.MultiHeadAttention(rngs=nnx.Rngs(1), **settings)
    if how == "module":
        other = ours_nnx.MultiHeadAttention(rngs=nnx.Rngs(1), **settings)
    else:
        other = nnx.MultiHeadAttention(rngs=nnx.Rngs(1), attention_fn=attention_fn, **settings)
    x, y = jnp.zeros((2, T, 2)), jnp.ones((2, S, 2))
    deviation = (rate / (1 - rate) / ((1 if broadcast else 4) * T * S)) ** 0.5
    for layer in (own, other):
        for side in (layer.query, layer.key, layer.value):
            side.kernel.set_value(jnp.eye(2).reshape(2, 2, 1))
        layer.out.kernel.set_value(jnp.eye(2).reshape(2, 1, 2))
        first, second = theirs(layer, x, y), theirs(layer, x, y)
        assert not np.array_equal(first, second)
        assert bool(jnp.array_equal(first[0], first[1])) == broadcast
        assert bool(jnp.array_equal(first[..., 0], first[..., 1])) == broadcast
        assert abs(float(first.mean()) - 1) < 5 * deviation
        row = (rate / (1 - rate) / S) ** 0.5
        assert abs(float(first.std()) / row - 1) < 5 / (2 * (1 if broadcast else 4) * T) ** 0.5
