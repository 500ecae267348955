"""Live layers that cannot be read or made are refused with a message that names what is wrong."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxmha import MHAParams, Semantics
from jaxmha.converters import flax, keras, torch
from tests.converters import layers
from tests.converters.test_validation import Dk, Dv, H, N, P, h, params


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("framework", ["torch", "keras", "nnx"])
def test_a_live_layer_is_no_state(framework: str) -> None:
    layer = layers.build(layers.configs(framework)[0])
    converter = {"torch": torch, "keras": keras, "nnx": flax}[framework]
    message = rf"state: expected a dict .*got {type(layer).__name__}: .* from_module\(layer\)"
    with pytest.raises(TypeError, match=message):
        converter.import_params(layer, num_heads=N)


def test_torch_layer_refuses_mixed_dtypes() -> None:
    mixed = P._replace(key=P.key._replace(kernel=np.asarray(P.key.kernel, np.float16)))
    with pytest.raises(ValueError, match=r"one dtype"):
        torch.to_module(mixed)


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (params(Dk=Dk, Dv=Dv), "nnx", r"flax nnx cannot hold Dk=17 with Dv=19: .*in_kv_features"),
        (params(K=1), "linen", r"flax linen cannot hold K=1 with N=3: .*nnx has fewer"),
        (params(h=h), "linen", r"flax linen cannot hold h=7 with H=5"),
        (P, "haiku", r"kind must be 'nnx' or 'linen', got 'haiku'"),
    ],
)
def test_flax_layers_refuse(given: MHAParams, kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flax.to_module(given, kind=kind)


def test_flax_layers_share_dropout_over_batch_and_heads_only() -> None:
    semantics = Semantics(dropout_rate=0.1, dropout_broadcast=("T",))
    with pytest.raises(ValueError, match=r"semantics.dropout_broadcast=\('T',\)"):
        flax.to_module(P, semantics)
    for shared in ((), ("B", "N")):
        module = flax.to_module(P, replace(semantics, dropout_broadcast=shared))
        assert module.broadcast_dropout == bool(shared)
        assert flax.from_module(module)[1].dropout_broadcast == shared


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_flax_without_x64_does_not_round_float64(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"JAX would keep query/kernel as float32, not float64"):
        flax.to_module(params(dtype="float64"), kind=kind)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")
def test_keras_on_jax_without_x64_does_not_round_float64() -> None:
    import keras as framework

    if framework.backend.backend() == "jax":
        with pytest.raises(ValueError, match=r"keeps query/kernel as float32, not float64"):
            keras.to_module(params(dtype="float64"))
    else:
        layer = keras.to_module(params(dtype="float64"))
        assert layer.weights[0].dtype == "float64"


@pytest.mark.parametrize("converter", [torch, keras, flax], ids=["torch", "keras", "flax"])
def test_wrong_class(converter: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"expected a .*(MultiheadAttention|MultiHeadAttention|"
        r"MultiHeadDotProductAttention).* got dict",
    ):
        converter.from_module({})


def test_linen_needs_its_variables() -> None:
    module, tree = layers.build(layers.configs("linen")[0])
    with pytest.raises(ValueError, match=r"a linen module holds no weights: pass variables="):
        flax.from_module(module)
    layers.assert_identical(
        flax.from_module(module, tree)[0], flax.from_module(module, tree["params"])[0]
    )


def test_linen_settings_that_contradict_the_tree() -> None:
    module, tree = layers.build(layers.configs("linen")[0])
    with pytest.raises(ValueError, match=r"module.normalize_qk=True, but the tree has no query_ln"):
        flax.from_module(module.clone(normalize_qk=True), tree)
    with pytest.raises(ValueError, match=r"query/kernel: expected axes .* with N=2, got shape"):
        flax.from_module(module.clone(num_heads=2), tree)


def test_keras_layer_without_weights() -> None:
    import keras as framework

    layer = framework.layers.MultiHeadAttention(N, H, name="mine")
    with pytest.raises(ValueError, match=r"layer 'mine' has no weights yet: call it once"):
        keras.from_module(layer)


@pytest.mark.parametrize("converter", [torch, keras, flax], ids=["torch", "keras", "flax"])
def test_to_module_refuses_stacked_layers(converter: Any) -> None:
    """A live layer is one layer; the message names the leaf and the axes."""
    import jax

    stacked = jax.tree.map(lambda x: np.stack([x, x]), P)
    with pytest.raises(ValueError, match=r"params.query.kernel: expected axes \(Dq, N, H\)"):
        converter.to_module(stacked)
