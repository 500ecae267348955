"""Layers whose methods, hooks or equations the user replaced, however alike the replacement looks."""

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import keras as keras_library
import numpy as np
import pytest
import torch as torch_library
from flax import linen, nnx
from torch.nn.utils import prune

import jaxmha.equinox
from jaxmha.converters import equinox, flax, keras, torch
from tests.converters.test_own_forward import (
    DOT,
    D,
    N,
    of_equinox,
    of_keras,
    of_linen,
    of_nnx,
    of_torch,
    twice,
)

UTILS = torch_library.nn.utils


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Another result, by a function with the name and module of the one it replaces."""
    return wraps(function)(twice(function))


def torch_wrapped(compiled: Callable[..., Any]) -> Any:
    layer = of_torch()
    layer.forward = wrapped(compiled(layer.forward))  # type: ignore[method-assign]
    return layer


def torch_own_call() -> Any:
    layer = of_torch()
    layer._compiled_call_impl = twice(layer._call_impl)
    return layer


def torch_recomputed(change: Callable[..., Any], **settings: Any) -> Any:
    layer = of_torch()
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):
        change(layer, "in_proj_weight", **settings)
    return layer


def keras_changed(name: str, value: Any, sublayer: str = "") -> Any:
    layer = of_keras()
    setattr(getattr(layer, sublayer) if sublayer else layer, name, value)
    return layer


def keras_jitted() -> Any:
    layer = of_keras()
    layer.call = jax.jit(layer.call)
    return layer


REFUSED: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "torch wrapped": (torch, lambda: torch_wrapped(lambda x: x), "object has a forward of its own"),
    "torch wrapped compiled": (
        torch, lambda: torch_wrapped(partial(torch_library.compile, backend="eager")),
        "object has a forward of its own",
    ),
    "torch own call": (torch, torch_own_call, "has a _compiled_call_impl of its own"),
    "torch pruned": (
        torch, lambda: torch_recomputed(prune.l1_unstructured, amount=0.5),
        r"prune computes .*in_proj_weight .* by torch.nn.utils.prune.remove\(module, 'in_proj_wei",
    ),
    "torch weight norm": (
        torch, lambda: torch_recomputed(UTILS.weight_norm),
        r"by torch.nn.utils.remove_weight_norm\(module, 'in_proj_weight'\)",
    ),
    "torch spectral norm": (
        torch, lambda: torch_recomputed(UTILS.spectral_norm),
        r"by torch.nn.utils.remove_spectral_norm\(module, 'in_proj_weight'\)",
    ),
    "keras jit": (keras, keras_jitted, r"of its first call as constants.*delattr\(layer, 'call'\)"),
    "keras softmax": (
        keras, lambda: keras_changed("axis", (1,), "_softmax"),
        r"_softmax.axis=\(1,\) is not the default \(3,\)",
    ),
    "keras projection": (
        keras, lambda: keras_changed("equation", "abc,ced->abde", "_query_dense"),
        "_query_dense.equation='abc,ced->abde' is not the default 'abc,cde->abde'",
    ),
    "keras products": (
        keras, lambda: keras_changed("_combine_equation", "aceb,aecd->abcd"),
        "layer._combine_equation='aceb,aecd->abcd' is not the default",
    ),
    "linen partial": (
        flax, lambda: of_linen(qkv_dot_general=partial(DOT, out_sharding=None)),
        "module.qkv_dot_general=.* is not the default dot_general",
    ),
}  # fmt: skip
TAKEN: dict[str, tuple[Any, Callable[[], Any]]] = {
    "keras letters": (keras, lambda: keras_changed("_dot_product_equation", "xecd,xbcd->xcbe")),
    "keras last axis": (keras, lambda: keras_changed("axis", -1, "_softmax")),
    "linen partial": (
        flax,
        lambda: of_linen(out_dot_general=partial(DOT, preferred_element_type=jnp.float32)),
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.slow) if "compiled" in x else x for x in REFUSED]
)
def test_refused(case: str) -> None:
    converter, make, message = REFUSED[case]
    layer = make()
    with pytest.raises(ValueError, match=message):
        converter.from_module(*(layer if isinstance(layer, tuple) else (layer,)))


@pytest.mark.parametrize("case", TAKEN)
def test_what_computes_the_same_is_taken(case: str) -> None:
    converter, make = TAKEN[case]
    layer = make()
    params, _ = converter.from_module(*(layer if isinstance(layer, tuple) else (layer,)))
    assert params.query.kernel.shape[:2] == (D, N)


CLASSES: dict[str, tuple[Any, Any, str, Callable[[], Any]]] = {
    "torch": (torch, torch_library.nn.MultiheadAttention, "forward", of_torch),
    "keras": (keras, keras_library.layers.MultiHeadAttention, "call", of_keras),
    "nnx": (flax, nnx.MultiHeadAttention, "__call__", of_nnx),
    "linen": (flax, linen.MultiHeadDotProductAttention, "__call__", of_linen),
    "equinox": (equinox, eqx.nn.MultiheadAttention, "__call__", of_equinox),
    "jaxmha": (
        equinox,
        jaxmha.equinox.MultiheadAttention,
        "__call__",
        lambda: of_equinox(jaxmha.equinox.MultiheadAttention),
    ),
}


@pytest.mark.parametrize("case", CLASSES)
def test_functions_that_wrap_the_method_of_a_class_are_refused(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter, kind, name, make = CLASSES[case]
    layer = make()
    monkeypatch.setattr(kind, name, wrapped(getattr(kind, name)))
    with pytest.raises(ValueError, match=f"has a {name} of its own"):
        converter.from_module(*(layer if isinstance(layer, tuple) else (layer,)))


def test_torch_may_wrap_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch_library.nn.MultiheadAttention
    monkeypatch.setattr(kind, "forward", torch_library.no_grad()(kind.forward))
    assert torch.from_module(of_torch())[0].query.kernel.shape[:2] == (D, N)


def test_a_pruned_layer_is_taken_by_the_remedy_of_its_message() -> None:
    layer = torch_recomputed(prune.l1_unstructured, amount=0.5)
    expected = layer.in_proj_weight.detach().numpy()
    prune.remove(layer, "in_proj_weight")  # type: ignore[no-untyped-call]
    kernel = torch.from_module(layer)[0].query.kernel
    np.testing.assert_array_equal(np.asarray(kernel).reshape(D, D), expected[:D].T)


@pytest.mark.parametrize("axes", [(2,), (-2, 1)], ids=str)
def test_equations_of_keras_along_other_axes_are_its_own(axes: tuple[int, ...]) -> None:
    layer = keras_library.layers.MultiHeadAttention(
        N, 3, attention_axes=axes, output_shape=(2, 5), use_gate=True
    )
    layer.build(*[(None, 5, 7, None, D)] * 2)
    out: Any = keras.from_module(layer)[0].out
    assert out.kernel.shape == (N, 3, 10)
