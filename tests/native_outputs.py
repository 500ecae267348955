"""Outputs of the native kernels that other processes compute too: few imports, so that those start fast."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxmha
from jaxmha.implementations.native import library, matmul
from tests.drawn import to_jax


def rounded_matmul() -> tuple[str, list[list[float]], str]:
    """Returns this process's instruction set, a rounded output, and why XLA multiplies bfloat16."""
    assert library.unavailable() is None
    reason = matmul.unsupported_reason(512, 512, 512, np.dtype(jnp.bfloat16))
    rng = np.random.default_rng(0)
    shapes = (31, 67), (67, 5), (5,)
    x, kernel, bias = (to_jax(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    out = matmul.affine(x, kernel, bias, jnp.arange(31) % 3 > 0, rounded=True)
    return library.isa(), np.asarray(out, np.float64).tolist(), str(reason)


def windows_and_masks() -> list[Any]:
    """Outputs where rows of one item attend other keys."""
    rng = np.random.default_rng(0)
    mask = rng.random((1, 1, 523, 523)) < 0.01
    mask[..., :100, 200:] = False
    found = []
    for dtype in ("float32", "bfloat16"):
        q, k, v = (to_jax(rng.standard_normal((1, 523, 1, 24)), dtype) for _ in range(3))
        attend = partial(jaxmha.dot_product_attention, q, k, v, implementation="native")
        found += [attend(mask=mask), attend(local_window_size=(37, 5)), attend(is_causal=True)]
    return [np.asarray(x, np.float32) for x in found]
