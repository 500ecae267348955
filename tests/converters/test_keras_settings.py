"""Every argument of Keras' attention layers is carried, or kept on request."""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
import pytest

from jaxmha import Semantics, multi_head_attention
from jaxmha.converters import keras, torch
from jaxmha.converters.masks.torch import path_of
from jaxmha.converters.verify import captured_layer, comparands
from tests.drawn import to_jax
from tests.promotion import foreign
from tests.tolerance import BACKWARD, assert_close

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
# Each argument is in the weights or the behaviour, or kept by `like`.
CARRIED = {"num_heads", "key_dim", "value_dim", "dropout", "use_bias", "output_shape", "use_gate"}
CARRIED |= {"head_dim", "num_query_heads", "num_key_value_heads"}
CARRIED |= {"attention_axes", "sliding_window"}
OF_TRAINING = {"kernel_initializer", "bias_initializer", "kernel_regularizer", "bias_regularizer"}
OF_TRAINING |= {"activity_regularizer", "kernel_constraint", "bias_constraint", "seed"}
KERNEL = {"flash_attention", "kwargs", "self"}  # which kernel runs; and what every layer has


def built(**settings: Any) -> Any:
    import keras as framework

    made = framework.layers.MultiHeadAttention(2, 4, **settings)
    made.build((None, None, 8), (None, None, 8))
    return made


def computed(layer: Any, *inputs: Any, **call: Any) -> Any:
    """The outputs of a built layer, by one program in the place of one for each operation."""

    def run(weights: Any, fixed: Any, *inputs: Any) -> Any:
        return layer.stateless_call(weights, fixed, *inputs, **call)[0]

    kinds = layer.trainable_variables, layer.non_trainable_variables
    return jax.jit(run)(*([x.value for x in kind] for kind in kinds), *inputs)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupQueryAttention"])
def test_no_argument_is_unknown(name: str) -> None:
    import keras as framework

    arguments = set(inspect.signature(getattr(framework.layers, name).__init__).parameters)
    assert arguments <= CARRIED | OF_TRAINING | KERNEL


@pytest.mark.parametrize("kind", ["mha", "gqa"])
def test_a_window_is_carried(kind: Literal["mha", "gqa"]) -> None:
    import keras as framework

    layer = (
        framework.layers.MultiHeadAttention(2, 4, sliding_window=3)
        if kind == "mha"
        else framework.layers.GroupQueryAttention(4, 2, 1, sliding_window=3)
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 7, 8)).astype(np.float32)
    with foreign():
        layer.build(x.shape, x.shape)
        plain, causal = (computed(layer, x, x, use_causal_mask=c) for c in (False, True))
    params, semantics = keras.from_module(layer)
    assert (semantics.local_window_size, semantics.attention_axes) == ((2, 2), None)
    for expected, is_causal in ((plain, False), (causal, True)):
        found = multi_head_attention(params, x, semantics=semantics, is_causal=is_causal)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    back = keras.to_module(params, semantics, kind=kind)
    assert back.get_config()["sliding_window"] == 3
    with pytest.raises(ValueError, match=r"cannot hold semantics.local_window_size=\(2, 2\)"):
        keras.export_params(params, semantics, layout="keras" if kind == "mha" else "keras-gqa")
    with pytest.raises(
        ValueError, match=r"\(2, 0\): Keras' sliding_window has the same bound to the left"
    ):
        keras.to_module(params, replace(semantics, local_window_size=(2, 0)))


# Axes of queries, of keys, of the mask, and the attended axes, as in Keras' own tests and more.
SHAPES: dict[str, tuple[Any, Any, Any, Any]] = {
    "mask of one axis": ((3, 4), (3, 2), (4, 2), (2,)),
    "mask of free axes": ((3, 4), (3, 2), (3, 2, 4, 2), (-2,)),
    "the first axis": ((3, 4), (2, 4), (4, 2, 3, 2), (1,)),
    "two axes": ((3, 4), (3, 2), (3, 4, 3, 2), None),
    "two axes the other way": ((3, 4), (3, 2), (1, 4, 3, 2, 3), (2, 1)),
    "two of three axes": ((5, 3, 4), (5, 3, 2), (5, 1, 3, 4, 3, 2), (2, 3)),
    "axes apart": ((5, 3, 4), (2, 3, 2), (3, 1, 5, 4, 2, 2), (1, 3)),
}


@pytest.mark.everyday(name=["axes apart"])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_axes_are_carried(name: str) -> None:
    import keras as framework

    queries, keys, mask_shape, axes = SHAPES[name]
    rng = np.random.default_rng(0)
    settings: dict[str, Any] = {"attention_axes": axes, "use_gate": True, "value_dim": 3}
    layer = framework.layers.MultiHeadAttention(2, 4, **settings)
    x, y, z = (rng.normal(size=(2, *s, 8)).astype("f") for s in (queries, keys, keys))
    mask = rng.random((2, *mask_shape)) < 0.7
    mask[..., 0] = True
    n = len(axes) if axes else len(queries)
    if name == "mask of one axis":
        mask = mask[0]
    with foreign():
        layer.build(x.shape, y.shape, z.shape)
        for variable in layer.weights:
            variable.assign(rng.normal(size=variable.shape).astype("f"))
        given = mask[0, 0] if name == "two axes the other way" else mask
        call = {"attention_mask": given, "return_attention_scores": True}
        expected, scores = map(np.asarray, computed(layer, x, y, z, **call))
    params, semantics = keras.from_module(layer)
    assert semantics.attention_axes == layer.attention_axes
    wide = mask
    while wide.ndim < len(queries) + 2 + n:
        wide = np.expand_dims(wide, -2 * n - 1)
    if name == "two axes the other way":
        wide = given
    found, weights = multi_head_attention(
        params, x, z, y, mask=wide, semantics=semantics, return_weights=True
    )
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(weights, scores, rtol=2e-5, atol=2e-6)
    back = keras.to_module(params, semantics, like=layer)
    assert back.get_config() | {"name": layer.name} == layer.get_config()
    for mine, own in zip(back.weights, layer.weights, strict=True):
        np.testing.assert_array_equal(mine, own)
    with foreign():
        flat = [a.reshape(2, -1, 8) for a in (x, z, y)]
        along = keras.forward(layer, *flat)
    one = multi_head_attention(params, *flat, semantics=replace(semantics, attention_axes=None))
    np.testing.assert_allclose(along, one, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match=r"cannot hold semantics.attention_axes"):
        keras.export_params(params, semantics, layout="keras")


@pytest.mark.slow_variants("True-mha", "False-gqa")
@pytest.mark.parametrize("kind", ["mha", "gqa"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_gate_is_carried(kind: Literal["mha", "gqa"], use_bias: bool) -> None:
    import keras as framework

    settings: dict[str, Any] = {"use_gate": True, "use_bias": use_bias}
    layer = (
        framework.layers.MultiHeadAttention(6, 4, value_dim=3, **settings)
        if kind == "mha"
        else framework.layers.GroupQueryAttention(4, 6, 3, **settings)
    )
    layer.build((None, None, 8), (None, None, 8))
    rng = np.random.default_rng(0)
    for variable in layer.weights:
        variable.assign(rng.normal(size=variable.shape).astype(np.float32))
    x = rng.normal(size=(2, 5, 8)).astype(np.float32)
    params, semantics = keras.from_module(layer)
    assert params.gate is not None
    shown: dict[str, Any] = {"return_attention_scores": True}  # Keras' own path for such widths
    with foreign():
        expected, _ = computed(layer, x, x, **shown)
    found = multi_head_attention(params, x, semantics=semantics)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    back = keras.to_module(params, semantics, kind=kind)
    with foreign():
        np.testing.assert_array_equal(computed(back, x, x, **shown)[0], expected)
    if use_bias:
        lacking = params._replace(gate=params.gate._replace(bias=None))
        with pytest.raises(ValueError, match=r"params.gate has none unlike params.query"):
            keras.to_module(lacking, semantics, kind=kind)


@pytest.mark.slow_variants("*settings[02]*")
@pytest.mark.parametrize(
    ("kind", "settings", "axes"),
    [
        ("MultiHeadAttention", {"num_heads": 3, "key_dim": 5, "value_dim": 2}, (7,)),
        ("GroupQueryAttention", {"head_dim": 4, "num_query_heads": 6, "num_key_value_heads": 3}, (7,)),
        ("MultiHeadAttention", {"num_heads": 3, "key_dim": 5, "attention_axes": (3, 1)}, (2, 5, 3)),
    ],
)  # fmt: skip
def test_gradients_are_those_of_keras(
    kind: str, settings: dict[str, Any], axes: tuple[int, ...]
) -> None:
    import keras as framework

    rng = np.random.default_rng(0)
    with foreign(), jax.enable_x64(True):
        layer = getattr(framework.layers, kind)(**settings, use_gate=True, dtype="float64")
        inputs = [to_jax(rng.normal(size=(2, *axes, width))) for width in (8, 11, 13)]
        layer.build(*(x.shape for x in inputs))
        for variable in layer.trainable_variables:
            variable.assign(rng.normal(size=variable.shape))
        params, semantics = keras.from_module(layer)
        given = [x.value for x in layer.trainable_variables]
        fixed = [x.value for x in layer.non_trainable_variables]

        def theirs(weights: Any, *features: jax.Array) -> jax.Array:
            options = {"return_attention_scores": True}
            out: jax.Array = layer.stateless_call(weights, fixed, *features, **options)[0][0]
            return out

        def ours(weights: Any, query: jax.Array, value: jax.Array, key: jax.Array) -> jax.Array:
            return multi_head_attention(weights, query, key, value, semantics=semantics)

        def pulled(function: Any, weights: Any) -> Any:
            out, pull = jax.vjp(function, weights, *inputs)
            return out, pull(cotangent)

        shape = jax.eval_shape(theirs, given, *inputs).shape
        cotangent = to_jax(rng.normal(size=shape))
        want, (of_weights, *expected) = jax.jit(partial(pulled, theirs))(given)
        for variable, gradient in zip(layer.trainable_variables, of_weights, strict=True):
            variable.assign(gradient)
        expected = keras.from_module(layer)[0], *expected
        found, gradients = jax.jit(partial(pulled, ours))(jax.tree.map(to_jax, params))
        assert_close(found, np.asarray(want))
        for x, y in zip(gradients, expected, strict=True):
            # A bias of keys has no gradient: of all weights, one scale.
            flat, wanted = (
                np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(each)])
                for each in (x, y)
            )
            assert_close(flat, wanted, factor=BACKWARD)


def test_a_layer_like_another_is_of_its_class() -> None:
    """A group of one head does not make it a MultiHeadAttention, whose masks have other rules."""
    import keras as framework

    layer = framework.layers.GroupQueryAttention(4, 2, 2, dtype="mixed_bfloat16")
    layer.build((None, None, 8), (None, None, 8))
    given = keras.from_module(layer)
    again = keras.to_module(*given, like=layer)
    assert type(again) is framework.layers.GroupQueryAttention
    assert again.compute_dtype == "bfloat16"
    plain = keras.to_module(*given)
    assert type(plain) is framework.layers.MultiHeadAttention
    assert plain.compute_dtype == "float32"


@pytest.mark.parametrize("name", ["Attention", "AdditiveAttention"])
def test_other_attention_is_refused_by_its_class(name: str) -> None:
    import keras as framework

    with pytest.raises(TypeError, match=f"got {name}"):
        keras.from_module(getattr(framework.layers, name)(use_scale=True))


def test_an_output_of_several_axes_is_their_product() -> None:
    source = built(output_shape=(3, 5), kernel_initializer="he_normal", seed=7)
    source.output_dense.bias.assign(np.arange(15.0).reshape(3, 5))
    params, semantics = keras.from_module(source)
    assert params.out is not None
    assert params.out.bias is not None
    assert (params.out.kernel.shape, params.out.bias.shape) == ((2, 4, 15), (15,))
    plain, same = (
        keras.to_module(params, semantics),
        keras.to_module(params, semantics, like=source),
    )
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype("f")
    with foreign():
        out, again, flat = (np.asarray(computed(made, x, x)) for made in (source, same, plain))
    assert out.shape == (2, 3, 3, 5)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(flat.reshape(out.shape), out)
    config = same.get_config()
    assert (config["seed"], config["kernel_initializer"]["class_name"]) == (7, "HeNormal")


def test_back_and_forth_keeps_what_torch_had() -> None:
    import torch as framework

    source = framework.nn.MultiheadAttention(6, 2)
    imported = torch.from_module(source, batch_first=False)
    assert not torch.to_module(*imported, like=source).batch_first
    assert torch.to_module(*imported).batch_first


def test_the_fused_path_has_the_softmax_of_keras_on_jax() -> None:
    """`jax.nn` computes it in float32, for float64 too."""
    with jax.enable_x64(True):
        source = built(dtype="float64")
        x = np.random.default_rng(0).normal(size=(2, 3, 8))
        params, semantics = keras.from_module(source)
        (block,) = comparands.read(source).blocks
        found = captured_layer.of_block(block, (x, x, x))
        exact = comparands.of_params("", "", params, semantics).forward(x, x, x, None)
        fused = Semantics.keras("fused", dtype="float64")
        ours = comparands.of_params("", "", params, fused).forward(x, x, x, None)
    assert fused.softmax_dtype == found.semantics.softmax_dtype == np.float32
    assert found.output is not None
    away = [np.abs(out - exact).max() / np.abs(exact).max() for out in (found.output, ours)]
    assert all(1e-9 < one < 1e-6 for one in away), away


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        ({}, "the module is in training mode"),
        ({"eval": True}, "nothing keeps it off torch's fast path"),
        ({"eval": True, "num_heads": 3}, "the number of heads is odd"),
        ({"eval": True, "batch_first": False}, "the module has batch_first=False"),
        ({"eval": True, "bias": False}, "the module has no biases"),
    ],
)
def test_the_path_of_torch_has_a_reason(change: dict[str, Any], printed: str) -> None:
    import torch as framework

    settings = {"num_heads": 2, "batch_first": True} | change
    evaluated = settings.pop("eval", False)
    module = framework.nn.MultiheadAttention(6, **settings).train(not evaluated)
    x = framework.ones(2, 3, 6)
    framework.backends.mha.set_fastpath_enabled(True)  # others of this process may not have it
    with framework.no_grad():
        path, why = path_of(module, x, x, x, why=True)
        assert path == path_of(module, x, x, x)
    assert (printed in why, path == "native") == (True, "nothing" in printed)
