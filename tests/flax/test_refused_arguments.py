"""Arguments of flax that jaxmha refuses: hooks into its computation, and shardings of a call."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxmha.flax import linen as ours_linen
from jaxmha.flax import nnx as ours_nnx
from tests.flax.common import N, T

HOOK = {"match": "computes this itself"}


@pytest.mark.parametrize(
    "name",
    ["attention_fn", "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls",
     "out_dot_general_cls", "qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"],
)  # fmt: skip
def test_hooks_are_refused_by_linen(name: str) -> None:
    layer = ours_linen.MultiHeadAttention(N, **{name: print})
    with pytest.raises(ValueError, match=f"{name}=print.*{HOOK['match']}"):
        layer.init(jax.random.key(0), jnp.ones((T, N)))


@pytest.mark.parametrize(
    "name",
    ["attention_fn", "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls",
     "out_dot_general_cls", "qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype"],
)  # fmt: skip
def test_hooks_are_refused_by_nnx(name: str) -> None:
    hook: dict[str, Any] = {name: print}
    with pytest.raises(ValueError, match=f"{name}=print.*{HOOK['match']}"):
        ours_nnx.MultiHeadAttention(N, N, rngs=nnx.Rngs(0), **hook)


def test_shardings_of_a_call_are_refused() -> None:
    layer = ours_nnx.MultiHeadAttention(N, N, rngs=nnx.Rngs(0))
    for name in ("out_sharding", "qkv_sharding"):
        call: dict[str, Any] = {name: "data"}
        with pytest.raises(ValueError, match=name):
            layer(jnp.ones((T, N)), **call)
