"""Arguments of flax that jaxmha refuses: hooks, shardings of a call, and additive masks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxmha.flax import attention_fn
from jaxmha.flax import linen as ours_linen
from jaxmha.flax import nnx as ours_nnx
from tests.drawn import to_jax
from tests.flax.common import N, T, by_numpy
from tests.tolerance import assert_close

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


X = np.random.default_rng(7).standard_normal((T, 2 * N), np.float32)
CAUSAL = np.tri(T, dtype=bool)


def _linen(mask: Any) -> Any:
    layer = ours_linen.MultiHeadAttention(N, kernel_init=by_numpy)
    return layer.init_with_output(jax.random.key(0), X, mask=mask)[0]


def _nnx(mask: Any) -> Any:
    return ours_nnx.MultiHeadAttention(
        N, 2 * N, decode=False, kernel_init=by_numpy, rngs=nnx.Rngs(0)
    )(X, mask=mask)


def _function(mask: Any) -> Any:
    heads = X.reshape(T, N, 2)
    return attention_fn(heads, heads, heads, mask=mask)


@pytest.mark.parametrize("call", [_linen, _nnx, _function])
def test_additive_masks_are_refused(call: Any) -> None:
    """Flax inverts them. Numbers of at least 0 are Booleans as in Flax."""
    expected = call(CAUSAL)
    for read in (CAUSAL.astype(np.float32), to_jax(CAUSAL, jnp.bfloat16), CAUSAL * 3):
        assert_close(call(read), expected)
    for low in (-np.inf, -1e9, -0.5):
        added = np.where(CAUSAL, 0.0, low)
        for mask in (added, to_jax(added, jnp.float32), to_jax(added, jnp.bfloat16)):
            with pytest.raises(ValueError, match=r"mask has b?float\d+ values .*pass `mask == 0`"):
                call(mask)
    with pytest.raises(ValueError, match="mask has int32 values from -10000 to 0"):
        jax.jit(lambda: call(np.int32(CAUSAL * 10**4 - 10**4)))()


def test_traced_masks_are_read_as_in_flax() -> None:
    mask = np.where(CAUSAL, 0.0, -1e9).astype(np.float32)
    heads = X.reshape(T, N, 2)
    expected = linen.dot_product_attention(heads, heads, heads, mask=mask)
    found = jax.jit(_function)(mask)
    rows = slice(None, -1)  # the last one is fully masked: 0 here
    assert_close(found[rows], np.asarray(expected)[rows])
