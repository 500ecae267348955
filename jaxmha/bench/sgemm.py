"""Plain float32 matrix products: the machine's ceiling, and a probe of whether it is disturbed."""

import os
import time
from collections.abc import Callable
from functools import cache, partial
from statistics import median
from typing import Any

import numpy as np

from jaxmha.bench.case import Case
from jaxmha.bench.program import repeat

Shape = tuple[int, int, int]
SQUARE: Shape = (1024, 1024, 1024)
# Rows of the square product on GPUs and TPUs: launching a smaller one takes longer than computing it.
LARGE = 4096
BACKENDS = ("xla", "torch")
REPEATS = 5


def projection(case: Case) -> Shape:
    """Sizes `(m, k, n)` of a layer's query, key and value projections as one product."""
    return (case.B * case.T, case.E, case.E + 2 * case.K * case.H)


def rate(backend: str, shape: Shape) -> float:
    """Median GFLOP/s of some products of `(m, k)` and `(k, n)`, in float32 without TF32."""
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    m, k, n = shape = (LARGE,) * 3 if shape == SQUARE and not on_cpu else shape
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal(s, np.float32) for s in ((m, k), (k, n)))
    run = _xla(left, right) if backend == "xla" else _torch(left, right)
    run(1)
    work = 2e8 if on_cpu else 2e11  # multiply-adds that take some milliseconds
    calls = max(1, int(work / (m * k * n)))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run(calls)
        seconds.append((time.perf_counter() - start) / calls)
    return 2e-9 * m * k * n / median(seconds)


def _xla(left: Any, right: Any) -> Callable[[int], None]:
    import jax

    left, right = jax.device_put(left), jax.device_put(right)
    return partial(repeat, partial(_jitted(), left, right))


@cache
def _jitted() -> Callable[..., Any]:
    import jax

    return jax.jit(lambda a, b: jax.numpy.matmul(a, b, precision="highest"))


def _torch(left: Any, right: Any) -> Callable[[int], None]:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = torch.from_numpy(left), torch.from_numpy(right)

    def run(calls: int) -> None:
        for _ in range(calls):
            a @ b

    return run
