"""One answer per policy, whatever else is asked: weights, dropout, dtype, jit, vmap, gradients."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

import jaxmha
from jaxmha.semantics import FullyMasked
from tests import cases, conformance, tolerance
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("every_size")

CASE = Case("policies", mask="BNTS", empty_rows=True, dead_keys=True)
VALUES = {"zero": 0.0, "nan": np.nan}


def expected(arrays: dict[str, Any], policy: str) -> Any:
    value = np.repeat(arrays["value"].astype(np.float64), CASE.G, axis=2)
    if policy == "mean":
        return value.mean(1)
    return np.full((2, CASE.N, CASE.h), VALUES[policy])


@dataclass(frozen=True)
class Asked:
    """Arguments other than the policy."""

    weights: bool
    dropout: float


ASKED = tuple(Asked(weights, dropout) for weights in (False, True) for dropout in (0.0, 0.5))
POLICIES: tuple[FullyMasked, ...] = ("zero", "nan", "mean")


def supported(implementation: str, policy: FullyMasked, asked: Asked) -> bool:
    """The reference computes calls that an implementation declines."""
    never = policy == "mean" or implementation == "native"
    declined = asked.weights or (never and asked.dropout > 0)
    return not (implementation in conformance.WITHOUT_WEIGHTS and declined)


def attend(arrays: dict[str, Any], implementation: str, policy: FullyMasked, asked: Asked) -> Any:
    """Output, and weights where they are asked for."""
    return jaxmha.dot_product_attention(
        **arrays,
        fully_masked=policy,
        implementation=implementation,
        return_weights=asked.weights,
        dropout_key=jax.random.key(3),
        dropout_rate=asked.dropout,
    )


def check(got: Any, arrays: dict[str, Any], policy: FullyMasked, asked: Asked) -> None:
    out, shown = got if asked.weights else (got, None)
    if policy == "mean" and asked.dropout:  # of the values that are kept
        assert np.isfinite(np.asarray(out, np.float64)).all()
    else:
        tolerance.assert_close(out[:, 0], expected(arrays, policy), f"{policy} {asked}")
    if shown is not None:
        row = {"zero": 0.0, "nan": np.nan, "mean": 1 / CASE.S}[policy]
        tolerance.assert_close(shown[:, :, 0], np.full((2, CASE.N, CASE.S), row))


@pytest.mark.everyday(dtype=["bfloat16"])
@pytest.mark.slow_variants("*few_queries*", "reference*", "blocked-bfloat16")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("implementation", conformance.PLAIN)
def test_policies(implementation: str, dtype: str) -> None:
    """Under jit, vmap and grad, in one program."""

    def everything(arrays: dict[str, Any], policy: FullyMasked, asked: Asked) -> Any:
        def loss(inside: dict[str, Any]) -> Any:
            output = attend(inside | {"mask": arrays["mask"]}, implementation, policy, asked)
            return jax.tree.leaves(output)[0][:, 1:].sum()  # leaves the empty rows out

        def one(arrays: dict[str, Any]) -> Any:
            return attend(arrays, implementation, policy, asked)

        grads = jax.grad(loss)({name: arrays[name] for name in ("query", "key", "value")})
        batched = jax.vmap(one)(jax.tree.map(lambda x: x[None], arrays))
        return one(arrays), jax.tree.map(lambda x: x[0], batched), grads

    with jax.enable_x64(dtype == "float64"):
        if conformance.declines(CASE, implementation, dtype):
            return
        arrays = cases.arrays(CASE, dtype)
        calls = [(p, a) for p in POLICIES for a in ASKED if supported(implementation, p, a)]
        assert len(calls) >= (3 if implementation == "native" else 5)
        outputs = jax.jit(lambda arrays: [everything(arrays, *call) for call in calls])(arrays)
        for call, (jitted, batched, grads) in zip(calls, outputs, strict=True):
            check(jitted, arrays, *call)
            check(batched, arrays, *call)
            for grad in grads.values():
                assert np.isfinite(np.asarray(grad, np.float64)).all()


@pytest.mark.slow_variants("*few_queries*", "reference-nan", "reference-zero")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("implementation", conformance.PLAIN)
def test_eager(implementation: str, policy: FullyMasked) -> None:
    arrays = cases.arrays(CASE)
    for asked in (a for a in ASKED[::2] if supported(implementation, policy, a)):
        check(attend(arrays, implementation, policy, asked), arrays, policy, asked)
    arrays["value"][conformance.dead_keys(CASE, arrays)] = np.nan  # which no other row reads
    for asked in (a for a in ASKED[:2] if supported(implementation, policy, a)):

        def others(query: Any, asked: Asked = asked) -> Any:
            return attend(arrays | {"query": query}, implementation, policy, asked)[:, 1:].sum()

        assert all(np.isfinite(x).all() for x in jax.value_and_grad(others)(arrays["query"]))
