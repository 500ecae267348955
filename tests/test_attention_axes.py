"""Attention over any axes, and windows that belong to a layer."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import KVCache, Mask, Semantics, multi_head_attention
from jaxmha.flax import linen, nnx
from tests import drawn
from tests.drawn import to_jax
from tests.tolerance import assert_close

PARAMS = drawn.params(num_heads=3, features=5, head_dim=2, value_head_dim=4, out_features=11)
RNG = np.random.default_rng(0)
X = to_jax(RNG.standard_normal((2, 7, 3, 13, 5)), "float32")


@pytest.mark.slow_variants("*", "!axes5")
@pytest.mark.parametrize("axes", [(1,), (3,), (-2,), (1, 3), (3, 1), (3, 1, -3), (0, 3)])
def test_axes_are_moved_and_flattened(axes: tuple[int, ...]) -> None:
    over = tuple(axis % 5 for axis in axes)
    others = [axis for axis in range(4) if axis not in over]
    moved = np.transpose(X, (*others, *over, 4))
    flat = to_jax(moved.reshape(*moved.shape[: len(others)], -1, 5))
    want, weights = multi_head_attention(PARAMS, flat, is_causal=True, return_weights=True)
    semantics = Semantics(attention_axes=axes)

    @jax.jit
    def run(x: Any) -> Any:
        call: Any = partial(multi_head_attention, PARAMS, is_causal=True, return_weights=True)
        (out, weights), pull = jax.vjp(lambda x: call(x, semantics=semantics), x)
        return out, weights, pull((jnp.ones_like(out), jnp.zeros_like(weights)))[0]

    got, split, grad = run(X)
    assert got.shape == (*X.shape[:-1], 11)
    back = np.transpose(got, (*others, *over, 4)).reshape(want.shape)
    assert_close(back, np.asarray(want))
    assert_close(split.reshape(weights.shape), np.asarray(weights))
    assert np.isfinite(np.asarray(grad)).all()


def test_masks_and_biases_of_several_axes() -> None:
    semantics = Semantics(attention_axes=(1, 3))
    keys = X[:, :2]
    bias = to_jax(RNG.standard_normal((3, 1, 1, 1, 2, 13)), "float32")
    allowed = RNG.random((2, 1, 1, 7, 1, 1, 13)) < 0.6
    moved, moved_keys = (jnp.moveaxis(x, 1, 2) for x in (X, keys))
    whole = np.broadcast_to(allowed, (2, 1, 1, 7, 13, 2, 13)).reshape(2, 1, 1, 91, 26)
    added = np.broadcast_to(bias, (3, 1, 7, 13, 2, 13)).reshape(3, 1, 91, 26)
    want = multi_head_attention(
        PARAMS,
        moved.reshape(2, 3, 91, 5),
        moved_keys.reshape(2, 3, 26, 5),
        mask=whole,
        bias=to_jax(added.reshape(1, 3, 1, 91, 26)[0][:, :]),
    )
    got = multi_head_attention(PARAMS, X, keys, mask=allowed, bias=bias, semantics=semantics)
    back = np.moveaxis(np.asarray(got), 1, 2).reshape(2, 3, 91, 11)
    assert_close(back, np.asarray(want))


WINDOW = Semantics(local_window_size=(2, 1))


def test_a_window_of_the_layer() -> None:
    x = X[:, :, 0, 0]
    want = np.asarray(multi_head_attention(PARAMS, x, mask=Mask.window(2, 1)))
    assert_close(multi_head_attention(PARAMS, x, semantics=WINDOW), want)
    both = multi_head_attention(PARAMS, x, semantics=WINDOW, is_causal=True, mask=Mask.window(3, 3))
    narrow = multi_head_attention(PARAMS, x, mask=Mask.window(2, 0))
    assert_close(both, np.asarray(narrow))


def test_a_window_of_the_layer_in_steps() -> None:
    params = drawn.params(num_heads=3, features=5, head_dim=2)
    x = X[:, :, 0, 0]
    want = np.asarray(multi_head_attention(params, x, semantics=WINDOW, is_causal=True))
    out, cache = jaxmha.prefill(params, x[:, :4], KVCache.empty(params, 2, 5), semantics=WINDOW)
    outs = [out]
    for t in range(4, 7):
        out, cache = jaxmha.decode_step(params, x[:, t : t + 1], cache, semantics=WINDOW)
        outs.append(out)
    assert_close(jnp.concatenate(outs, 1), want)


@pytest.mark.parametrize("module", [linen, nnx])
def test_modules_have_the_window(module: Any) -> None:
    params = drawn.params(num_heads=3, features=6)
    x = to_jax(RNG.standard_normal((2, 7, 6)), "float32")
    want = np.asarray(multi_head_attention(params, x, semantics=WINDOW))
    if module is linen:
        layer, variables = linen.MultiHeadDotProductAttention.from_params(params, WINDOW)
        got = layer.apply(variables, x)
    else:
        got = nnx.MultiHeadAttention.from_params(params, WINDOW)(x)
    assert_close(got, want)


def test_only_whole_calls_have_attention_axes() -> None:
    params = drawn.params(num_heads=3, features=6)
    semantics = Semantics(attention_axes=(1,))
    cache = KVCache.empty(params, 2, 7)
    x = jnp.zeros((2, 7, 6))
    with pytest.raises(ValueError, match=r"attention_axes=\(1,\) is for multi_head_attention"):
        jaxmha.prefill(params, x, cache, semantics=semantics)
    with pytest.raises(ValueError, match=r"attention_axes=\(1,\) is for multi_head_attention"):
        nnx.MultiHeadAttention.from_params(params, semantics)


@pytest.mark.parametrize(
    ("fields", "error", "printed"),
    [
        ({"attention_axes": (1, 1)}, ValueError, r"different axes, and not the last"),
        ({"attention_axes": (-1,)}, ValueError, r"not the last"),
        ({"attention_axes": ()}, ValueError, r"one or more integers"),
        ({"attention_axes": (1.0,)}, TypeError, r"must be integers"),
        ({"local_window_size": (1, 2, 3)}, ValueError, r"w or \(left, right\)"),
        ({"local_window_size": (True, 2)}, TypeError, r"integers or None"),
        ({"local_window_size": (-1, 2)}, ValueError, r"sides of local_window_size must be >= 0"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], error: type[Exception], printed: str) -> None:
    with pytest.raises(error, match=printed):
        Semantics(**fields)


def test_fields_are_normalised() -> None:
    assert Semantics(local_window_size=3).local_window_size == (3, 3)  # type: ignore[arg-type]
    assert Semantics(local_window_size=(None, None)) == Semantics()
    assert Semantics(attention_axes=[2, 1]).attention_axes == (2, 1)  # type: ignore[arg-type]
    assert hash(replace(WINDOW, attention_axes=(1,)))


@pytest.mark.parametrize(
    ("axes", "shapes", "printed"),
    [
        ((4,), {}, r"attention_axes=\(4,\): expected different axes before the last"),
        ((1, -4), {}, r"expected different axes before the last"),
        ((1,), {"key": (2, 7, 2, 13, 5)}, r"key: expected 5 axes, those outside"),
        ((1,), {"key": (2, 7, 5)}, r"key: expected 5 axes"),
        ((1,), {"value": (2, 6, 3, 13, 5)}, r"value: expected 5 axes"),
        ((1, 2), {"mask": (3, 7, 2, 7, 3)}, r"mask: expected axes .* with \*T=\(7, 3\)"),
    ],
)
def test_wrong_features(axes: Any, shapes: dict[str, Any], printed: str) -> None:
    given: dict[str, Any] = {
        name: jnp.zeros(shape, bool if name == "mask" else "f") for name, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=printed):
        multi_head_attention(PARAMS, X, semantics=Semantics(attention_axes=axes), **given)
