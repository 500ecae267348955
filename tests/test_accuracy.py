"""Errors against exact arithmetic, in units of what rounding the exact answer costs."""

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxmha
from jaxmha.converters.layout.arrays import to_numpy, to_torch
from jaxmha.converters.verify import oracle
from tests import conformance

pytestmark = pytest.mark.usefixtures("every_size")

OPTIMISED = True  # compiled as users compile it

SEEDS, T, S, N, H = 200, 64, 32, 2, 32


@cache
def draws(dtype: str) -> tuple[Any, ...]:
    """Normal inputs rounded to the dtype, one batch row per seed, and the exact answer."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal((SEEDS, size, N, H)).astype(jnp.dtype(dtype)) for size in (T, S, S)
    ]
    q, k, v = (x.astype(np.float64) for x in arrays)
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return *arrays, np.einsum("bnts,bsnh->btnh", weights, v)


def floors(out: Any, exact: Any, dtype: str) -> float:
    """Median over the seeds of the largest error, in those of the exact answer when rounded."""
    rounded = exact.astype(jnp.dtype(dtype)).astype(np.float64)
    worst = [np.abs(np.asarray(x, np.float64) - exact).max((1, 2, 3)) for x in (out, rounded)]
    return float(np.median(worst[0] / worst[1]))


def ours(dtype: str, implementation: str) -> Any:
    q, k, v, exact = draws(dtype)
    return jaxmha.dot_product_attention(q, k, v, implementation=implementation), exact


@pytest.mark.everyday(dtype=["bfloat16"])
@pytest.mark.slow_variants("*reference", "*few_queries*")
@pytest.mark.parametrize("implementation", conformance.PLAIN)
@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 1.05), ("float16", 1.2)])
def test_half_precision(implementation: str, dtype: str, allowed: float) -> None:
    out, exact = ours(dtype, implementation)
    assert out.dtype == dtype
    assert floors(out, exact, dtype) <= allowed


@pytest.mark.slow_variants("reference", "few_queries")
@pytest.mark.parametrize("implementation", conformance.PLAIN)
def test_float32_is_no_worse_than_torch(implementation: str) -> None:
    out, exact = ours("float32", implementation)
    query, key, value = (to_torch(x).transpose(1, 2) for x in draws("float32")[:3])
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    assert floors(out, exact, "float32") <= floors(to_numpy(theirs), exact, "float32")


def test_a_cast_in_between_is_seen() -> None:
    q, k, v, exact = draws("bfloat16")
    out = jaxmha.dot_product_attention(q, k, v, softmax_dtype=jnp.bfloat16)
    assert floors(out, exact, "bfloat16") > 1.05
    assert oracle.rounding_floor(exact, np.dtype("float32")) > 0
