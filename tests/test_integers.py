"""Integers of every dtype and size mean what they say, or are refused by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmha
from jaxmha import KVCache, Mask, Semantics, integers
from jaxmha.flax.nnx import MultiHeadAttention
from jaxmha.flax.settings import read_mask
from tests import drawn

B, T = 2, 5
RNG = np.random.default_rng(0)
X = RNG.standard_normal((B, T, 2, 3)).astype(np.float32)
PARAMS = drawn.params(num_heads=2, features=6)
FEATURES = RNG.standard_normal((B, T, 6)).astype(np.float32)
x64 = pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])

# Further than every position, of every dtype that holds such a number.
LARGE: dict[str, Any] = {
    "int8": np.full(B, 127, np.int8),
    "uint8": np.full(B, 255, np.uint8),
    "int4": np.full(B, 7, ml_dtypes.int4),
    "big endian": np.full(B, 2**31, ">i8"),
    "uint32": np.full(B, 2**32 - 1, np.uint32),
    "uint64": np.full(B, 2**64 - 1, np.uint64),
    **{f"int64 {n}": np.full(B, n) for n in (2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1)},
    "uint32 of JAX": jnp.full(B, 2**32 - 1, jnp.uint32),
    "int8 of JAX": jnp.full(B, 127, jnp.int8),
}


@jax.jit
def compiled(mask: Mask) -> Any:
    """One program for the masks of a dtype."""
    return mask.to_array(T, T)


def attend(mask: Mask | None = None, x: Any = X, **options: Any) -> Any:
    return np.asarray(
        jaxmha.dot_product_attention(x, x, x, mask=mask, **options, implementation="reference")
    )


@pytest.mark.slow_variants("*-x64", "!uint64-x64", "!int64 1099511627776-x64", "!int8 of JAX-x64")
@x64
@pytest.mark.parametrize("name", LARGE)
def test_bounds_beyond_every_position(name: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        large = LARGE[name]
        full = attend()
        for mask in (Mask.lengths(query=large, key_value=large), Mask.causal(large)):
            assert np.asarray(mask.to_array(T, T)).all()
            assert np.asarray(mask.to_array(T, T, np)).all()
            assert np.asarray(compiled(mask)).all()
            np.testing.assert_array_equal(attend(mask), full)
        keywords = {"query_seq_lengths": large, "key_value_seq_lengths": large}
        np.testing.assert_array_equal(attend(**keywords), full)
        jaxmha.explain(X, X, X, **keywords)


@x64
def test_bounds_of_few_bits_do_not_overflow(x64: bool) -> None:
    """Positions beyond 127, and their sums with an offset."""
    with jax.enable_x64(x64):
        for dtype in (np.int8, np.uint8, np.int16, np.uint64):
            mask = Mask.causal(np.array([100], dtype))
            want = np.arange(300) <= np.arange(300)[:, None] + 100
            for xp in (np, jnp):
                np.testing.assert_array_equal(np.asarray(mask.to_array(300, 300, xp))[0, 0], want)


@x64
def test_negative_bounds_leave_nothing(x64: bool) -> None:
    with jax.enable_x64(x64):
        low = np.full(B, -(2**63))
        for mask in (Mask.lengths(key_value=low), Mask.causal(low)):
            assert not attend(mask).any()


@pytest.mark.slow_variants("x64")
@x64
def test_bounds_in_layers_and_caches(x64: bool) -> None:
    from flax import nnx

    with jax.enable_x64(x64):
        mask = Mask.lengths(key_value=np.full(B, 2**32))
        layer = MultiHeadAttention(2, 6, rngs=nnx.Rngs(0))
        runs: tuple[Callable[[Mask], Any], ...] = (
            lambda mask: jaxmha.multi_head_attention(PARAMS, FEATURES, mask=mask),
            lambda mask: layer(FEATURES, mask=mask),
        )
        for run in runs:
            np.testing.assert_allclose(run(mask), run(Mask()), atol=1e-6)
        cache = KVCache.empty(PARAMS, B, 2 * T)
        with pytest.raises(ValueError, match=rf"lengths\[0\] is .*: expected 0 to {T}"):
            jaxmha.prefill(PARAMS, FEATURES, cache, mask=mask)


def test_numbers_of_a_mask_of_flax_are_not_cut() -> None:
    """Numbers other than zero attend, also where their lowest 32 bits are zero."""
    for values in (np.full((1, T), 2**32), np.full((1, T), 1e-300)):
        array = read_mask(values).array
        assert array is not None
        assert np.asarray(array).all()


IDS: dict[str, tuple[Any, Any]] = {
    "documents in the upper half": (np.array([[1, 1, 2, 2, 3]]) << 32,) * 2,
    "lowest bits alike": (np.array([[0, 2**32, 0, 2**33, 5]]), np.array([[5, 0, 0, 2**32, 7]])),
    "hashes": (np.array([[-(2**62), 2**62, 7, -7, 7]]), np.array([[2**62, -(2**62), -7, 0, 7]])),
    "unsigned": (np.array([[2**64 - 1, 2**63, 0, 3, 3]], np.uint64),) * 2,
    "unsigned and signed": (
        np.array([[2**64 - 1, 2**63, 0, 3, 3]], np.uint64),
        np.array([[-1, -(2**63), 0, 3, 4]]),
    ),
    "32 bits, unsigned and signed": (
        np.array([[2**32 - 1, 2**31, 0, 3, 3]], np.uint32),
        np.array([[-1, -(2**31), 0, 3, 4]], np.int32),
    ),
    "few bits": (np.array([[-1, 1, 2, 3, 3]], np.int8), np.array([[255, 1, 2, 3, 4]], np.uint8)),
    "JAX's unsigned": (jnp.array([[2**32 - 1, 0, 0, 3, 3]], jnp.uint32),) * 2,
    "JAX's and NumPy's": (
        jnp.array([[-1, 0, 0, 3, 3]], jnp.int32),
        np.array([[2**32 - 1, 0, 2**32, 3, 3]]),
    ),
}


@pytest.mark.slow_variants("*-x64", "!unsigned and signed-x64", "!JAX's and NumPy's-x64")
@x64
@pytest.mark.parametrize("name", IDS)
def test_ids_are_equal_where_they_were(name: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        pair = IDS[name]
        query, key = ([int(x) for x in np.asarray(ids)[0]] for ids in pair)
        want = np.array([[q == k for k in key] for q in query])
        mask = Mask.segments(query_ids=pair[0], key_value_ids=pair[1])
        for found in (mask.to_array(T, T, np), mask.to_array(T, T), compiled(mask)):
            np.testing.assert_array_equal(np.asarray(found)[0, 0], want)
        x = X[:1]
        found = attend(x=x, segment_ids=pair)
        np.testing.assert_array_equal(found, attend(Mask.dense(want), x))
        jaxmha.explain(x, x, x, segment_ids=pair)


def test_traced_ids_without_a_common_dtype_are_refused() -> None:
    def run(a: Any, b: Any) -> Any:
        return jaxmha.dot_product_attention(X, X, X, segment_ids=(a, b))

    a, b = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, T), jnp.uint32)
    with pytest.raises(TypeError, match=r"segment ids: no integer dtype .* int32 .* uint32"):
        jax.jit(run)(a, b)
    assert jax.jit(run)(b, b).shape == X.shape


@pytest.mark.usefixtures("x64")
def test_traced_ids_of_64_bits_stay_so() -> None:
    ids = np.array([[1, 1, 2, 2, 3]] * B) << 32
    out = jax.jit(lambda ids: jaxmha.dot_product_attention(X, X, X, segment_ids=(ids, ids)))(ids)
    np.testing.assert_allclose(out, attend(segment_ids=ids), atol=1e-6)


def test_order_of_ids_stays() -> None:
    """Whole blocks are ruled out by sorted ids."""
    query, key = integers.comparable(np.array([-(2**62), -5, 2**40]), np.array([-(2**40), 0, 3]))
    both = np.concatenate([query, key])
    np.testing.assert_array_equal(np.argsort(both), [0, 3, 1, 4, 5, 2])
    assert both.dtype == np.int32


@pytest.mark.parametrize("array", [np.zeros((1, 3)), np.zeros((1, 3), bool), [[0, 0, 0]], None])
@pytest.mark.usefixtures("no_shape_hook")
def test_other_dtypes_than_integers_are_refused(array: Any) -> None:
    given: Any = array if array is not None else "0"
    with pytest.raises(TypeError, match="query_ids must be an integer array"):
        Mask.segments(query_ids=given, key_value_ids=array)
    with pytest.raises(TypeError, match="offset must be an integer"):
        Mask.causal(array)
    if array is not None:
        with pytest.raises(TypeError, match="key_value must be an integer array"):
            Mask.lengths(key_value=array)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Mask.lengths, "key_value= .* query="),
        (Mask.padding, "key_value= .* query="),
        (Mask.segments, "key_value_ids= .* query_ids="),
    ],
    ids=["lengths", "padding", "segments"],
)
@pytest.mark.parametrize("several", [1, 2])
def test_conditions_are_named(make: Any, names: str, several: int) -> None:
    """By position they would mean queries, and padded keys would stay visible."""
    with pytest.raises(TypeError, match=rf"no positional argument: .*queries.*give {names}"):
        make(*[np.ones((1, 3), int)] * several)


def test_float64_is_another_softmax_than_none() -> None:
    """To NumPy they are equal, and one compiled program would serve both."""
    assert Semantics(softmax_dtype=np.float64) != Semantics()
    assert Semantics(softmax_dtype=np.float64) == Semantics(softmax_dtype="float64")
    jaxmha.dot_product_attention(X, X, X)
    calls: list[Callable[[], Any]] = [
        lambda: jaxmha.dot_product_attention(X, X, X, softmax_dtype=np.float64),
        lambda: jaxmha.multi_head_attention(
            PARAMS, FEATURES, semantics=Semantics(softmax_dtype=np.float64)
        ),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"softmax_dtype is float64.*jax_enable_x64"):
            call()


@pytest.mark.slow_variants("reference")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", ["reference", "blocked"])
def test_a_finite_bias_excludes_nothing(implementation: str) -> None:
    """A float64 bias with float32 heads, whose sums are float32, has its gradient."""
    bias = np.full((T, T), -1e300)

    def total(heads: Any, bias: Any) -> Any:
        out = jaxmha.dot_product_attention(
            heads, heads, heads, bias=bias, implementation=implementation
        )
        return (out[0, 0, 0] ** 2).sum(), out

    run = jax.jit(jax.grad(total, 1, has_aux=True))
    gradient, out = run(X, bias)
    wide, want = run(X.astype(np.float64), bias)
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(gradient, wide, atol=1e-6)
    assert np.abs(gradient).max() > 0.01


def test_numbers_that_float32_does_not_hold_are_refused() -> None:
    for name, value in (("scale", 1e39), ("scale", -1e300), ("logits_soft_cap", 1e39)):
        with pytest.raises(ValueError, match=rf"{name} of float32 logits must be at most"):
            attend(None, X, **{name: value})
    np.testing.assert_allclose(attend(logits_soft_cap=1e30), attend(), atol=1e-6)
    for name, value, zero in (("scale", -1e-38, "0 or "), ("logits_soft_cap", 1e-39, "")):
        with pytest.raises(ValueError, match=rf"{name} of float32 logits must be {zero}at least"):
            attend(None, X, **{name: value})
    equal = np.broadcast_to(X.mean(1, keepdims=True), X.shape)
    for name, value in (("scale", 0.0), ("scale", 1.2e-38), ("logits_soft_cap", 1.2e-38)):
        np.testing.assert_allclose(attend(None, X, **{name: value}), equal, atol=1e-6)


@pytest.mark.parametrize("window", [None, 2], ids=["", "window"])
@pytest.mark.parametrize("length", [2**31 - 1, 2**30], ids=["limit of int32", "2**30"])
def test_a_step_beyond_what_is_counted(length: int, window: int | None) -> None:
    """Sums of lengths and new tokens do not wrap below 0, where nothing is attended."""
    cache = KVCache.empty(PARAMS, B, T)._replace(lengths=np.asarray([length, 0], np.int32))
    mask = None if window is None else Mask.window(window, None)
    out, cache = jaxmha.decode_step(PARAMS, FEATURES[:, :1], cache, mask=mask)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()
    assert int(cache.lengths[0]) > 0
