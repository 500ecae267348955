"""Every implementation: NaN, infinities and extreme numbers reach what attends them, and nothing else."""

import types
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha.implementations import IMPLEMENTATIONS, Request, Result, reference
from jaxmha.implementations.tiled import attention
from jaxmha.mask import Mask
from tests import cases, conformance, tolerance
from tests.cases import BY_NAME, POISONED, Case
from tests.conformance import by_implementation
from tests.drawn import to_jax

pytestmark = pytest.mark.usefixtures("every_size")


@pytest.mark.everyday(case=["poisoned_lengths", "poisoned_bias", "poisoned_everything"])
@pytest.mark.slow_variants(
    "*-blocked",  # `test_blocked.test_poison` takes everything, over several tiles
    "*reference",
    "*few_queries*",
    "!poisoned_everything-few_queries",
)
@by_implementation
@pytest.mark.parametrize("case", POISONED)
def test_poisoned_padding(implementation: str, case: Case) -> None:
    conformance.poisoned_padding(case, implementation, "float32")


@pytest.mark.slow_variants("*reference", "*few_queries*")
@pytest.mark.slow
@by_implementation
@pytest.mark.parametrize("case", POISONED[:1])
def test_poisoned_padding_bfloat16(implementation: str, case: Case) -> None:
    conformance.poisoned_padding(case, implementation, "bfloat16")


@pytest.mark.slow_variants("*", "!blocked")
@by_implementation
def test_poisoned_queries(implementation: str) -> None:
    """Rows beyond a query length are 0 whatever they hold, and spoil no gradient."""
    case = POISONED[0]
    arrays = cases.arrays(case, "float32")
    of = conformance.both(conformance.scalar(case, implementation, "float32"))
    clean = of(*conformance.split(arrays))
    spoiled = arrays | {"query": arrays["query"].copy()}
    spoiled["query"][0, 3:] = np.nan
    chex.assert_trees_all_equal(of(*conformance.split(spoiled)), clean, strict=True)


@pytest.mark.everyday(array=["key"])
@pytest.mark.slow_variants(
    "*",
    "!nan-key-causal-blocked",
    "!inf-key-causal-native",
    "!nan-key-plain-few_queries",
)
@by_implementation
@pytest.mark.parametrize("name", ["plain", "causal"])
@pytest.mark.parametrize("array", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_heads_stay_apart(implementation: str, name: str, array: str, poison: float) -> None:
    """Values that are not finite in one head change no other head, nor gradients of others."""
    case = BY_NAME[name]
    arrays = cases.arrays(case, "float32")
    heads, groups = slice(1 if array == "query" else case.G, None), slice(1, None)
    run = jax.jit(conformance.call(case, implementation, return_lse=True))

    def of_others(arrays: Any) -> Any:
        out, lse = run(arrays)
        return (out[:, :, heads] ** 2).sum() + lse[:, heads].sum()

    grads_of = jax.jit(jax.grad(of_others))
    (out, lse), grads = run(arrays), grads_of(arrays)
    spoiled = arrays | {array: arrays[array].copy()}
    spoiled[array][0, 1, 0, 0] = poison
    (spoiled_out, spoiled_lse), spoiled_grads = run(spoiled), grads_of(spoiled)
    for kept, (x, y) in {
        "out": (spoiled_out[:, :, heads], out[:, :, heads]),
        "lse": (spoiled_lse[:, heads], lse[:, heads]),
        "query": (spoiled_grads["query"][:, :, heads], grads["query"][:, :, heads]),
        "key": (spoiled_grads["key"][:, :, groups], grads["key"][:, :, groups]),
        "value": (spoiled_grads["value"][:, :, groups], grads["value"][:, :, groups]),
    }.items():
        tolerance.assert_close(x, y, kept)
    assert poison == np.inf or np.isnan(spoiled_out[0]).any()


@pytest.mark.slow_variants("*few_queries*")
@by_implementation
def test_keys_that_only_heads_of_another_group_attend(implementation: str) -> None:
    """A key and its value may hold NaN in a group of heads that does not attend them."""
    rng, (T, S, N, K, H) = np.random.default_rng(3), (7, 11, 6, 3, 5)
    shapes = {"query": (1, T, N, H), "key": (1, S, K, H), "value": (1, S, K, H)}
    arrays = {name: rng.normal(size=shape).astype("f") for name, shape in shapes.items()}
    mask = np.ones((1, N, T, S), bool)
    mask[:, :2, :, 4] = False
    run = partial(jaxmha.dot_product_attention, mask=mask, implementation=implementation)
    of = jax.jit(jax.value_and_grad(lambda arrays: (run(**arrays) ** 2).sum()))
    spoiled = {name: x.copy() for name, x in arrays.items()}
    spoiled["key"][0, 4, 0] = spoiled["value"][0, 4, 0] = np.nan
    chex.assert_trees_all_equal(of(spoiled), of(arrays), strict=True)


def poisoned_operands(array: str) -> tuple[dict[str, Any], Any, Any]:
    """Heads and a cotangent of which a live entry is NaN, a mask, and the same as a bias.

    Masked pairs, rows that attend nothing and keys that nothing attends lie among the others.
    """
    rng, (T, S) = np.random.default_rng(7), (11, 19)
    shapes = {
        "query": (1, T, 2, 5),
        "key": (1, S, 1, 5),
        "value": (1, S, 1, 3),
        "d_out": (1, T, 2, 3),
    }
    arrays = {name: rng.normal(size=shape).astype("f") for name, shape in shapes.items()}
    mask = rng.random((1, 1, T, S)) < 0.6
    mask[..., [4, 9, 18]], mask[:, :, [2, 7]], mask[..., 3, 6] = False, False, True
    arrays[array][0, 3 if shapes[array][1] == T else 6, 0, 1] = np.nan
    bias = np.where(mask, rng.normal(size=mask.shape), -np.inf).astype("f")
    return arrays, mask, bias


@partial(jax.jit, static_argnames="implementation")
def pulled(arrays: Any, d_out: Any, mask: Any, implementation: str) -> Any:
    """One program for the arrays that hold a NaN."""
    run = partial(jaxmha.dot_product_attention, mask=mask, implementation=implementation)
    out, pull = jax.vjp(lambda arrays: run(**arrays), arrays)
    return {"out": out, **pull(d_out)[0]}


def poisoned_gradients(implementation: str, array: str, kind: str) -> dict[str, Any]:
    """The output and gradients of `poisoned_operands`."""
    arrays, mask, bias = poisoned_operands(array)
    d_out = arrays.pop("d_out")
    arrays |= {"bias": bias} if kind == "bias" else {}
    found = pulled(arrays, d_out, mask if kind == "mask" else None, implementation)
    return {name: np.asarray(x) for name, x in found.items()}


@pytest.mark.slow_variants("*", "!*-mask-native", "!d_out-mask-blocked")
@by_implementation
@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize("array", ["query", "key", "value", "d_out"])
def test_gradients_of_masked_rows_and_keys_stay_zero(
    implementation: str, kind: str, array: str
) -> None:
    """Rows that attend, and keys that are attended, may hold NaN."""
    found = poisoned_gradients(implementation, array, kind)
    assert not np.any(found["query"][:, [2, 7]])
    assert not np.any(found["key"][:, [4, 9, 18]])
    assert not np.any(found["value"][:, [4, 9, 18]])
    assert np.isnan(found["out" if array != "d_out" else "value"]).any()


@conformance.native_built
@pytest.mark.slow_variants("*", "!query-bias", "!key-mask")
@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize("array", ["query", "key", "value", "d_out"])
def test_native_nan_reaches_no_more_than_that_of_the_reference(array: str, kind: str) -> None:
    """A NaN reaches what attends it, and products with it, but nothing by way of masked pairs."""
    found = poisoned_gradients("native", array, kind)
    for name, expected in poisoned_gradients("reference", array, kind).items():
        finite = np.isfinite(expected)
        tolerance.assert_close(found[name][finite], expected[finite], name)


ROWS_OUTSIDE: dict[str, dict[str, Any]] = {
    "padded": {},
    "cap": {"logits_soft_cap": 2.0},
    "lengths": {"query_seq_lengths": np.array([2])},
    "segments": {
        "mask": Mask.segments(
            query_ids=np.array([[0, 0, 1, 1, 1]]), key_value_ids=np.array([[0] * 3 + [1] * 4])
        )
    },
}


@pytest.mark.slow_variants("cap")
@pytest.mark.parametrize("kind", ROWS_OUTSIDE)
def test_rows_outside_carry_no_infinite_key(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that pad a tile, or lie beyond a length, are 0; and 0 * inf is NaN."""
    monkeypatch.setattr(attention, "SIZES", {"side": 4, "least_rows": 4, "target": 1})
    rng, T, S = np.random.default_rng(5), 5, 7
    query, key, value = (np.abs(rng.normal(size=(1, n, 2, 3))).astype("f") for n in (T, S, S))

    @jax.jit
    def grads_of(*heads: Any) -> Any:
        def of(implementation: str, *heads: Any) -> Any:
            options = {"implementation": implementation, **ROWS_OUTSIDE[kind]}
            return (jaxmha.dot_product_attention(*heads, **options) ** 2).sum()

        return [jax.grad(partial(of, x), (0, 1, 2))(*heads) for x in ("blocked", "reference")]

    for poison in (-np.inf, np.inf, np.nan):
        key[0, 2] = poison
        for x, want in zip(*grads_of(query, key, value), strict=True):
            finite = np.isfinite(want)
            tolerance.assert_close(x[finite], np.asarray(want)[finite])
        assert finite.all() or poison != -np.inf


@pytest.mark.everyday(kind=["lengths"])
@pytest.mark.slow_variants("*reference", "*few_queries*")
@by_implementation
@pytest.mark.parametrize("kind", ["lengths", "padding", "dense", "bias"])
def test_live_logits_of_any_size_beat_masked_ones(implementation: str, kind: str) -> None:
    """Down to the lowest float32, of the only key that is left; also where a row max is so low."""
    lowest = float(np.finfo(np.float32).min)
    logits = np.array([-1.0, -1e38, -2.25e38, -2.9e38, lowest], np.float32)
    (B, S), keep = (len(logits), 3), np.array([True, False, False])
    query, value = np.ones((B, 2, 1, 1), np.float32), np.ones((B, S, 1, 1), np.float32)
    key = np.stack([logits, -logits, 0 * logits], 1).reshape(B, S, 1, 1)
    value[:, 1:] = 7.0
    conditions: dict[str, dict[str, Any]] = {
        "lengths": {"key_value_seq_lengths": np.ones(B, np.int32)},
        "padding": {"mask": Mask.padding(key_value=np.broadcast_to(keep, (B, S)))},
        "dense": {"mask": np.broadcast_to(keep, (B, 1, 2, S))},
        "bias": {"bias": np.where(keep, 0, -np.inf).astype("f").reshape(1, 1, 1, S)},
    }
    options = conditions[kind]

    def of(*heads: Any) -> Any:
        return jaxmha.dot_product_attention(
            *heads, scale=1.0, return_lse=True, implementation=implementation, **options
        )

    out, lse = jax.jit(of)(query, key, value)
    assert np.array_equal(out, np.ones_like(query))
    assert np.array_equal(lse[..., 0], np.broadcast_to(logits[:, None], (B, 1)))
    found = jax.jit(lambda *heads: jax.vjp(of, *heads)[1]((query, 0 * lse)))(query, key, value)
    d_value = np.where(keep, 2.0, 0.0).reshape(1, S, 1, 1)
    assert np.array_equal(found[2], np.broadcast_to(d_value, value.shape))
    assert not np.any(found[0])
    assert not np.any(found[1])


@pytest.mark.slow_variants("*", "!blocked")
@by_implementation
def test_bias_of_excluded_pairs(implementation: str) -> None:
    """A bias has no influence where the mask is False."""
    case = Case("excluded", bias="BNTS", mask="BNTS")
    arrays = cases.arrays(case, "float32")
    of = conformance.both(conformance.scalar(case, implementation, "float32"))
    clean = of(*conformance.split(arrays))
    for poison in (np.nan, np.inf, -np.inf):
        spoiled = arrays | {"bias": np.where(arrays["mask"], arrays["bias"], np.float32(poison))}
        chex.assert_trees_all_equal(of(*conformance.split(spoiled)), clean, strict=True)


@pytest.mark.slow_variants("*", "!few_queries-nan-all")
@pytest.mark.parametrize("mask", [Mask(), Mask.causal(offset=50)], ids=["all", "causal"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("implementation", ["few_queries", "blocked"])
def test_a_score_function_that_swallows_nan_keeps_heads_apart(
    implementation: str, poison: float, mask: Mask
) -> None:
    """It would hide that 0 * inf came from the key of another head."""
    rng = np.random.default_rng(0)
    shapes = (2, 3, 3, 5), (2, 67, 3, 5), (2, 67, 3, 7)
    query, key, value = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    key[0, 11, 1, 2] = poison

    def of(implementation: str) -> Any:
        return jaxmha.dot_product_attention(
            query, key, value, mask=mask, implementation=implementation,
            score_mod=lambda score, b, n, i, j: jnp.nan_to_num(score, posinf=9.0, neginf=-9.0),
        )  # fmt: skip

    tolerance.assert_close(of(implementation), of("reference"))


@pytest.mark.slow_variants("*", "!native-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@by_implementation
def test_values_up_to_the_limit_of_float32_by_the_number_of_keys(
    implementation: str, dtype: str
) -> None:
    """Sums of values before the normalisation fit; a power of two then scales all results exactly."""
    S, limit = 61, 2.0**122  # S * limit is just below the largest float32
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(2, T, 3, 5)).astype(dtype) for T in (7, S))
    signs = np.where(rng.random((2, S, 3, 11)) < 0.5, -1.0, 1.0)
    signs[0] = 1.0
    d_out = rng.normal(size=(2, 7, 3, 11)) / 2**10

    @jax.jit
    def of(*heads: jax.Array) -> Any:
        out, pull = jax.vjp(
            lambda *x: jaxmha.dot_product_attention(*x, implementation=implementation), *heads
        )
        return out, *pull(jnp.asarray(d_out, dtype))

    large = of(query, key, (signs * limit).astype(dtype))
    small = of(query, key, signs.astype(dtype))
    for x, y, scale in zip(large, small, (limit, limit, limit, 1.0), strict=True):
        tolerance.assert_same(x, y * to_jax(scale, dtype))
    if implementation in ("reference", "few_queries"):  # their weights are normalised first
        most = of(0 * query, key, (signs * 2**127).astype(dtype))[0]
        tolerance.assert_same(most, of(0 * query, key, signs.astype(dtype))[0] * 2.0**127)


def test_poison_reaches_a_naive_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 * NaN is NaN: masking the logits alone does not pass."""

    def naive(request: Request) -> Result:
        logits = jnp.einsum("btnh,bsnh->bnts", request.query, request.key)
        T, S = logits.shape[2:]
        allowed = request.mask.to_array(T, S)
        weights = jax.nn.softmax(jnp.where(allowed, logits, -1e30))
        out = jnp.einsum("bnts,bsnh->btnh", weights, request.value)
        return Result(out, weights, jax.nn.logsumexp(logits, -1))

    wrong = types.ModuleType("wrong")
    wrong.__dict__.update(unsupported_reason=reference.unsupported_reason, attend=naive)
    monkeypatch.setitem(IMPLEMENTATIONS, "naive", wrong)
    with pytest.raises(AssertionError):
        conformance.poisoned_padding(replace(POISONED[3], G=1), "naive", "float32")
