"""Wrong names in `extra_params` are refused by both modules."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmha import Semantics
from jaxmha.flax import linen
from jaxmha.flax import nnx as modules
from jaxmha.params import leaves
from tests.flax.common import by_numpy

NORMED = Semantics(qk_norm="rms")
BIASES = ("query_norm_bias", "key_norm_bias")


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
        (("query.kernel",), {}, "must be names among"),
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
        jax.eval_shape(partial(made, names, options), x)


def made(names: Any, options: dict[str, Any], x: jax.Array) -> Any:
    return linen.MultiHeadAttention(2, extra_params=names, **options).init(jax.random.key(0), x)


def test_are_drawn_alike_in_any_order() -> None:
    """Scales of norms multiply by 1; `bias_init` draws the biases of projections, as in flax."""
    settings: dict[str, Any] = {
        "extra_params": ("gate.bias", "sinks", "gate.kernel", "query_norm_heads", *BIASES),
        "semantics": Semantics(qk_norm="rms", qk_norm_offset=0.75),
        "bias_init": jax.nn.initializers.ones,
        "kernel_init": by_numpy,
    }
    x = jnp.ones((1, 2, 8))
    module = modules.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), **settings)
    assert jax.eval_shape(module, x).shape == (1, 2, 8)
    other = linen.MultiHeadAttention(2, **settings)
    variables = jax.jit(other.init)(jax.random.key(0), x)
    for params in (module.to_params()[0], other.to_params(variables)[0]):
        drawn = {name: np.unique(array).tolist() for name, array in leaves(params).items()}
        assert drawn["query_norm_heads"] == drawn["key_norm"] == [0.25]
        assert [drawn[name] for name in ("gate.bias", "sinks", *BIASES)] == [[1], [0], [0], [0]]
