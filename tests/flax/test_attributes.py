"""What changes in a module after its construction is honoured, or refused by name."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmha import Semantics
from jaxmha.flax import attention_fn, linen
from jaxmha.flax.nnx import MultiHeadAttention
from tests.flax.common import N, normal
from tests.tolerance import assert_same

FEATURES = 17
SIZES: dict[str, Any] = {"num_heads": N, "in_features": FEATURES, "qkv_features": 5 * N}


def layer(**more: Any) -> Any:
    return MultiHeadAttention(**SIZES, **more, rngs=nnx.Rngs(0))


def test_dropout_changes_as_in_flax() -> None:
    x = normal("x", (2, 5, FEATURES))
    dropping, still = layer(dropout_rate=0.5, deterministic=False), layer()
    nnx.update(still, nnx.state(dropping, nnx.Param))
    assert jnp.abs(dropping(x) - still(x)).max() > 0.1
    dropping.set_attributes(dropout_rate=0.0)
    assert_same(dropping(x), still(x))
    assert dropping.to_params()[1].dropout_rate == 0
    dropping.dropout_rate = 0.5
    assert dropping.semantics == Semantics(dropout_rate=0.5, dropout_broadcast=("B", "N"))
    assert jnp.abs(dropping(x) - still(x)).max() > 0.1
    dropping.semantics = Semantics()
    assert dropping.dropout_rate == 0
    still.set_attributes(dropout_rate=0.5, deterministic=False)
    with pytest.raises(ValueError, match="rngs: dropout needs them in the call"):
        still(x)
    with pytest.raises(ValueError, match="dropout_rate"):
        still.dropout_rate = 1.5


def test_attributes_of_flax() -> None:
    module = layer(dropout_rate=0.1, use_bias=False, normalize_qk=True)
    assert (module.broadcast_dropout, module.precision) == (True, None)
    assert (module.normalize_qk, module.use_bias) == (True, False)
    assert module.attention_fn is attention_fn
    module.set_attributes(broadcast_dropout=False)
    module.precision = "highest"
    assert (module.broadcast_dropout, module.precision) == (False, "highest")
    expected = Semantics(
        dropout_rate=0.1, dropout_broadcast=(), precision="highest", qk_norm="layer"
    )
    assert module.to_params()[1] == expected
    fresh = layer(
        dropout_rate=0.1, use_bias=False, normalize_qk=True,
        broadcast_dropout=False, precision="highest",
    )  # fmt: skip
    assert nnx.graphdef(module) == nnx.graphdef(fresh)
    assert layer(use_bias=("key", "out")).use_bias == ("key", "out")
    for name in ("normalize_qk", "use_bias", "attention_fn"):
        with pytest.raises(AttributeError, match=f"{name} cannot change"):
            setattr(module, name, None)


class Wrapped(nnx.Module):  # type: ignore[misc]
    """As adapters are: it has what its inner layer has, and adds to what it gives."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.bias = inner, None
        self.kernel = self.scale = getattr(inner, "kernel", getattr(inner, "scale", None))

    def __call__(self, x: Any) -> Any:
        return self.inner(x) + 1


@pytest.mark.parametrize("name", ["query", "key", "value", "out", "query_ln", "key_ln"])
def test_a_submodule_of_another_type_is_refused(name: str) -> None:
    module = layer(normalize_qk=True)
    setattr(module, name, Wrapped(getattr(module, name)))
    with pytest.raises(TypeError, match=f"{name} must be an nnx.*got Wrapped"):
        module(jnp.ones((2, 5, FEATURES)))
    with pytest.raises(TypeError, match=f"{name} must be an nnx"):
        module.to_params()


def test_a_sequence_of_implementations_is_hashable() -> None:
    module = linen.MultiHeadAttention(num_heads=N, implementation=["reference"])
    assert hash(module) == hash(module.clone(implementation=("reference",)))
    assert module.clone(implementation=["blocked", "reference"]).implementation == (
        "blocked",
        "reference",
    )


def test_no_heads_are_refused() -> None:
    x = jnp.ones((2, 5, FEATURES))
    with pytest.raises(ValueError, match="num_heads must be at least 1, got N=0"):
        linen.MultiHeadAttention(num_heads=0).init(nnx.Rngs(0).params(), x)
    with pytest.raises(ValueError, match="num_heads must be at least 1, got N=0"):
        MultiHeadAttention(0, FEATURES, rngs=nnx.Rngs(0))


def test_inputs_that_flax_takes_and_jaxmha_does_not() -> None:
    """As the list of differences says."""
    x, heads = jnp.ones((2, 5, FEATURES)), jnp.ones((2, 5, N, 5))
    with pytest.raises(TypeError, match="query"):
        layer()(x.astype(np.int32))
    with pytest.raises(TypeError, match="mask must be an array"):
        linen.MultiHeadAttention(num_heads=N, qkv_features=5 * N).init(
            nnx.Rngs(0).params(), x, mask=True
        )
    with pytest.raises(TypeError, match="mask must be an array"):
        attention_fn(heads, heads, heads, mask=True)
