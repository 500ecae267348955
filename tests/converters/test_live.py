"""Live layers: what is unboxed, refused, or put back as it was."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import meta

from jaxmha import MHAParams, multi_head_attention
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.layout.arrays import to_numpy, to_torch
from jaxmha.converters.verify import comparison
from tests.converters import layers
from tests.converters.layers import Config
from tests.tolerance import assert_close


def config_of(framework: str) -> Config:
    """The first configuration of a framework."""
    return layers.configs(framework)[0]


def test_partitioned_boxes_are_opened() -> None:
    module, variables = layers.build(config_of("linen"))
    axes = {2: ("embed", None), 3: ("embed", "heads", None), 1: (None,)}
    boxed = jax.tree.map(lambda x: meta.Partitioned(x, names=axes[x.ndim]), variables)
    assert isinstance(boxed["params"]["query"]["kernel"], meta.Partitioned)
    plain = flax.from_module(module, variables)
    for tree in (boxed, boxed["params"]):
        params, semantics = flax.from_module(module, tree)
        layers.assert_identical(params, plain[0])
        assert semantics == plain[1]
    assert isinstance(boxed["params"]["query"]["kernel"], meta.Partitioned)
    assert comparison.compare((module, variables), flax.from_module(module, boxed)).same


def share_a_layer(module: Any) -> None:
    module.key = module.query


def share_a_kernel(module: Any) -> None:
    module.key.kernel = module.query.kernel


def freeze(module: Any) -> None:
    module.query.kernel = nnx.Variable(module.query.kernel.get_value())
    module.out.bias = nnx.BatchStat(jnp.ones(11))


def freeze_and_share(module: Any) -> None:
    freeze(module)
    share_a_kernel(module)


@pytest.mark.slow_variants("*", "!freeze_and_share")
@pytest.mark.parametrize(
    "change", [share_a_layer, share_a_kernel, freeze, freeze_and_share], ids=lambda f: f.__name__
)
def test_shared_and_frozen_weights_of_nnx_are_read(change: Any) -> None:
    module = nnx.MultiHeadAttention(3, 15, out_features=11, decode=False, rngs=nnx.Rngs(0))
    change(module)
    params, semantics = flax.from_module(module)
    x = jax.random.normal(jax.random.key(1), (2, 7, 15))
    wanted = jax.jit(lambda x: module(x))(x)
    assert_close(multi_head_attention(params, x, semantics=semantics), wanted)
    again, _ = flax.from_module(flax.to_module(params, semantics))
    layers.assert_identical(again, params)


def my_attention(query: Any, key: Any, value: Any, **_: Any) -> Any:
    """Attention that looks at nothing."""
    return value + 0 * (query + key)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_an_attention_function_of_the_user_s_own_is_refused(kind: str) -> None:
    layer: Any = layers.build(config_of(kind))
    arguments: tuple[Any, ...] = (layer,)
    message = r"module.attention_fn=my_attention is not the default dot_product_attention"
    if kind == "linen":
        layer = (layer[0].clone(attention_fn=my_attention), layer[1])
        arguments = layer
    else:
        layer.attention_fn = my_attention
    with pytest.raises(ValueError, match=message):
        flax.from_module(*arguments)
    with pytest.raises(ValueError, match=message):
        comparison.compare(layer, layer)


def test_meta_tensors_have_no_values() -> None:
    import torch as framework

    layer = framework.nn.MultiheadAttention(15, 3, device="meta")
    with pytest.raises(
        ValueError, match=r"^in_proj_bias: .* shape \(45,\) on the meta device has no"
    ):
        torch.from_module(layer)
    for source in (layer, layer.state_dict()):
        with pytest.raises(ValueError, match=r"in_proj_weight: .* on the meta device"):
            torch.load_into(framework.nn.MultiheadAttention(15, 3), source)
    with pytest.raises(ValueError, match=r"in_proj_bias: .* on the meta device"):
        comparison.compare(layer, layer)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_torch_runs_without_dropout_and_stays_in_its_mode(training: bool, fails: bool) -> None:
    import torch as framework

    config = config_of("torch")
    layer = layers.build(config)
    layer.dropout = 0.5
    layer.train(training)
    x, _, _ = layers.inputs(config, cross=False)
    modes = []
    layer.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    framework.manual_seed(0)
    if fails:
        with pytest.raises(AssertionError):
            torch.forward(layer, x, x, x[:, :-1])
    else:
        first, again = (torch.forward(layer, x, x, x) for _ in range(2))
        np.testing.assert_array_equal(first, again)
    assert modes == [False] * len(modes) != []
    assert layer.training is training


def mixed_dtypes(leaf: str) -> MHAParams:
    """Parameters with one bias in half precision."""
    params = torch.from_module(layers.build(config_of("torch")))[0]
    part = getattr(params, leaf)
    changed: dict[str, Any] = {leaf: part._replace(bias=np.asarray(part.bias, np.float16))}
    return params._replace(**changed)


@pytest.mark.parametrize("leaf", ["query", "out"])
@pytest.mark.parametrize("converter", [torch, keras], ids=["torch", "keras"])
def test_a_layer_of_one_dtype_refuses_several(converter: Any, leaf: str) -> None:
    message = rf"a live layer holds arrays of one dtype: .*{leaf}.bias is float16.*cast them first"
    with pytest.raises(ValueError, match=message):
        converter.to_module(mixed_dtypes(leaf))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("leaf", ["query", "out"])
def test_a_flax_tree_keeps_the_dtype_of_every_array(kind: Any, leaf: str) -> None:
    params = mixed_dtypes(leaf)
    layer = flax.to_module(params, kind=kind)
    again, _ = flax.from_module(*(layer if isinstance(layer, tuple) else (layer,)))
    layers.assert_identical(params, again)


HEADS: list[tuple[Any, str]] = [
    (0, "num_heads must be a positive integer, got 0"),
    (-3, "num_heads must be a positive integer, got -3"),
    (True, "num_heads must be a positive integer, got True"),
    (3.0, "num_heads must be a positive integer, got 3.0"),
    ("3", "num_heads must be a positive integer, got '3'"),
    (2, r"in_proj_weight: expected axes \(\(qkv N H\), Dq\) with qkv=3, N=2, got shape"),
]


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(("count", "message"), HEADS)
def test_head_counts_that_cannot_be(count: Any, message: str) -> None:
    config = next(c for c in layers.configs("torch") if (c.N * c.H) % 2)
    state = layers.snapshot(layers.build(config))
    with pytest.raises(ValueError, match=message):
        torch.import_params(state, num_heads=count)
    good, _ = torch.import_params(state, num_heads=config.N)
    assert good.query.kernel.shape[-2] == config.N


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_arrays_that_are_not_floating(dtype: str, kind: str) -> None:
    config = config_of("torch")
    state: dict[str, Any] = dict(layers.snapshot(layers.build(config)))
    make: Any = {"numpy": np.asarray, "torch": to_torch, "jax": jnp.asarray}[kind]
    state["out_proj.weight"] = make(to_numpy(state["out_proj.weight"]).astype(dtype))
    message = rf"out_proj.weight: expected a floating array, got .*{dtype}"
    with pytest.raises(ValueError, match=message):
        torch.import_params(state, num_heads=config.N)


@pytest.mark.parametrize("given", [None, 3.0, [1.0, 2.0], "weights"])
def test_what_is_no_array_at_all(given: Any) -> None:
    config = config_of("torch")
    state: dict[str, Any] = dict(layers.snapshot(layers.build(config)))
    state["out_proj.bias"] = given
    with pytest.raises(ValueError, match=r"out_proj.bias: expected a floating array, got"):
        torch.import_params(state, num_heads=config.N)
