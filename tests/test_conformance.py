"""Every implementation against the specification."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxmha
from tests import cases, conformance, tolerance
from tests.cases import BY_NAME, CASES, SMALL, Case
from tests.conformance import by_implementation

pytestmark = pytest.mark.usefixtures("every_size")
# float64 takes most cases; other dtypes differ by their casts alone.
SOME = (
    "plain", "multi_query", "bias_excludes", "soft_cap", "empty_nan", "empty_mean",
    "empty_mean_dropout", "everything",
)  # fmt: skip


@pytest.mark.everyday(case=SOME)
@pytest.mark.slow_variants("*few_queries*", "*blocked")
@by_implementation
@pytest.mark.parametrize("case", CASES)
def test_values(implementation: str, case: Case) -> None:
    conformance.values(case, implementation, "float32", jit=False)


@pytest.mark.everyday(case=["plain", "empty_mean", "everything"], dtype=["bfloat16"])
@pytest.mark.slow_variants("*reference", "*few_queries*")
@by_implementation
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_in_half_precision(implementation: str, case: Case, dtype: str) -> None:
    conformance.values(case, implementation, dtype, jit=False)


@pytest.mark.slow_variants("bfloat16-soft_cap")
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


# Several conditions at once show each of them: `everything` windows, segments and lengths,
# `soft_cap` a bias, `empty_mean` a mask, `sinks_everything` sinks.
@pytest.mark.everyday(implementation=["blocked", "native", "few_queries"])
@pytest.mark.slow_variants(
    "*native",
    "!plain-native",
    "*few_queries*",
    "!everything-few_queries",
    *(
        f"{name}-blocked"
        for name in (
            *("plain", "multi_query", "multi_head", "unbatched", "bias_full", "bias_excludes"),
            *("mask_full", "mask_rows", "causal", "lengths", "window", "segments_self"),
            *("segments_pair", "empty_zero", "empty_nan", "empty_nan_lengths"),
            *("empty_mean_lengths", "dropout", "sinks"),
        )
    ),
)
@by_implementation
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("x64")
def test_values_float64(implementation: str, case: Case) -> None:
    conformance.values(case, implementation, "float64", jit=True)


# Gradients are compiled too.
@pytest.mark.slow_variants("*", "!bfloat16-everything-native")
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


@pytest.mark.slow  # `test_gradients_by_jax` has the same case
@by_implementation
@pytest.mark.usefixtures("x64")
def test_gradients_float64(implementation: str) -> None:
    conformance.gradients(SMALL, implementation, "float64")


@pytest.mark.everyday(name=("empty_mean_lengths", "everything"))
@pytest.mark.slow_variants(
    "everything-reference",
    "*reference",
    "!everything-reference",
    "*few_queries*",
    "!everything-few_queries",
    "empty_mean_lengths-blocked",
)
@by_implementation
@pytest.mark.parametrize(
    "name",
    [
        "multi_query", "unbatched", "bias_per_head", "causal_long", "empty_zero", "empty_nan",
        "empty_mean", "empty_mean_lengths", "no_keys_left", "one_key", "dropout_shared",
        "everything",
    ],
)  # fmt: skip
def test_gradients_of_case(implementation: str, name: str) -> None:
    conformance.gradients(BY_NAME[name], implementation, "float32", entries=5)


@pytest.mark.everyday(implementation=["blocked"], policy=["zero"])
@pytest.mark.slow_variants("*reference", "*few_queries*")
@by_implementation
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
        jax.jit(lambda x: of(x, others)), (inside,), order=1, modes=modes, rtol=1e-7, atol=1e-7
    )


@pytest.mark.slow_variants("*", "!everything-blocked")
@by_implementation
@pytest.mark.parametrize("name", ["everything", "empty_nan", "empty_mean"])
def test_vmap(implementation: str, name: str) -> None:
    case = BY_NAME[name]
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
@by_implementation
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


# XLA does not write into its operands; a kernel could.
@pytest.mark.slow_variants("*", "!everything-native")
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


@pytest.mark.parametrize("implementation", ["reference", "blocked", None])
def test_no_query_heads(implementation: str | None) -> None:
    q, k, v = (np.ones((2, n, heads, 3), np.float32) for n, heads in ((1, 0), (71, 5), (71, 5)))

    def of(q: Any, k: Any, v: Any) -> Any:
        out, lse = jaxmha.dot_product_attention(
            q, k, v, is_causal=True, return_lse=True, implementation=implementation
        )
        assert out.shape == (2, 1, 0, 3)
        assert lse.shape == (2, 0, 1)
        return out.sum() + lse.sum()

    assert of(q, k, v) == 0
    assert not any(np.asarray(x).any() for x in jax.jit(jax.grad(of, (0, 1, 2)))(q, k, v))
