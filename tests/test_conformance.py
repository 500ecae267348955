"""Every implementation against the specification."""

import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxmha
from jaxmha.implementations import IMPLEMENTATIONS, Request, Result, reference
from jaxmha.mask import Mask
from tests import cases, conformance, tolerance
from tests.cases import CASES, POISONED, SMALL, Case

pytestmark = pytest.mark.usefixtures("every_size")
IMPLEMENTED = conformance.PLAIN
by_implementation = pytest.mark.parametrize("implementation", IMPLEMENTED)
BY_NAME = {case.name: case for case in CASES}
# float64 takes every case; other dtypes differ by their casts alone.
SOME = ("plain", "multi_query", "bias_excludes", "soft_cap", "empty_mean", "everything")
by_case = pytest.mark.parametrize("case", CASES)


@pytest.mark.everyday(case=SOME)
@pytest.mark.slow_variants("*few_queries*", "*blocked")
@by_implementation
@pytest.mark.parametrize("case", CASES)
def test_values(implementation: str, case: Case) -> None:
    conformance.values(case, implementation, "float32", jit=False)


@pytest.mark.everyday(case=SOME, dtype=["bfloat16"])
@pytest.mark.slow_variants("*reference", "*few_queries*", "*multi_query*")
@by_implementation
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_in_half_precision(implementation: str, case: Case, dtype: str) -> None:
    conformance.values(case, implementation, dtype, jit=False)


@pytest.mark.everyday(case=["soft_cap", "everything"], dtype=["bfloat16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_half_precision(case: Case, dtype: str) -> None:
    """Where devices multiply it: values, lse and gradients are within the same few roundings."""
    with jaxmha.lowering_for("tpu"), jax.default_matmul_precision(None):
        conformance.kernel(case, "blocked", dtype, lse=True)


def test_small_gradients_of_float16() -> None:
    """Cotangents of the smallest numbers of float16, divided by sums of many weights."""
    rng = np.random.default_rng(0)
    q, k, v, d = (rng.standard_normal((1, 640, 1, 8)).astype(np.float16) for _ in range(4))
    d = (d * 2.0**-20).astype(np.float16)

    def gradients(dtype: Any, implementation: str) -> Any:
        attend = partial(jaxmha.dot_product_attention, implementation=implementation)
        pull = jax.vjp(attend, *(jnp.asarray(x, dtype) for x in (q, k, v)))[1]
        return pull(jnp.asarray(d, dtype))

    with jaxmha.lowering_for("cuda"), jax.default_matmul_precision(None):
        found = gradients(np.float16, "blocked")
    with jax.enable_x64(True):
        want = gradients(np.float64, "reference")
    for x, y in zip(found, want, strict=True):
        # float16 holds these numbers to within half of 2**-24.
        np.testing.assert_allclose(np.asarray(x, float), y, atol=0.51 * 2**-24, rtol=2**-9)


def test_logits_are_scaled_after_products_of_bfloat16() -> None:
    """Queries that were scaled and rounded would move logits of this size by a tenth."""
    case = Case("large", H=11, scale=3.0)
    with jaxmha.lowering_for("tpu"), jax.default_matmul_precision(None):
        conformance.kernel(case, "blocked", "bfloat16", lse=True)


@pytest.mark.slow_variants(
    "*reference",
    "!bias_excludes-reference",
    "!everything-reference",
    "*few_queries*",
    "!everything-few_queries",
    "dropout-blocked",
    "causal-blocked",
    "multi_query-blocked",
    "empty_nan-blocked",
    "empty_zero-blocked",
    "mask_rows-blocked",
    "segments_self-blocked",
    "multi_head-blocked",
)
@by_implementation
@by_case
@pytest.mark.usefixtures("x64")
def test_values_float64(implementation: str, case: Case) -> None:
    conformance.values(case, implementation, "float64", jit=True)


@pytest.mark.slow_variants("*reference", "*few_queries*")
@by_implementation
@pytest.mark.parametrize("case", CASES[-1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_under_jit(implementation: str, case: Case, dtype: str) -> None:
    conformance.values(case, implementation, dtype, jit=True)


@pytest.mark.slow_variants("*reference", "*few_queries*")
@pytest.mark.slow
@by_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients(implementation: str, dtype: str) -> None:
    conformance.gradients(SMALL, implementation, dtype)


@pytest.mark.slow_variants("*", "!blocked")
@by_implementation
@pytest.mark.usefixtures("x64")
def test_gradients_float64(implementation: str) -> None:
    conformance.gradients(SMALL, implementation, "float64")


@pytest.mark.everyday(name=("unbatched", "empty_mean_lengths", "everything"))
@pytest.mark.slow_variants(
    "*reference",
    "!everything-reference",
    "*few_queries*",
    "!everything-few_queries",
    "empty_mean_lengths-blocked",
    "unbatched-blocked",
)
@by_implementation
@pytest.mark.parametrize(
    "name",
    [
        "multi_query",
        "unbatched",
        "bias_per_head",
        "causal_long",
        "empty_zero",
        "empty_nan",
        "empty_mean",
        "empty_mean_lengths",
        "no_keys_left",
        "one_key",
        "dropout_shared",
        "everything",
    ],
)
def test_gradients_of_case(implementation: str, name: str) -> None:
    conformance.gradients(BY_NAME[name], implementation, "float32", entries=5)


@pytest.mark.everyday(implementation=["blocked"], policy=["zero"])
@pytest.mark.slow_variants("*reference", "*few_queries*")
@pytest.mark.parametrize("implementation", IMPLEMENTED)
@pytest.mark.parametrize("policy", ["zero", "mean"])
@pytest.mark.usefixtures("x64")
def test_gradients_by_jax(implementation: str, policy: str) -> None:
    case = replace(SMALL, bias_excludes=False, fully_masked=policy)
    if conformance.declines(case, implementation, "float64"):
        return
    inside, others = conformance.split(cases.arrays(case, "float64"))
    of = conformance.scalar(case, implementation)
    # A custom VJP has no forward mode.
    modes = ["fwd", "rev"] if implementation == "reference" else ["rev"]
    check_grads(  # type: ignore[no-untyped-call]
        lambda x: of(x, others), (inside,), order=1, modes=modes, rtol=1e-7, atol=1e-7
    )


@pytest.mark.everyday(case=["poisoned_lengths", "poisoned_bias", "poisoned_everything"])
@pytest.mark.slow_variants("*reference", "*few_queries*", "!poisoned_everything-few_queries")
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
@pytest.mark.slow_variants("*reference", "*few_queries*", "!nan-key-plain-few_queries")
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


@pytest.mark.slow_variants("*", "!blocked")
@by_implementation
def test_vmap(implementation: str) -> None:
    case = replace(BY_NAME["everything"], dropout_rate=0.0)
    stack = [cases.arrays(case, "float32", seed) for seed in range(3)]
    shown = implementation not in conformance.WITHOUT_WEIGHTS
    run = conformance.call(case, implementation, return_weights=shown, return_lse=True)
    together: dict[str, Any] = jax.tree.map(lambda *xs: np.stack(xs), *stack)
    out, *weights, lse = jax.vmap(run)(together)
    assert len(weights) == shown
    for row, arrays in enumerate(stack):
        want = conformance.expected(case, arrays)
        tolerance.assert_close(out[row], want.out)
        tolerance.assert_close(lse[row], want.lse)
        for shown_weights in weights:
            tolerance.assert_close(shown_weights[row], want.weights)


@pytest.mark.slow_variants("*", "!blocked")
@by_implementation
def test_vmap_over_queries_only(implementation: str) -> None:
    case = BY_NAME["bias_full"]
    arrays = cases.arrays(case, "float32")
    queries = np.stack([cases.arrays(case, "float32", seed)["query"] for seed in range(3)])
    run = conformance.call(case, implementation)
    out = jax.vmap(lambda query: run(arrays | {"query": query}))(queries)
    for row, query in enumerate(queries):
        want = conformance.expected(case, arrays | {"query": query})
        tolerance.assert_close(out[row], want.out)


@pytest.mark.everyday(implementation=["blocked"])
@pytest.mark.slow_variants("*", "!names1-blocked")
@pytest.mark.parametrize("implementation", IMPLEMENTED)
@pytest.mark.parametrize("names", [(), ("attention_out", "attention_lse")])
def test_remat(implementation: str, names: tuple[str, ...]) -> None:
    """Recomputing gives the same gradients; the names of output and lse are those of a policy."""
    inside, others = conformance.split(cases.arrays(SMALL, "float32"))
    of = conformance.scalar(SMALL, implementation, "float32")
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    again = jax.checkpoint(lambda x: of(x, others), policy=policy)
    grads = jax.jit(jax.grad(lambda x: of(x, others)))(inside)
    jax.tree.map(tolerance.assert_close, jax.jit(jax.grad(again))(inside), grads)


@pytest.mark.slow_variants("*", "!blocked")
@by_implementation
def test_names_for_remat(implementation: str) -> None:
    arrays = cases.arrays(SMALL, "float32")
    program = str(jax.make_jaxpr(conformance.call(SMALL, implementation, return_lse=True))(arrays))
    assert "attention_out" in program
    assert "attention_lse" in program


@pytest.mark.slow_variants("*", "!blocked")
@by_implementation
def test_unbatched_is_a_batch_of_one(implementation: str) -> None:
    case = BY_NAME["unbatched"]
    arrays = cases.arrays(case, "float32")
    one = {name: x if name == "mask" else x[None] for name, x in arrays.items()}
    out = conformance.call(case, implementation)(one)
    tolerance.assert_same(out[0], conformance.call(case, implementation)(arrays))


@pytest.mark.everyday(name=["everything"])
@pytest.mark.slow_variants("*reference", "*few_queries*")
@by_implementation
@pytest.mark.parametrize("name", ["everything", "dropout"])
def test_inputs_unchanged(implementation: str, name: str) -> None:
    conformance.inputs_unchanged(BY_NAME[name], implementation)


@pytest.mark.slow_variants("*few_queries*")
@by_implementation
@pytest.mark.parametrize("what", [False, True, "before_dropout", "after_dropout"])
@pytest.mark.parametrize("lse", [False, True])
def test_what_is_returned(implementation: str, what: Any, lse: bool) -> None:
    if what and implementation in conformance.WITHOUT_WEIGHTS:
        with pytest.raises(ValueError, match=conformance.WITHOUT_WEIGHTS[implementation]):
            conformance.call(SMALL, implementation, return_weights=what)(
                cases.arrays(SMALL, "float32")
            )
        return
    run = conformance.call(SMALL, implementation, return_weights=what, return_lse=lse)
    shapes = jax.eval_shape(run, cases.arrays(SMALL, "float32"))
    B, T, N, S, h = 2, SMALL.T, SMALL.N, SMALL.S, SMALL.h
    want: list[tuple[int, ...]] = [(B, T, N, h)]
    want += [(B, N, T, S)] if what else []
    want += [(B, N, T)] if lse else []
    assert [x.shape for x in (shapes if len(want) > 1 else [shapes])] == want


# The suite has to notice an implementation that is wrong: each mutant breaks one rule.
MUTANTS: dict[str, Callable[..., Any]] = {
    "causal_bottom_right": lambda run: (
        lambda request: run(
            request._replace(
                mask=Mask.causal(2) if request.mask.causal_offset == 0 else request.mask
            )
        )
    ),
    "soft_cap_dropped": lambda run: (
        lambda request: run(
            request._replace(semantics=replace(request.semantics, logits_soft_cap=None))
        )
    ),
    "heads_interleaved": lambda run: (
        lambda request: run(
            request._replace(key=request.key[:, :, ::-1], value=request.value[:, :, ::-1])
        )
    ),
    "bias_ignored": lambda run: lambda request: run(request._replace(bias=None)),
    "empty_rows_uniform": lambda run: (
        lambda request: run(
            request._replace(semantics=replace(request.semantics, fully_masked="mean"))
        )
    ),
    "half_precision_inside": lambda run: (
        lambda request: Result(
            *[
                None if x is None else x.astype(jnp.bfloat16).astype(x.dtype)  # type: ignore[arg-type]
                for x in run(request)
            ]
        )
    ),
}


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        ("causal_bottom_right", "causal"),
        ("soft_cap_dropped", "soft_cap"),
        ("heads_interleaved", "plain"),
        ("bias_ignored", "bias_per_head"),
        ("empty_rows_uniform", "empty_zero"),
        ("half_precision_inside", "plain"),
    ],
)
def test_mutants_fail(mutant: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = types.ModuleType("wrong")
    wrong.__dict__.update(
        unsupported_reason=reference.unsupported_reason, attend=MUTANTS[mutant](reference.attend)
    )
    monkeypatch.setitem(IMPLEMENTATIONS, mutant, wrong)
    with pytest.raises(AssertionError):
        conformance.values(BY_NAME[name], mutant, "float32", jit=False)


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
