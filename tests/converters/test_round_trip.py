"""Weights keep every bit on their way through the layouts and through live layers."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jaxmha import MHAParams, Projection, Semantics
from jaxmha.converters import flax, huggingface, keras, torch
from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.layout import transform
from jaxmha.converters.layout.arrays import NDArray, framework_of, to_numpy, to_torch
from jaxmha.converters.layout.base import Entry
from jaxmha.params import from_leaves, leaves
from tests.converters import layers
from tests.converters.layers import Config, assert_identical
from tests.converters.test_every_layout import N, params_of

CONVERTERS: dict[str, Any] = {"torch": torch, "keras": keras, "linen": flax, "nnx": flax}
KINDS: dict[str, Any] = {"linen": {"kind": "linen"}, "nnx": {"kind": "nnx"}}


def holds(config: Config, framework: str) -> bool:
    """True if a layer of the framework can hold the block: research on the layouts, as data."""
    c = config
    return {
        "torch": c.K == c.N and c.h == c.H and c.Do == c.Dq == c.N * c.H and not c.qk_norm,
        "keras": (c.K == c.N or (c.h == c.H and c.Do == c.Dq))
        and not (c.bias_kv or c.zero_attn or c.qk_norm),
        "linen": c.K == c.N and c.h == c.H and not (c.bias_kv or c.zero_attn),
        "nnx": c.Dk == c.Dv and c.h == c.H and not (c.bias_kv or c.zero_attn),
    }[framework]


def read(layer: Any) -> tuple[MHAParams, Semantics]:
    """Imports a live layer of any framework; linen is a pair."""
    pair = layer if isinstance(layer, tuple) else (layer,)
    result: tuple[MHAParams, Semantics] = CONVERTERS.get(framework_of(pair[0]), flax).from_module(
        *pair
    )
    return result


@cache
def block_of(config: Config) -> tuple[MHAParams, Semantics]:
    """A block that tests read, and change nowhere."""
    return read(layers.build(config))


def write(framework: str, params: MHAParams, semantics: Semantics) -> Any:
    """A live layer of a framework."""
    return CONVERTERS[framework].to_module(params, semantics, **KINDS.get(framework, {}))


@pytest.fixture(params=layers.DTYPES)
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every dtype, with x64 on where JAX needs it to keep the bits."""
    with jax.enable_x64(request.param == "float64"):
        yield request.param


EVERY = pytest.mark.parametrize("config", layers.configs(), ids=str)


def test_keras_runs_on_the_backend_asked_for() -> None:
    import keras as framework

    assert framework.backend.backend() == os.environ["KERAS_BACKEND"]


@pytest.mark.slow_variants(
    "keras-*",
    "linen-*",
    "nnx-*",
    "!*-everything*-float32",
    "!keras-*-bfloat16",
    "!linen-*-bfloat16",
)
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(config, dtype, id=f"{config}-{dtype}")
        for config in layers.configs()
        for dtype in layers.DTYPES
        # torch is fast; elsewhere each dtype is compiled anew, and one layer has every leaf
        if dtype == "float32" or config.framework == "torch" or config.name == "everything"
    ],
    indirect=["dtype"],
)
def test_own_round_trip(config: Config, dtype: str) -> None:
    layer = layers.build(config, dtype)
    before = layers.snapshot(layer)
    params, semantics = read(layer)
    again = write(config.framework, params, semantics)
    assert_identical(layers.snapshot(layer), before)
    named = (layers.snapshot(layer), layers.snapshot(again))
    if config.framework == "keras":  # paths begin with the name of the layer
        named = tuple({"/".join(k.split("/")[-2:]): v for k, v in x.items()} for x in named)  # type: ignore[assignment]
    assert_identical(*named)
    params_again, semantics_again = read(again)
    assert_identical(params, params_again)
    assert semantics_again == semantics


@pytest.mark.parametrize("config", [layers.configs(name)[0] for name in CONVERTERS], ids=str)
def test_random_parameters_are_all_different_and_none_is_zero(config: Config) -> None:
    """The data can show a permutation: no value twice, none that hides a sum."""
    flat = np.concatenate([x.ravel() for x in layers.snapshot(layers.build(config)).values()])
    assert len(np.unique(flat)) > 0.99 * flat.size
    assert not np.isin(flat, (0.0, 1.0)).any()


@pytest.mark.slow_variants("*-keras-*", "*-linen-*", "*-nnx-*", "!*-everything", "!*-num_kv_heads")
@EVERY
@pytest.mark.parametrize("target", ["torch", "keras", "linen", "nnx"])
def test_every_layer_holds_the_block_or_refuses_it(config: Config, target: str) -> None:
    params, semantics = block_of(config)
    if holds(config, target):
        params_again, semantics_again = read(write(target, params, semantics))
        assert_identical(params, params_again)
        assert semantics_again == semantics
    else:
        with pytest.raises(ValueError, match=r"cannot hold"):
            write(target, params, semantics)


@pytest.mark.slow_variants("float16-*", "float64-*", "bfloat16-*packed*", "*-nnx")
@pytest.mark.parametrize("middle", ["linen", "nnx"])
@pytest.mark.parametrize(
    "config", [c for c in layers.configs("torch") if holds(c, "keras")], ids=str
)
def test_torch_through_flax_and_keras_and_back(config: Config, middle: str, dtype: str) -> None:
    if not holds(config, middle):
        middle = "keras"  # two widths do not fit into nnx; the error is tested
    source = layers.build(config, dtype)
    block = read(source)
    for framework in (middle, "keras", "torch"):
        layer = write(framework, *block)
        block = read(layer)
    assert_identical(layers.snapshot(source), layers.snapshot(layer))


@pytest.mark.slow_variants("*16-*", "float64-*", "!bfloat16-*-widths")
@pytest.mark.parametrize(
    "config", [c for c in layers.configs("keras") if c.name in ("output_shape", "widths")], ids=str
)
def test_keras_through_flax_and_back(config: Config, dtype: str) -> None:
    source = layers.build(config, dtype)
    layer = write("keras", *read(write("linen", *read(source))))
    assert_identical(
        *({k.split("/", 1)[-1]: v for k, v in layers.snapshot(x).items()} for x in (source, layer))
    )


NAMES = ("torch", "torch-separate", "keras", "keras-file", "flax", "bert")
LAYOUTS = pytest.mark.parametrize("name", NAMES)


@LAYOUTS
def test_a_stack_is_the_layers_one_by_one(name: str) -> None:
    layout = attention_blocks.named(name)
    stacked = params_of(layout, (3,))
    state = transform.export_params(layout, stacked, layout.semantics)
    for i in range(3):
        one = from_leaves({leaf: np.asarray(x)[i] for leaf, x in leaves(stacked).items()})
        alone = transform.export_params(layout, one, layout.semantics)
        assert_identical({key: array[i] for key, array in state.items()}, alone)


# The same arrays by the formulas of the frameworks' documentation, without the arrows of the transform.
FORMULAS: dict[str, dict[str, Callable[[MHAParams], NDArray]]] = {
    "torch": {
        "in_proj_weight": lambda p: np.concatenate([flat(p.query), flat(p.key), flat(p.value)]),
        "in_proj_bias": lambda p: np.concatenate([bias(p.query), bias(p.key), bias(p.value)]),
        "out_proj.weight": lambda p: out(p).T,
        "out_proj.bias": lambda p: bias(p.out),
        "bias_k": lambda p: np.asarray(p.bias_k).reshape(1, 1, -1),
        "bias_v": lambda p: np.asarray(p.bias_v).reshape(1, 1, -1),
    },
    "torch-separate": {
        "q_proj_weight": lambda p: flat(p.query),
        "k_proj_weight": lambda p: flat(p.key),
        "v_proj_weight": lambda p: flat(p.value),
    },
    "bert": {
        "self.query.weight": lambda p: flat(p.query),
        "self.key.weight": lambda p: flat(p.key),
        "self.value.weight": lambda p: flat(p.value),
        "self.query.bias": lambda p: bias(p.query),
        "output.dense.weight": lambda p: out(p).T,
    },
    "keras": {
        "query/kernel": lambda p: np.asarray(p.query.kernel),
        "value/bias": lambda p: np.asarray(p.value.bias),
        "attention_output/kernel": lambda p: np.asarray(p.out.kernel),  # type: ignore[union-attr]
    },
    "keras-file": {
        "key_dense/vars/0": lambda p: np.asarray(p.key.kernel),
        "key_dense/vars/1": lambda p: np.asarray(p.key.bias),
        "output_dense/vars/0": lambda p: np.asarray(p.out.kernel),  # type: ignore[union-attr]
    },
    "flax": {
        "key/kernel": lambda p: np.asarray(p.key.kernel),
        "out/kernel": lambda p: np.asarray(p.out.kernel),  # type: ignore[union-attr]
        "query_ln/scale": lambda p: np.asarray(p.query_norm),
        "key_ln/scale": lambda p: np.asarray(p.key_norm),
    },
}


def flat(projection: Projection) -> NDArray:
    """`(N H) D`: a matrix as nn.Linear keeps it."""
    kernel = np.asarray(projection.kernel)
    return kernel.reshape(len(kernel), -1).T


def bias(projection: Projection | None) -> NDArray:
    """A bias as one axis."""
    assert projection is not None
    return np.asarray(projection.bias).ravel()


def out(params: MHAParams) -> NDArray:
    """`(N h) Do`."""
    assert params.out is not None
    kernel = np.asarray(params.out.kernel)
    return kernel.reshape(-1, kernel.shape[-1])


@LAYOUTS
def test_layouts_follow_the_formulas(name: str) -> None:
    layout = attention_blocks.named(name)
    params = params_of(layout)
    state = transform.export_params(layout, params, layout.semantics)
    for key, formula in FORMULAS[name].items():
        np.testing.assert_array_equal(state[key], formula(params))


@pytest.mark.slow_variants("*", "!torch-*", "!*-everything")
@EVERY
def test_no_memory_is_shared_on_the_way_in(config: Config) -> None:
    layer = layers.build(config)
    before = layers.snapshot(layer)
    params, _ = read(layer)
    for name, array in leaves(params).items():
        assert isinstance(array, np.ndarray), name
        assert array.flags.owndata or array.base.flags.owndata, name  # type: ignore[union-attr]
        array[...] = 7.0  # a shared buffer would show it
    assert_identical(layers.snapshot(layer), before)


@pytest.mark.slow_variants("*", "!torch-*", "!*-output_shape", "!l*-everything", "!nnx-everything")
@EVERY
def test_no_memory_is_shared_on_the_way_out(config: Config) -> None:
    params, semantics = read(layers.build(config))
    expected = {name: np.array(array) for name, array in leaves(params).items()}
    layer = write(config.framework, params, semantics)
    made = layers.snapshot(layer)
    for array in leaves(params).values():
        np.asarray(array)[...] = 7.0
    assert_identical(layers.snapshot(layer), made)
    assert_identical(read(layer)[0], expected)


@LAYOUTS
def test_flat_dicts_share_no_memory_and_change_nothing(name: str) -> None:
    layout = attention_blocks.named(name)
    params = params_of(layout)
    expected = {leaf: np.array(array) for leaf, array in leaves(params).items()}
    state = transform.export_params(layout, params, layout.semantics)
    kept = {key: array.copy() for key, array in state.items()}
    again, _ = transform.import_params([layout], state, num_heads=params.query.kernel.shape[-2])
    for array in state.values():
        for side in (params, again):
            for leaf, theirs in leaves(side).items():
                assert not np.shares_memory(array, np.asarray(theirs)), leaf
    assert_identical(params, expected)
    assert_identical(state, kept)


def test_every_leaf_owns_its_memory() -> None:
    """Writing into one of three leaves of a packed array leaves the other two."""
    state = layers.snapshot(layers.build(layers.configs("torch")[0]))
    params, _ = torch.import_params(state, num_heads=layers.configs("torch")[0].N)
    key = np.array(params.key.kernel)
    np.asarray(params.query.kernel)[...] = 7.0
    np.testing.assert_array_equal(params.key.kernel, key)


def test_torch_memory_is_copied_both_ways() -> None:
    import torch as framework

    tensor = framework.arange(6.0).reshape(2, 3).requires_grad_()
    array = to_numpy(tensor.T)
    assert array.flags.c_contiguous
    array[...] = 7.0
    assert tensor.sum().item() == 15.0
    ours = np.arange(6.0).reshape(2, 3)
    theirs = to_torch(ours)
    theirs.zero_()
    assert ours.sum() == 15.0


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn"])
def test_torch_tensors_keep_dtype_and_bits(name: str) -> None:
    """Every bit pattern of one and two bytes, NaN payloads and subnormals included."""
    dtype = np.dtype(name)
    width: Any = {1: np.uint8, 2: np.uint16}.get(dtype.itemsize)
    if width is None:
        raw = np.random.default_rng(0).integers(0, 256, 1000 * dtype.itemsize, np.uint8)
        array = raw.view(dtype)
    else:
        array = np.arange(np.iinfo(width).max + 1, dtype=width).view(dtype)
    tensor = to_torch(array)
    assert str(tensor.dtype) == f"torch.{name}"
    assert to_numpy(tensor).dtype == dtype
    assert to_numpy(tensor).tobytes() == array.tobytes()


def test_huggingface_bert_reads_its_other_layers_and_leaves_it() -> None:
    params = params_of(attention_blocks.named("bert"))
    state = huggingface.export_params(params, prefix="encoder.layer.0.attention")
    norm = {"encoder.layer.0.attention.output.LayerNorm.weight": np.ones(24)}
    again, _ = huggingface.import_params(
        state | norm, num_heads=N, prefix="encoder.layer.0.attention"
    )
    assert_identical(params, again)


def swap(entries: tuple[Entry, ...], key: str, **changes: Any) -> tuple[Entry, ...]:
    """A table with one entry changed."""
    assert key in [entry.key for entry in entries]
    return tuple(entry._replace(**changes) if entry.key == key else entry for entry in entries)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("out_proj.weight", {"axes": "(N h) Do"}),
        ("in_proj_weight", {"axes": "(qkv H N) Dq"}),
        ("in_proj_weight", {"axes": "(N qkv H) Dq"}),
        ("in_proj_weight", {"leaves": ("key.kernel", "query.kernel", "value.kernel")}),
        ("in_proj_bias", {"leaves": ("query.bias", "value.bias", "key.bias")}),
        ("bias_k", {"axes": "1 1 (H N)"}),
    ],
)
def test_a_wrong_table_is_seen(key: str, changes: dict[str, Any]) -> None:
    """The formulas catch each of the known errors that every shape check lets through."""
    layout = attention_blocks.named("torch")
    params = params_of(layout)
    wrong = replace(layout, entries=swap(layout.entries, key, **changes))
    state = transform.export_params(wrong, params, layout.semantics)
    formula = FORMULAS["torch"][key]
    assert state[key].shape == formula(params).shape
    assert not np.array_equal(state[key], formula(params))
