"""Rotations at given positions: in the nnx module, in its cache, and in attention_fn."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmha import Mask, combine, dot_product_attention, project, rope
from jaxmha.flax import attention_fn, cached, heads, linen
from jaxmha.flax import nnx as modules
from tests import drawn
from tests.flax.common import normal, theirs
from tests.tolerance import assert_close, assert_same

B, T, D, N = 2, 5, 12, 3
ROTATE = partial(rope, base=50.0)
PARAMS = drawn.params(num_heads=N, num_kv_heads=1, features=D)
X = normal("x", (B, T, D))
# A sequence that starts later, and one with a gap.
POSITIONS = jnp.array([[3, 4, 5, 6, 7], [0, 1, 5, 6, 7]])


def by_hand(positions: Any) -> Any:
    q, k, v = project(PARAMS, X)
    q, k = ROTATE(q, positions), ROTATE(k, positions)
    return combine(PARAMS, dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.slow
def test_positions_of_a_layer_and_of_its_cache() -> None:
    expected = by_hand(POSITIONS)
    layer = modules.MultiHeadAttention.from_params(PARAMS, rotate=ROTATE)
    out = layer(X, is_causal=True, input_positions=POSITIONS)
    assert_close(out, expected)
    assert float(jnp.abs(layer(X, is_causal=True) - expected)[1].max()) > 1e-3
    layer.init_cache((B, T, D))
    steps = [
        layer(X[:, t : t + 1], decode=True, input_positions=POSITIONS[:, t : t + 1])
        for t in range(T)
    ]
    assert_close(jnp.concatenate(steps, 1), expected)


@pytest.mark.slow
def test_positions_in_linen() -> None:
    expected = by_hand(POSITIONS)
    layer, variables = linen.MultiHeadAttention.from_params(PARAMS, rotate=ROTATE)
    out = layer.apply(variables, X, is_causal=True, input_positions=POSITIONS)
    assert_close(out, expected)
    decoding = layer.clone(decode=True)
    cache = decoding.init(jax.random.key(0), X)["cache"]
    step = jax.jit(partial(decoding.apply, mutable=["cache"]))
    steps = []
    for t in range(T):
        now = slice(t, t + 1)
        called = {**variables, "cache": cache}
        out, left = step(called, X[:, now], input_positions=POSITIONS[:, now])
        cache = left["cache"]
        steps.append(out)
    assert_close(jnp.concatenate(steps, 1), expected)


@pytest.mark.slow
def test_positions_in_attention_fn() -> None:
    q, k, v = (normal(name, (B, T, N, 4)) for name in ("q", "k", "v"))
    for positions in (None, POSITIONS):
        places = jnp.arange(T) if positions is None else positions
        expected = dot_product_attention(ROTATE(q, places), ROTATE(k, places), v, is_causal=True)
        actual = attention_fn(q, k, v, is_causal=True, rotate=ROTATE, input_positions=positions)
        assert_same(actual, expected)
    layer = theirs(
        nnx.MultiHeadAttention, N, D, decode=False, rngs=nnx.Rngs(0),
        attention_fn=partial(attention_fn, rotate=ROTATE),
    )  # fmt: skip
    own = modules.MultiHeadAttention(N, D, rotate=ROTATE, rngs=nnx.Rngs(0))
    mask = Mask.causal().to_array(T, T)
    assert_close(theirs(layer, X, mask=mask), np.asarray(own(X, mask=mask)))


def test_equal_rotations_of_new_layers_compile_nothing() -> None:
    counts = []
    for _ in range(2):
        rotate = partial(rope, base=50.0)
        module, variables = linen.MultiHeadAttention.from_params(PARAMS, rotate=rotate)
        module.apply(variables, X)
        layer = modules.MultiHeadAttention.from_params(PARAMS, rotate=rotate)
        layer.init_cache((B, T, D))
        layer(X[:, :1], decode=True)
        programs: tuple[Any, ...] = heads._attend_layer, cached._attend_cached
        counts.append([program._cache_size() for program in programs])
    assert counts[0] == counts[1]


def test_what_positions_cannot_mean_is_refused(no_shape_hook: None) -> None:
    layer = modules.MultiHeadAttention.from_params(PARAMS)
    with pytest.raises(ValueError, match="nothing is rotated; give rotate"):
        layer(X, input_positions=POSITIONS)
    module, variables = linen.MultiHeadAttention.from_params(PARAMS)
    with pytest.raises(ValueError, match="nothing is rotated; give rotate"):
        module.apply(variables, X, input_positions=POSITIONS)
    q, k = jnp.ones((B, T, N, 4)), jnp.ones((B, T + 1, N, 4))
    with pytest.raises(ValueError, match="nothing is rotated"):
        attention_fn(q, q, q, input_positions=POSITIONS)
    layer = modules.MultiHeadAttention.from_params(PARAMS, rotate=ROTATE)
    message = r"input_positions: expected axes \(\*B, T\) of queries and keys alike"
    with pytest.raises(ValueError, match=message):
        layer(X, input_positions=POSITIONS[:1])
    with pytest.raises(ValueError, match=message):
        layer(X, X[:, :3], input_positions=POSITIONS)
    with pytest.raises(ValueError, match=message):
        attention_fn(q, k, k, rotate=ROTATE, input_positions=POSITIONS)
    with pytest.raises(ValueError, match="T=5 queries among S=6 keys are not known here"):
        attention_fn(q, k, k, rotate=ROTATE)
    x, turned, flat = (jnp.ones((*lead, T, D)) for lead in ((2, 3), (3, 2), (6,)))
    layer.init_cache(turned.shape)
    for decode in (False, True):
        for name, others in (
            ("key", (turned, turned)),
            ("value", (x, turned)),
            ("value", (x, flat)),
        ):
            with pytest.raises(ValueError, match=rf"{name}: .* with \*B=\(2, 3\) as in query"):
                layer(x, *others, decode=decode)
    listed: Any = [list(range(T))] * B
    with pytest.raises(TypeError, match="input_positions must be an array, got list"):
        attention_fn(q, q, q, rotate=ROTATE, input_positions=listed)
