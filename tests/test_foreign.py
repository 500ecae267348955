"""Tensors of other frameworks, lists and missing axes: the message says what to do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jaxmha
from jaxmha import KVCache, Mask, Projection
from jaxmha.flax import attention_fn
from jaxmha.flax.linen import MultiHeadDotProductAttention
from jaxmha.flax.nnx import MultiHeadAttention
from tests import drawn

pytestmark = pytest.mark.usefixtures("no_shape_hook")
X = np.ones((2, 3, 2, 3), np.float32)
FEATURES = np.ones((2, 3, 6), np.float32)
PARAMS = drawn.params(num_heads=2, features=6)


def _attention(**arguments: Any) -> Any:
    return jaxmha.dot_product_attention(**({"query": X, "key": X, "value": X} | arguments))


def _layer(*inputs: Any, **options: Any) -> Any:
    return jaxmha.multi_head_attention(PARAMS, *inputs, **options)


def _nnx(*inputs: Any, **options: Any) -> Any:
    return MultiHeadAttention(2, 6, rngs=nnx.Rngs(0))(*inputs, **options)


def _linen(*inputs: Any, **options: Any) -> Any:
    layer = MultiHeadDotProductAttention(num_heads=2)
    return layer.apply(layer.init(jax.random.key(0), FEATURES), *inputs, **options)


# A call of one tensor made of an array, and that array.
CALLS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "query": (lambda x: _attention(query=x), X),
    "value": (lambda x: _attention(value=x), X),
    "bias": (lambda x: _attention(bias=x), X[0, :, 0]),
    "mask": (lambda x: _attention(mask=x), X[0, :, 0] > 0),
    "scale": (lambda x: _attention(scale=x), np.float32(1)),
    "dropout_key": (
        lambda x: _attention(dropout_rate=0.5, dropout_key=x),
        np.array([1, 2], np.uint32),
    ),
    "dropout_key of a layer": (
        lambda x: _layer(FEATURES, dropout_key=x, semantics=jaxmha.Semantics(dropout_rate=0.5)),
        np.array([1, 2], np.uint32),
    ),
    "query_seq_lengths": (lambda x: _attention(query_seq_lengths=x), np.array([1, 2])),
    "key_value_seq_lengths": (lambda x: _attention(key_value_seq_lengths=x), np.array([1, 2])),
    "segment_ids": (lambda x: _attention(segment_ids=x), np.ones((2, 3), int)),
    "query of a layer": (_layer, FEATURES),
    "mask of a layer": (lambda x: _layer(FEATURES, mask=x), np.ones((3, 3), bool)),
    "bias of a layer": (lambda x: _layer(FEATURES, bias=x), np.ones((3, 3), np.float32)),
    "params.key.kernel": (
        lambda x: jaxmha.multi_head_attention(PARAMS._replace(key=Projection(x)), FEATURES),
        np.ones((6, 2, 3), np.float32),
    ),
    "params.value.bias": (
        lambda x: jaxmha.project(
            PARAMS._replace(value=PARAMS.value._replace(bias=x)), jnp.asarray(FEATURES)
        ),
        np.ones((2, 3), np.float32),
    ),
    "cache.key": (
        lambda x: jaxmha.prefill(PARAMS, FEATURES, KVCache.empty(PARAMS, 2, 4)._replace(key=x)),
        np.ones((2, 2, 4, 3), np.float32),
    ),
    "inputs_q of nnx": (_nnx, FEATURES),
    "mask of nnx": (lambda x: _nnx(FEATURES, mask=x), np.ones((3, 3), bool)),
    "bias of nnx": (lambda x: _nnx(FEATURES, bias=x), np.ones((3, 3), np.float32)),
    "inputs_q of linen": (_linen, FEATURES),
    "mask of linen": (lambda x: _linen(FEATURES, mask=x), np.ones((3, 3), bool)),
    "query of attention_fn": (lambda x: attention_fn(x, X, X), X),
    "offset of Mask": (Mask.causal, np.array([1, 2])),
    "key_value of lengths": (lambda x: Mask.lengths(key_value=x), np.array([1, 2])),
    "query of padding": (lambda x: Mask.padding(query=x), np.ones((2, 3), bool)),
    "query_ids of segments": (
        lambda x: Mask.segments(query_ids=x, key_value_ids=x),
        np.ones((2, 3), int),
    ),
    "mask of dense": (Mask.dense, np.ones((2, 3), bool)),
    "mask of and": (lambda x: Mask.causal() & x, np.ones((2, 3), bool)),
}


@pytest.mark.parametrize("what", CALLS)
def test_torch_tensors(what: str) -> None:
    call, array = CALLS[what]
    named = what.split(" of ")[0].replace(".", r"\.")
    remedy = (
        rf"{named} must be an array .*torch\.Tensor: give {named}\.detach\(\)\.cpu\(\)\.numpy\(\)"
    )
    with pytest.raises(TypeError, match=remedy):
        call(torch.from_numpy(np.asarray(array)))


def test_torch_tensors_that_numpy_lacks() -> None:
    with pytest.raises(TypeError, match=r"give query\.float\(\)\.detach\(\)\.cpu\(\)\.numpy\(\)"):
        _attention(query=torch.ones(2, 3, 2, 3, dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["query", "mask of a layer", "key_value of lengths"])
def test_tensorflow_tensors(what: str) -> None:
    import tensorflow

    call, array = CALLS[what]
    with pytest.raises(TypeError, match=r"tensorflow\.EagerTensor: give .*\.numpy\(\)"):
        call(tensorflow.constant(array))


@pytest.mark.slow
@pytest.mark.parametrize("what", CALLS)
def test_arrays_are_taken(what: str) -> None:
    call, array = CALLS[what]
    call(jnp.asarray(array))


@pytest.mark.parametrize("what", ["query", "query_seq_lengths", "key_value of lengths"])
def test_lists(what: str) -> None:
    call, array = CALLS[what]
    with pytest.raises(TypeError, match=r"got list: make it one with np\.asarray"):
        call(array.tolist())


def test_axes_that_are_missing() -> None:
    keys, pairs = np.ones((5, 7), bool), np.ones((5, 3, 7), bool)
    query, key = np.ones((5, 3, 2, 3), np.float32), np.ones((5, 7, 2, 3), np.float32)
    heads = {"query": query, "key": key, "value": key}
    remedy = r"mask\[\.\.\., None, None, :\], or Mask\.padding\(key_value=mask\)"
    with pytest.raises(ValueError, match=remedy):
        _attention(**heads, mask=keys)
    with pytest.raises(ValueError, match=r"mask\[\.\.\., None, :, :\]"):
        _attention(**heads, mask=pairs)
    with pytest.raises(ValueError, match=r"bias\[\.\.\., None, None, :\]"):
        _attention(**heads, bias=keys.astype(np.float32))
    with pytest.raises(ValueError, match=remedy):
        _layer(query.reshape(5, 3, 6), key.reshape(5, 7, 6), mask=keys)


def test_operators_of_masks() -> None:
    array = np.tri(3, dtype=bool)
    for mask in (
        Mask.lengths(key_value=np.array([2])) & array,
        array & Mask.lengths(key_value=np.array([2])),
        jnp.asarray(array) & Mask.lengths(key_value=np.array([2])),
    ):
        assert isinstance(mask, Mask)
        want = array & (np.arange(3) < 2)
        np.testing.assert_array_equal(np.asarray(mask.to_array(3, 3))[0, 0], want)
    with pytest.raises(TypeError, match="must be Boolean"):
        Mask.causal() & np.ones((3, 3))
    operators: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a | b,
        lambda a, b: a ^ b,
        lambda a, _: ~a,
    ]
    for operator in operators:
        for other in (Mask.causal(), array):
            with pytest.raises(TypeError, match=r"Mask\.dense\(~?a\.to_array"):
                operator(Mask.causal(), other)


ABSENT: tuple[Any, ...] = (np.longdouble, object, "U1", ">f4")


@pytest.mark.parametrize("dtype", ABSENT)
@pytest.mark.parametrize("name", ["query", "value", "bias", "query of a layer", "inputs_q of nnx"])
def test_dtypes_that_jax_lacks(name: str, dtype: Any) -> None:
    call, array = CALLS[name]
    with pytest.raises(TypeError, match=rf"{name.split()[0]} is .*a dtype that JAX lacks: cast"):
        call(array.astype(dtype))


def test_other_places_of_dtypes_that_jax_lacks() -> None:
    wide = jax.tree.map(lambda x: np.asarray(x).astype(np.longdouble), PARAMS)
    for run in (jaxmha.multi_head_attention, jaxmha.project):
        with pytest.raises(TypeError, match=r"params\.query\.kernel is .* that JAX lacks"):
            run(wide, FEATURES)
    with pytest.raises(TypeError, match="segment_ids is object, a dtype that JAX lacks"):
        _attention(segment_ids=np.ones((2, 3), object))
    cache = KVCache.empty(PARAMS, 2, 4)
    with pytest.raises(TypeError, match=r"cache\.key is .* that JAX lacks"):
        jaxmha.decode_step(PARAMS, FEATURES, cache._replace(key=wide.key.kernel))


@pytest.mark.parametrize("dtype", [*ABSENT[:3], "frob", 3])
def test_dtype_arguments_are_named(dtype: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "softmax_dtype": lambda: _attention(softmax_dtype=dtype),
        "dtype": lambda: KVCache.empty(PARAMS, 1, 2, dtype),
        "dtype ": lambda: jaxmha.init_params(
            jax.random.key(0), num_heads=2, features=6, dtype=dtype
        ),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name.strip()} must be a dtype that JAX has, such"):
            call()


def test_integers_of_another_byte_order_are_no_foreign_dtype() -> None:
    lengths = np.array([1, 3])
    out = _attention(key_value_seq_lengths=lengths.astype(">i8"))
    np.testing.assert_array_equal(out, _attention(key_value_seq_lengths=lengths))


@pytest.mark.parametrize(
    "name",
    ["query", "bias", "mask", "key_value_seq_lengths", "query of a layer", "inputs_q of nnx"],
)
def test_masked_arrays_of_numpy(name: str) -> None:
    """JAX reads the values under the mask, in silence."""
    call, array = CALLS[name]
    with pytest.raises(TypeError, match=rf"{name.split()[0]} is a masked array.*\.filled\(0\)"):
        call(np.ma.masked_array(array, mask=np.zeros(np.shape(array), bool)))
