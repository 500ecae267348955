"""Wrong names in `extra_params` are refused by both modules."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxmha import Semantics
from jaxmha.flax import linen
from jaxmha.flax import nnx as modules

NORMED = Semantics(qk_norm="rms")


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("gate.bias",), {}, "gate.bias needs gate.kernel or gate_heads.kernel"),
        (("gate_heads.bias",), {}, "gate_heads.bias needs gate.kernel"),
        (("query_norm_heads",), {}, "query_norm_heads needs learned norms"),
        (("key_norm_bias",), {}, "key_norm_bias needs learned norms"),
        (
            ("query_norm_heads",),
            {"semantics": Semantics(qk_norm="rms", qk_norm_learned=False)},
            "query_norm_heads needs learned norms",
        ),
        (3, {}, "must be a tuple of names, got 3"),
        ("sinks", {}, "must be a tuple of names, got 'sinks'"),
        (("sinks", "sinks"), {}, "names sinks more than once"),
        (("gate.kernel", "gate_heads.kernel"), {}, "names gate.kernel more than once"),
        (
            ("query_norm_bias", "query_norm_bias_heads"),
            {"semantics": NORMED},
            "names query_norm_bias more than once",
        ),
    ],
)
def test_are_refused(names: Any, options: dict[str, Any], message: str) -> None:
    x = jnp.ones((1, 2, 8))
    with pytest.raises((TypeError, ValueError), match=f"extra_params.*{message}"):
        modules.MultiHeadAttention(2, 8, extra_params=names, rngs=nnx.Rngs(0), **options)
    with pytest.raises((TypeError, ValueError), match=f"extra_params.*{message}"):
        linen.MultiHeadAttention(2, extra_params=names, **options).init(jax.random.key(0), x)


def test_are_taken_in_any_order() -> None:
    module = modules.MultiHeadAttention(
        2,
        8,
        extra_params=("gate.bias", "sinks", "gate.kernel", "query_norm_heads"),
        semantics=NORMED,
        rngs=nnx.Rngs(0),
    )
    assert module(jnp.ones((1, 2, 8))).shape == (1, 2, 8)
