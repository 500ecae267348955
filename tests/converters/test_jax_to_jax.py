"""Live layers of equinox and haiku, and traced arrays between layouts of JAX libraries."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import numpy as np
import pytest
from flax import nnx

import jaxmha
from jaxmha import Semantics
from jaxmha.converters import equinox, flax, haiku, keras
from jaxmha.converters import torch as torch_face
from tests.drawn import to_jax
from tests.tolerance import assert_close

N, D, DK, T, S = 2, 6, 10, 5, 7


def run(params: Any, semantics: Semantics, query: Any, key: Any, mask: Any) -> Any:
    return jaxmha.multi_head_attention(params, query, key, key, mask=mask, semantics=semantics)


def drawn() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    mask = rng.random((T, S)) < 0.6
    mask[2] = False  # a fully masked row
    return (rng.normal(size=(T, D)).astype("f"), rng.normal(size=(S, DK)).astype("f"), mask)


def of_equinox() -> eqx.nn.MultiheadAttention:
    return eqx.nn.MultiheadAttention(
        N, D, DK, DK, 11, 3, 4, use_query_bias=True, use_output_bias=True, dropout_p=0.25,
        inference=True, key=jax.random.key(0),
    )  # fmt: skip


def test_layers_of_equinox_come_back() -> None:
    layer = of_equinox()
    params, semantics = equinox.from_module(layer)
    assert semantics.dropout_rate == 0.25
    query, key, mask = drawn()
    out = run(params, Semantics.equinox(), query[None], key[None], mask[None, None])
    wanted = jax.jit(lambda *x: layer(*x))(query, key, key, mask)
    assert_close(np.asarray(out[0]), np.asarray(wanted, np.float64))
    back = equinox.to_module(params, semantics, like=layer)
    kinds: list[Any] = [jax.tree.structure(x) for x in (back, layer)]
    assert kinds[0] == kinds[1]
    for mine, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(layer), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(TypeError, match="expected an equinox"):
        equinox.from_module(layer.query_proj)
    own = type("Own", (type(layer),), {"__call__": lambda self, *inputs: inputs[0]})
    with pytest.raises(ValueError, match="has a __call__ of its own"):
        equinox.from_module(own(2, 6, key=jax.random.key(0)))


def of_haiku(settings: Any = None) -> Any:
    def call(*args: Any) -> Any:
        own = settings or {
            "num_heads": N, "key_size": 3, "value_size": 4, "model_size": 11,
            "w_init": hk.initializers.VarianceScaling(), "b_init": hk.initializers.RandomNormal(),
        }  # fmt: skip
        return hk.MultiHeadAttention(**own, name="attn")(*args)

    return hk.without_apply_rng(hk.transform(call))


def test_layers_of_haiku_come_back() -> None:
    query, key, mask = drawn()
    args = query[None], key[None], key[None], mask[None, None]
    with jax.numpy_dtype_promotion("standard"):
        shapes = jax.eval_shape(of_haiku().init, jax.random.key(0), *args)
        rng = np.random.default_rng(1)
        variables = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f"), shapes)
        params, semantics = haiku.from_module(variables, num_heads=N)
        out = run(params, Semantics.haiku(), query[None], key[None], mask[None, None])
        wanted = jax.jit(of_haiku().apply)(variables, *args)
        assert_close(np.asarray(out), np.asarray(wanted, np.float64))
        settings, back = haiku.to_module(params, semantics, path="attn")
        np.testing.assert_array_equal(jax.jit(of_haiku(settings).apply)(back, *args), wanted)
    with pytest.raises(ValueError, match="expected one module with a query, got none"):
        haiku.from_module({"a": variables["attn/query"]}, num_heads=N)


def test_traced_arrays_go_between_jax_libraries() -> None:
    """jit, grad and vmap pass through both conversions and give what conversions of values give."""
    layer = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0))
    flat = {
        "/".join(p): to_jax(v.get_value())
        for p, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    x = np.random.default_rng(0).normal(size=(T, D)).astype("f")

    def module(state: Any) -> Any:
        return equinox.to_module(*flax.import_params(state))

    values = jax.tree.map(np.asarray, flat)  # which no program converts
    for one, other in zip(
        *map(jax.tree.leaves, (jax.jit(module)(flat), module(values))), strict=True
    ):
        np.testing.assert_array_equal(one, other)

    def loss(state: Any) -> Any:
        out = module(state)(x, x, x)
        return (out**2).sum(), out

    def direct(state: Any) -> Any:
        nnx_layer = nnx.clone(layer)
        nnx.update(nnx_layer, nnx.from_flat_state(
            [(p, v.replace(state["/".join(p)])) for p, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))]
        ))  # fmt: skip
        out = nnx_layer(x[None])[0]
        return (out**2).sum(), out

    (ours, out), (theirs, expected) = (
        jax.jit(jax.grad(function, has_aux=True))(flat) for function in (loss, direct)
    )
    assert_close(np.asarray(out), np.asarray(expected, np.float64))
    mine, wanted = (np.concatenate([x[n].ravel() for n in flat]) for x in (ours, theirs))
    assert_close(mine, np.asarray(wanted, np.float64))  # gradients of key biases are zero

    def converted(state: Any) -> Any:
        return haiku.export_params(*flax.import_params(state))

    stacked = {name: np.stack([array, array + 1]) for name, array in values.items()}
    made = jax.vmap(converted)(stacked)
    for name, array in converted({name: array[1] for name, array in stacked.items()}).items():
        np.testing.assert_array_equal(made[name][1], array)


@pytest.mark.parametrize("face", [torch_face, keras])
def test_traced_arrays_are_refused_in_words_elsewhere(face: Any) -> None:
    params, _ = equinox.from_module(of_equinox())
    with pytest.raises(TypeError, match="traced by jit, grad or vmap"):
        jax.jit(face.export_params)(params)
