"""Each preset returns the output of the path that it is named after, against the live framework."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import torch

from jaxmha import MHAParams, Projection, Semantics, dot_product_attention, multi_head_attention
from jaxmha.converters import flax as to_flax
from jaxmha.converters import keras as to_keras
from jaxmha.converters import torch as to_torch
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.layout.arrays import to_torch as tensor
from jaxmha.semantics import PATHS
from tests.drawn import to_jax
from tests.promotion import foreign
from tests.tolerance import LAYER, assert_close

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow")  # nnx's own
attention_layer: Any = partial(multi_head_attention, implementation="reference")
attention: Any = partial(dot_product_attention, implementation="reference")
B, S, N, H = 3, 5, 2, 11
D = N * H
HALF = ("bfloat16", "float16")
# 16 floors of float32 are 1e-6 of the scale; a layer in half precision rounds in between.
FACTOR = {"float32": 0.5, "bfloat16": LAYER, "float16": LAYER}

Output = tuple[Any, Any]


def torch_layer(
    path: str, params: MHAParams, x: NDArray, keep: NDArray, rate: float = 0.0
) -> Output:
    layer = to_torch.to_module(params, Semantics(dropout_rate=rate)).train(rate > 0)
    query = tensor(x)
    with torch.set_grad_enabled(path != "native"):
        out, weights = layer(
            query,
            query,
            query,
            attn_mask=tensor(np.repeat(~keep, layer.num_heads, 0)),
            need_weights=path != "sdpa",
            average_attn_weights=False,
        )
    return out, weights


def keras_layer(
    path: str, params: MHAParams, x: NDArray, keep: NDArray, rate: float = 0.0
) -> Output:
    layer = to_keras.to_module(params, Semantics(dropout_rate=rate))
    scores = path == "scores"
    with foreign():
        output = layer(x, x, attention_mask=keep, return_attention_scores=scores, training=rate > 0)
    return (output[0], output[1]) if scores else (output, None)


def linen_layer(params: MHAParams, x: NDArray, keep: NDArray, rate: float = 0.0) -> Output:
    layer, variables = to_flax.to_module(
        params, Semantics(dropout_rate=rate, dropout_broadcast=("B", "N")), kind="linen"
    )
    with foreign():
        out, sown = layer.clone(deterministic=rate == 0).apply(
            variables,
            x,
            mask=keep[:, None],
            sow_weights=True,
            rngs={"dropout": jax.random.key(0)},
            mutable="intermediates",
        )
    return out, sown["intermediates"]["attention_weights"][0]


def nnx_layer(path: str, params: MHAParams, x: NDArray, keep: NDArray) -> Output:
    layer = to_flax.to_module(params, kind="nnx")
    sow = path == "weights"
    with foreign():
        out = layer(to_jax(x), mask=to_jax(keep[:, None]), sow_weights=sow)
    return out, layer.attention_weights[0] if sow else None


class Live(NamedTuple):
    """A path of a live layer: its preset, and a call of (params, x, keep)."""

    preset: Callable[..., Semantics]
    call: Callable[..., Output]


LIVE = {
    "torch weights": Live(partial(Semantics.torch, "weights"), partial(torch_layer, "weights")),
    "torch sdpa": Live(partial(Semantics.torch, "sdpa"), partial(torch_layer, "sdpa")),
    "torch native": Live(partial(Semantics.torch, "native"), partial(torch_layer, "native")),
    "keras fused": Live(partial(Semantics.keras, "fused"), partial(keras_layer, "fused")),
    "keras scores": Live(partial(Semantics.keras, "scores"), partial(keras_layer, "scores")),
    "linen": Live(Semantics.flax, linen_layer),
    "nnx weights": Live(partial(Semantics.flax, "weights"), partial(nnx_layer, "weights")),
    "nnx fused": Live(partial(Semantics.flax, "fused"), partial(nnx_layer, "fused")),
}


def layer_params(dtype: str) -> MHAParams:
    """Random weights and biases."""
    rng = np.random.default_rng(0)

    def affine(*shape: int, bias: tuple[int, ...]) -> Projection:
        kernel, added = (
            (0.3 * rng.standard_normal(x)).astype(jnp.dtype(dtype)) for x in (shape, bias)
        )
        return Projection(kernel, added)

    query, key, value = (affine(D, N, H, bias=(N, H)) for _ in range(3))
    return MHAParams(query, key, value, affine(N, H, D, bias=(D,)))


def inputs(dtype: str) -> tuple[NDArray, NDArray]:
    """x, and which pairs may attend: a query has nothing left, and so has a whole batch row."""
    rng = np.random.default_rng(1)
    keep = rng.random((B, S, S)) < 0.6
    keep[0, 2] = keep[1] = False
    return rng.standard_normal((B, S, D)).astype(jnp.dtype(dtype)), keep


@pytest.mark.everyday(dtype=["float32"])
# Others compute as their paths in the tests of their masks.
@pytest.mark.everyday(name=["torch native", "nnx fused"])
@pytest.mark.parametrize("dtype", ["float32", *HALF])
@pytest.mark.parametrize("name", LIVE)
def test_a_layer_outputs_as_its_path(name: str, dtype: str) -> None:
    params, (x, keep) = layer_params(dtype), inputs(dtype)
    out, weights = (None if a is None else to_numpy(a) for a in LIVE[name].call(params, x, keep))
    semantics = LIVE[name].preset(dtype=dtype if dtype in HALF else None)
    ours, ours_weights = attention_layer(
        params, x, mask=keep[:, None], semantics=semantics, return_weights=True
    )
    assert out is not None
    assert np.isnan(out[1]).all() == (semantics.fully_masked == "nan")
    assert_close(ours, out, "out", factor=FACTOR[dtype])
    if weights is not None:
        assert weights.dtype == dtype
        assert_close(ours_weights, weights, "weights", factor=FACTOR[dtype])


@pytest.mark.everyday(name=["torch weights", "keras scores", "nnx fused"])
@pytest.mark.slow_variants("keras scores*", "nnx fused")
@pytest.mark.parametrize("name", LIVE)
def test_float16_overflows_where_the_path_does(name: str) -> None:
    """Logits of 8e4: NaN where the softmax is in float16, the mean of equal values elsewhere."""
    width = 64
    eye = np.eye(N * width, dtype=np.float16)
    inside = Projection(eye.reshape(-1, N, width), np.zeros((N, width), np.float16))
    outside = Projection(eye.reshape(N, width, -1), np.zeros(N * width, np.float16))
    params = MHAParams(inside, inside, inside, outside)
    x = np.full((1, 3, N * width), 100, np.float16)
    live = to_numpy(LIVE[name].call(params, x, np.ones((1, 3, 3), bool))[0])
    preset = LIVE[name].preset(dtype="float16")
    ours = np.asarray(attention_layer(params, x, semantics=preset))
    assert np.isnan(live).all() == (preset.softmax_dtype == np.float16)
    np.testing.assert_array_equal(ours, live)


@pytest.mark.parametrize("logit", [-2e4, -4e4])
def test_the_constant_of_keras_shows_below_it(logit: float) -> None:
    """Two equal logits in float16 next to a blocked one: Keras' row is 0 where they are below -3e4."""
    size = 4
    zero = np.zeros((size, 1, size), np.float16)
    zero[0, 0, 0] = 1
    inside = Projection(zero, np.zeros((1, size), np.float16))
    params = MHAParams(inside, inside, inside, Projection(zero.transpose(1, 2, 0)))
    params = params._replace(out=Projection(np.eye(size, dtype=np.float16)[None], zero[1, 0]))
    query, key = np.zeros((2, 1, 3, size), np.float16)
    query[..., 0], key[..., 0] = -200, -logit / 100  # times the scale 1/2
    keep = np.array([[[True, True, False]]])
    layer = to_keras.to_module(params)
    with foreign():
        live = layer(query, key, attention_mask=keep, return_attention_scores=True)
    ours = attention_layer(
        params,
        query,
        key,
        mask=keep[:, None],
        semantics=Semantics.keras("scores", dtype="float16"),
        return_weights=True,
    )
    exact, shown = np.array([0.5, 0.5, 0]), logit < -3e4
    np.testing.assert_array_equal(np.asarray(ours[1])[0, 0, 0], exact)
    np.testing.assert_array_equal(to_numpy(live[1])[0, 0, 0], 0 * exact if shown else exact)


KEPT = np.ones((B, S, S), bool)
RATE = 0.5


@pytest.mark.slow_variants("keras scores*", "linen")
@pytest.mark.parametrize("name", ["torch weights", "keras scores", "linen"])
def test_weights_are_those_before_or_after_dropout(name: str) -> None:
    """After it, rows no longer sum to 1."""
    torch.manual_seed(0)
    params, (x, _) = layer_params("float32"), inputs("float32")
    live = to_numpy(LIVE[name].call(params, x, KEPT, rate=RATE)[1])
    framework, path = {"linen": ("flax", "weights")}.get(name, name.split())
    which: Any = PATHS[framework][path].weights
    semantics = LIVE[name].preset(dropout_rate=RATE)
    clean, shown = (
        np.asarray(
            attention_layer(
                params, x, semantics=semantics, return_weights=kind, dropout_key=jax.random.key(0)
            )[1]
        )
        for kind in ("before_dropout", which)
    )
    for weights in (live, shown):
        if which == "before_dropout":
            assert_close(weights, clean, factor=FACTOR["float32"])
            continue
        present = weights != 0
        assert 0 < present.sum() < present.size
        assert_close(weights[present], clean[present] / (1 - RATE), factor=FACTOR["float32"])


def shared(draws: NDArray) -> set[str]:
    """Axes of BNTS along which every entry is the same."""
    return {axis for i, axis in enumerate("BNTS") if (draws == draws.take([0], i)).all()}


@pytest.mark.slow_variants("keras scores*", "linen")
@pytest.mark.parametrize("name", ["torch weights", "keras scores", "linen"])
def test_dropout_shares_draws_as_the_framework_does(name: str) -> None:
    """Queries and keys are 0 and values a unit matrix, so that outputs are what dropout keeps."""
    torch.manual_seed(0)
    if name.startswith("keras"):  # which imports TensorFlow as well
        keras.utils.set_random_seed(0)
    width = N * S
    zero = Projection(np.zeros((width, N, S), np.float32), np.zeros((N, S), np.float32))
    values = np.zeros((width, N, S), np.float32)
    values[:S] = np.eye(S)[:, None]
    outside = np.eye(width, dtype=np.float32).reshape(N, S, width)
    params = MHAParams(
        zero, zero, zero._replace(kernel=values), Projection(outside, np.zeros(width, np.float32))
    )
    x = np.zeros((B, S, width), np.float32)
    x[:, :, :S] = np.eye(S)
    live = to_numpy(LIVE[name].call(params, x, KEPT, rate=RATE)[0])
    semantics = LIVE[name].preset(dropout_rate=RATE)
    ours = attention_layer(params, x, semantics=semantics, dropout_key=jax.random.key(0))
    drawn = [np.asarray(out).reshape(B, S, N, S).transpose(0, 2, 1, 3) for out in (live, ours)]
    for out in drawn:
        np.testing.assert_allclose(np.unique(out), (0, 1 / S / (1 - RATE)), rtol=1e-6)
    assert shared(drawn[0]) == shared(drawn[1]) == set(semantics.dropout_broadcast)


def heads(dtype: str) -> tuple[NDArray, ...]:
    rng = np.random.default_rng(2)
    return tuple(rng.standard_normal((B, S, N, H)).astype(jnp.dtype(dtype)) for _ in range(3))


@pytest.mark.slow_variants("jax-float16", "torch_sdpa-float32", "torch_sdpa-bfloat16")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in ("torch_sdpa", "jax") for d in ("float32", *HALF)]
    + [("torch_sdpa", "float64")],
)
@pytest.mark.usefixtures("x64")
def test_attention_alone(name: str, dtype: str) -> None:
    query, key, value = heads(dtype)
    keep = inputs("float32")[1][:, None]
    live: Any
    if name == "jax":
        with foreign():
            live = jax.nn.dot_product_attention(query, key, value, mask=to_jax(keep))
        semantics = Semantics.jax()
    else:
        turned = [tensor(x).transpose(1, 2) for x in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(
            turned[0], turned[1], turned[2], tensor(keep)
        )
        live, semantics = out.transpose(1, 2), Semantics.torch_sdpa()
    ours = attention(
        query,
        key,
        value,
        mask=keep,
        fully_masked=semantics.fully_masked,
        softmax_dtype=semantics.softmax_dtype,
    )
    output = to_numpy(live)
    assert output.dtype == dtype
    assert_close(ours, output)
    empty = output[1]
    assert (empty == 0).all() == (semantics.fully_masked == "zero")


def test_softmax_of_jax_is_float32_for_float64(x64: None) -> None:
    """Which shows: the weights are rounded."""
    query, key, value = heads("float64")
    with foreign():
        live = to_numpy(jax.nn.dot_product_attention(query, key, value))
    exact = np.asarray(attention(query, key, value))
    ours = attention(query, key, value, softmax_dtype=Semantics.jax().softmax_dtype)
    for rounded in (live, np.asarray(ours)):
        assert 1e-9 < np.abs(rounded - exact).max() < 1e-6


def test_rows_of_the_table() -> None:
    assert {name: set(paths) for name, paths in PATHS.items()} == {
        "torch": {"weights", "sdpa", "native"},
        "torch_sdpa": {"sdpa"},
        "keras": {"fused", "scores"},
        "flax": {"weights", "fused"},
        "jax": {"fused"},
        "equinox": set(PATHS["equinox"]),
        "haiku": set(PATHS["haiku"]),
    }
    assert Semantics.torch() == Semantics.torch("weights") == Semantics(fully_masked="nan")
    assert Semantics.torch("sdpa", dtype="bfloat16") == Semantics.torch_sdpa() == Semantics()
    assert Semantics.keras(dropout_rate=0.3) == Semantics(
        fully_masked="mean", softmax_dtype="float32", dropout_rate=0.3
    )
    assert Semantics.flax(dropout_broadcast=()).dropout_broadcast == ()
    assert Semantics.flax("fused").softmax_dtype == Semantics.jax().softmax_dtype == np.float32
    assert hash(Semantics.jax(scale=0.5)) == hash(Semantics.jax(scale=0.5))


@pytest.mark.usefixtures("no_shape_hook")
def test_unknown_paths_are_named() -> None:
    with pytest.raises(ValueError, match=r"path must be one of \('weights', 'sdpa', 'native'\)"):
        Semantics.torch("fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path must be one of"):
        Semantics.keras("einsum")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        Semantics.jax(rate=0.1)
