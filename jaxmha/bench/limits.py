"""Measures the limits of a device: the rates of a large matrix product and of reading its memory."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

# Platform -> rows of a square product, and bytes of an array that is read; LARGE: on GPUs and TPUs.
SIZES = {"cpu": (1024, 2**27)}
LARGE = (8192, 2**30)
REPEATS, CALLS = 7, 3


def measure(products: str) -> dict[str, Any]:
    """Returns `tflops` of a product (`Case.products`) and `gb_per_second` of a copy or a sum.

    The memory rate is the faster of the two, because on a CPU a copy waits for fresh pages. Each
    rate is the best of several measurements, because noise only lowers it.
    """
    size, length = SIZES.get(jax.default_backend(), LARGE)
    dtype = jnp.dtype("float32" if products == "tf32" else products)
    left, right = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    with precision_of(products):
        product = _seconds(jax.jit(lambda a, b: a @ b), left, right)
    array = jnp.zeros(length // 4, jnp.float32)
    copy = 2 * array.nbytes / _seconds(jax.jit(lambda x: x + 1), array)
    read = array.nbytes / _seconds(jax.jit(jnp.sum), array)
    return {
        "tflops": 2e-12 * size**3 / product,
        "gb_per_second": 1e-9 * max(copy, read),
    }


def precision_of(products: str) -> AbstractContextManager[object]:
    """In this context, JAX computes matrix products in the precision of `products` (`Case.products`).

    By default, XLA rounds float32 to TF32 on GPUs and to bfloat16 on TPUs.
    """
    named = {"float32": "highest", "tf32": "tensorfloat32"}
    return jax.default_matmul_precision(named[products]) if products in named else nullcontext()


def _seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Least mean seconds of some calls; the first warms the device up."""
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            out = function(*arguments)
        jax.block_until_ready(out)  # type: ignore[no-untyped-call]
        found.append((time.perf_counter() - start) / CALLS)
    return min(found[1:])
