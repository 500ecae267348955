"""One answer per policy, whatever else is asked: weights, dropout, dtype, jit, vmap, gradients."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxmha
from jaxmha.implementations import IMPLEMENTATIONS
from jaxmha.semantics import FullyMasked
from tests import cases, tolerance
from tests.cases import Case

CASE = Case("policies", mask="BNTS", empty_rows=True)
VALUES = {"zero": 0.0, "nan": np.nan}


def expected(arrays: dict[str, Any], policy: str) -> Any:
    value = np.repeat(arrays["value"].astype(np.float64), CASE.G, axis=2)
    if policy == "mean":
        return value.mean(1)
    return np.full((2, CASE.N, CASE.h), VALUES[policy])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("weights", [False, "before_dropout"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))
@pytest.mark.parametrize("policy", ["zero", "nan", "mean"])
def test_policy(
    policy: FullyMasked, implementation: str, dtype: str, weights: Any, dropout: float
) -> None:
    # What an implementation declines, the next one does.
    names = tuple(dict.fromkeys((implementation, "reference")))

    def attend(arrays: dict[str, Any]) -> Any:
        return jaxmha.dot_product_attention(
            **arrays,
            fully_masked=policy,
            implementation=names,
            return_weights=weights,
            dropout_key=jax.random.key(3),
            dropout_rate=dropout,
        )

    def loss(inside: dict[str, Any], mask: Any) -> Any:
        out = jax.tree.leaves(attend(inside | {"mask": mask}))[0]
        return out[:, 1:].sum()  # leaves the empty rows out

    def everything(arrays: dict[str, Any]) -> Any:
        batched = jax.vmap(attend)(jax.tree.map(lambda x: x[None], arrays))
        inside = {name: arrays[name] for name in ("query", "key", "value")}
        slopes = jax.grad(loss)(inside, arrays["mask"])
        return attend(arrays), jax.tree.map(lambda x: x[0], batched), slopes

    with jax.enable_x64(dtype == "float64"):
        arrays = cases.arrays(CASE, dtype)
        jitted, batched, slopes = jax.jit(everything)(arrays)
        for got in (attend(arrays), jitted, batched):
            out, shown = got if weights else (got, None)
            if policy == "mean" and dropout:  # of the values that are kept
                assert np.isfinite(np.asarray(out, np.float64)).all()
            else:
                tolerance.assert_close(out[:, 0], expected(arrays, policy))
            if shown is not None:
                row = {"zero": 0.0, "nan": np.nan, "mean": 1 / CASE.S}[policy]
                tolerance.assert_close(shown[:, :, 0], np.full((2, CASE.N, CASE.S), row))
        for slope in slopes.values():
            assert np.isfinite(np.asarray(slope, np.float64)).all()
