"""Layers made of parameters and semantics: what may be said anew, and where dropout draws from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmha import MHAParams, Semantics, init_params
from jaxmha.flax import linen
from jaxmha.flax import nnx as modules
from tests.flax.common import normal
from tests.tolerance import assert_same

B, T, D, N = 2, 5, 21, 3
X = normal("imported", (B, T, D))
DROPS = Semantics(dropout_rate=0.4, dropout_broadcast=("N",), precision="high")


def parameters() -> MHAParams:
    return init_params(jax.random.key(0), num_heads=N, features=D)


def test_dropout_and_precision_may_be_given_again() -> None:
    params = parameters()
    settings: dict[str, Any] = {"dropout_rate": 0.0, "precision": "highest"}
    expected = Semantics(dropout_broadcast=("N",), precision="highest")
    layer = modules.MultiHeadAttention.from_params(
        params, DROPS, deterministic=False, rngs=nnx.Rngs(0), **settings
    )
    assert layer.to_params()[1] == expected
    assert_same(layer(X), layer(X, deterministic=True))
    module, variables = linen.MultiHeadAttention.from_params(params, DROPS, **settings)
    assert module.to_params(variables)[1] == expected
    kept = linen.MultiHeadAttention.from_params(params, DROPS)[0]
    assert kept.to_params(variables)[1] == DROPS
    for rate in (0.0, 0.3):
        assert kept.clone(dropout_rate=rate).to_params(variables)[1].dropout_rate == rate


def test_imported_layers_draw_from_streams_that_are_given() -> None:
    """Two layers of one import never draw the same without being told to."""
    params = parameters()
    with pytest.raises(ValueError, match="rngs: dropout needs them in the call"):
        modules.MultiHeadAttention.from_params(params, DROPS, deterministic=False)(X)
    rngs = nnx.Rngs(7)
    layers = [
        modules.MultiHeadAttention.from_params(params, DROPS, deterministic=False) for _ in range(2)
    ]
    outs = [np.asarray(layer(X, rngs=rngs)) for layer in layers]
    held = [
        modules.MultiHeadAttention.from_params(params, DROPS, deterministic=False, rngs=rngs)
        for _ in range(2)
    ]
    outs += [np.asarray(layer(X)) for layer in held]
    for i, out in enumerate(outs):
        for other in outs[:i]:
            assert not np.array_equal(out, other)
    still = [layer(X, deterministic=True) for layer in (*layers, *held)]
    for again in still[1:]:
        assert_same(again, still[0])
    assert bool(jnp.isfinite(still[0]).all())


@pytest.mark.parametrize(
    "setting",
    [
        {"use_bias": False},
        {"use_out": False},
        {"use_bias_kv": True},
        {"normalize_qk": True},
        {"num_heads": 7},
        {"out_features": 5},
        {"param_dtype": jnp.bfloat16},
    ],
    ids=lambda setting: next(iter(setting)),
)
@pytest.mark.parametrize("modules", [linen, modules], ids=["linen", "nnx"])
def test_settings_do_not_contradict_parameters(modules: Any, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(setting))}=.* is not that of the parameters"):
        modules.MultiHeadAttention.from_params(parameters(), **setting)
    same = {"num_heads": N, "param_dtype": "float32", "use_bias": True}
    modules.MultiHeadAttention.from_params(parameters(), **same)
