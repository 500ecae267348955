"""Gradients agree with the frameworks' autograd: a gradient is laid out like its weight."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from jaxmha import MHAParams, Semantics, multi_head_attention
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.layout.arrays import NDArray, to_numpy, to_torch
from tests.converters import layers
from tests.converters.layers import Config
from tests.promotion import foreign

# Two float64 computations of some hundred terms, relative to the largest entry.
CLOSE = 1e-12
# nnx attends by jax.nn, which computes logits in float32 whatever the inputs are.
CLOSE_NNX = 1e-5
Inputs = tuple[NDArray, NDArray, NDArray]
Gradients = tuple[dict[str, NDArray], Inputs]


def problem(config: Config) -> tuple[Any, Inputs, NDArray]:
    """A float64 layer, inputs, and the cotangent of its output."""
    layer = layers.build(config, "float64")
    cotangent = np.random.default_rng(5).normal(size=(layers.B, layers.T, config.Do))
    return layer, layers.inputs(config, 1, "float64"), cotangent


def loss(
    params: MHAParams,
    inputs: Inputs,
    bias: NDArray | None,
    semantics: Semantics,
    mask: NDArray | None,
    cotangent: NDArray,
) -> Any:
    """The function to differentiate: the cotangent times the output."""
    out = multi_head_attention(params, *inputs, mask=mask, bias=bias, semantics=semantics)
    return jnp.sum(out * cotangent)


gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def ours(
    params: MHAParams,
    semantics: Semantics,
    inputs: Inputs,
    cotangent: NDArray,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
) -> tuple[MHAParams, Inputs, Any]:
    """Gradients of jaxmha with respect to parameters, inputs and bias."""
    found: tuple[MHAParams, Inputs, Any] = gradients(
        params, inputs, bias, semantics, mask, cotangent
    )
    return found


def assert_close(
    ours: Any, theirs: Any, what: str, scale: float | None = None, close: float = CLOSE
) -> None:
    """Asserts the same shape and values up to rounding, and that there is something to compare."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, what
    assert ours.dtype == theirs.dtype == np.float64, what
    scale = np.abs(theirs).max() if scale is None else scale
    assert scale > 0, what
    assert np.abs(ours - theirs).max() <= close * scale, what


def assert_all_close(
    ours: dict[str, NDArray], theirs: dict[str, NDArray], close: float = CLOSE
) -> None:
    """A key bias has a gradient of zero up to rounding: all biases have one scale."""
    assert ours.keys() == theirs.keys()
    scale = max(float(np.abs(x).max()) for x in theirs.values())
    for key, array in ours.items():
        assert_close(array, theirs[key], key, scale, close)


def _gradient(tensor: Any) -> NDArray:
    return to_numpy(tensor.grad)


def torch_gradients(
    layer: Any, inputs: Inputs, cotangent: NDArray, mask: NDArray | None, bias: NDArray | None
) -> tuple[Gradients, NDArray | None]:
    """By autograd; a float attn_mask is the bias."""
    import torch as framework

    tensors = [to_torch(x).requires_grad_() for x in inputs]
    added = None if bias is None else to_torch(bias).requires_grad_()
    layer.zero_grad()
    out, _ = layer(
        *tensors,
        key_padding_mask=None if mask is None else to_torch(~mask[:, 0, 0]),
        attn_mask=None if added is None else added.flatten(0, 1),
        need_weights=False,
    )
    framework.sum(out * to_torch(cotangent)).backward()  # type: ignore[no-untyped-call]
    weights = {name: _gradient(p) for name, p in layer.named_parameters()}
    query, key, value = (_gradient(x) for x in tensors)
    return (weights, (query, key, value)), None if added is None else _gradient(added)


def flax_gradients(
    layer: Any, inputs: Inputs, cotangent: NDArray, mask: NDArray | None
) -> Gradients:
    """By jax.grad through the live layer."""
    run: Callable[[Any, Inputs], Any]
    if isinstance(layer, tuple):
        module, tree = layer[0], layer[1]["params"]

        def run(tree: Any, inputs: Inputs) -> Any:
            return module.apply({"params": tree}, *inputs, mask=mask)
    else:
        graph, tree, rest = nnx.split(layer, nnx.Param, ...)

        def run(tree: Any, inputs: Inputs) -> Any:
            return nnx.merge(graph, tree, rest)(*inputs, mask=mask)

    with foreign():
        weights, to_inputs = jax.jit(
            jax.grad(lambda tree, inputs: jnp.sum(run(tree, inputs) * cotangent), argnums=(0, 1))
        )(tree, inputs)
    pure = weights if isinstance(layer, tuple) else nnx.to_pure_dict(weights)
    flat = {"/".join(map(str, path)): to_numpy(x) for path, x in flatten_dict(pure).items()}
    query, key, value = map(to_numpy, to_inputs)
    return flat, (query, key, value)


def keras_gradients(
    layer: Any, inputs: Inputs, cotangent: NDArray, mask: NDArray | None
) -> Gradients:
    """By jax.grad through stateless_call, GradientTape or autograd. Keras takes (query, value, key)."""
    import keras as framework

    q, k, v = inputs
    full = None if mask is None else np.broadcast_to(mask, (layers.B, 1, layers.T, layers.S))[:, 0]
    # Without scores Keras on JAX cannot run value_dim other than key_dim.
    options = {"attention_mask": full, "training": False, "return_attention_scores": True}
    names = ["/".join(w.path.split("/")[-2:]) for w in layer.trainable_variables]
    if framework.backend.backend() == "tensorflow":
        import tensorflow as tf

        tensors = [tf.convert_to_tensor(x) for x in (q, v, k)]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            loss = tf.reduce_sum(layer(*tensors, **options)[0] * cotangent)
        wanted = [w.value for w in layer.trainable_variables]
        weights, (dq, dv, dk) = tape.gradient(loss, (wanted, tensors))
    elif framework.backend.backend() == "torch":
        import torch as framework_torch

        tensors = [to_torch(x).requires_grad_() for x in (q, v, k)]
        loss = (layer(*tensors, **options)[0] * to_torch(cotangent)).sum()
        wanted = [w.value for w in layer.trainable_variables]
        *weights, dq, dv, dk = framework_torch.autograd.grad(loss, [*wanted, *tensors])
    else:
        rest = layer.non_trainable_variables

        def loss_of(variables: Any, query: Any, value: Any, key: Any) -> Any:
            (out, _), _ = layer.stateless_call(variables, rest, query, value, key, **options)
            return jnp.sum(out * cotangent)

        start = [w.value for w in layer.trainable_variables]
        with foreign():
            weights, dq, dv, dk = jax.jit(jax.grad(loss_of, argnums=(0, 1, 2, 3)))(start, q, v, k)
    found = {name: to_numpy(x) for name, x in zip(names, weights, strict=True)}
    return found, (to_numpy(dq), to_numpy(dk), to_numpy(dv))


def padding() -> NDArray:
    """Keys beyond a length are excluded."""
    mask = layers.masks(layers.S)["padding"]
    assert mask is not None
    return mask


@pytest.mark.slow_variants("torch-packed")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("config", layers.cases("torch"))
def test_torch(config: Config) -> None:
    layer, inputs, cotangent = problem(config)
    mask = None if config.name == "packed" else padding()
    params, semantics = torch.from_module(layer)
    weights, to_inputs, _ = ours(params, semantics, inputs, cotangent, mask)
    (theirs, theirs_to_inputs), _ = torch_gradients(layer, inputs, cotangent, mask, None)
    assert_all_close(torch.export_params(weights, semantics), theirs)
    for name, a, b in zip(("query", "key", "value"), to_inputs, theirs_to_inputs, strict=True):
        assert_close(a, b, name)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "config", [c for c in layers.configs("torch") if c.name in ("packed", "kdim vdim")], ids=str
)
def test_torch_bias(config: Config) -> None:
    """torch's float attn_mask is our bias, and has the same gradient; -inf has none."""
    layer, inputs, cotangent = problem(config)
    params, semantics = torch.from_module(layer)
    bias = np.random.default_rng(2).normal(size=(layers.B, config.N, layers.T, layers.S))
    bias[..., ::3] = -np.inf
    weights, _, to_bias = ours(params, semantics, inputs, cotangent, None, bias)
    (theirs, _), theirs_to_bias = torch_gradients(layer, inputs, cotangent, None, bias)
    assert_close(to_bias, theirs_to_bias, "bias")
    assert (np.asarray(to_bias)[..., ::3] == 0).all()
    assert_all_close(torch.export_params(weights, semantics), theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("config", layers.cases("linen", "nnx"))
def test_flax(config: Config) -> None:
    layer, inputs, cotangent = problem(config)
    params, semantics = flax.from_module(*(layer if isinstance(layer, tuple) else (layer,)))
    weights, to_inputs, _ = ours(params, semantics, inputs, cotangent, padding())
    theirs, theirs_to_inputs = flax_gradients(layer, inputs, cotangent, padding())
    close = CLOSE_NNX if config.framework == "nnx" else CLOSE
    assert_all_close(flax.export_params(weights, semantics), theirs, close)
    for name, a, b in zip(("query", "key", "value"), to_inputs, theirs_to_inputs, strict=True):
        assert_close(a, b, name, close=close)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("config", layers.cases("keras"))
def test_keras(config: Config) -> None:
    layer, inputs, cotangent = problem(config)
    params, semantics = keras.from_module(layer)
    rounded = semantics
    if os.environ["KERAS_BACKEND"] == "tensorflow":  # which keeps Python floats as float32
        rounded = replace(semantics, scale=float(np.float32(config.H**-0.5)))
    weights, to_inputs, _ = ours(params, rounded, inputs, cotangent, padding())
    theirs, theirs_to_inputs = keras_gradients(layer, inputs, cotangent, padding())
    assert_all_close(keras.export_params(weights, semantics), theirs)
    for name, a, b in zip(("query", "key", "value"), to_inputs, theirs_to_inputs, strict=True):
        assert_close(a, b, name)


@pytest.mark.usefixtures("x64")
def test_a_gradient_in_the_wrong_layout_is_seen() -> None:
    """Query and key gradients swapped have the right shapes and fail the comparison."""
    layer, inputs, cotangent = problem(layers.configs("torch")[0])
    params, semantics = torch.from_module(layer)
    weights, _, _ = ours(params, semantics, inputs, cotangent)
    (theirs, _), _ = torch_gradients(layer, inputs, cotangent, None, None)
    swapped = weights._replace(query=weights.key, key=weights.query)
    assert_all_close(torch.export_params(weights, semantics), theirs)
    with pytest.raises(AssertionError, match="in_proj"):
        assert_all_close(torch.export_params(swapped, semantics), theirs)
