"""Matmuls of projections by the native kernels, with their bias.

XLA's own matmuls on CPUs take longer for gradients of kernels and for small layers, and leave the
bias to another pass over the output.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jaxtyping import Bool, Float

from jaxmha.arrays import Array
from jaxmha.implementations import platforms, varying
from jaxmha.implementations.native import attention, library, operands
from jaxmha.implementations.native.registration import register

NAME = "native"
# Below, XLA's matmul takes less: a call of the kernels costs microseconds, and few rows do not pay
# for a copy of the kernel. A kernel with WIDE columns or more is large, so fewer rows pay for it.
LEAST_ROWS, LEAST_ROWS_OF_WIDE, LEAST_WORK = 48, 16, 2**20
WIDE = 1024


def unsupported_reason(
    rows: int,
    depth: int,
    columns: int,
    dtype: np.dtype[np.floating],
    implementation: str | Sequence[str] | None = None,
) -> str | None:
    """Returns None if the native kernels multiply `rows x depth` by `depth x columns`, else the
    reason why XLA does.

    `implementation`: as in `multi_head_attention`; names without `native` leave matmuls to XLA.
    """
    names = (implementation,) if isinstance(implementation, str) else implementation
    if names and NAME not in names:
        return f"implementation is {', '.join(names)}"
    platform = platforms.current()
    if platform.name != "cpu":
        return f"native kernels run on CPU, not on {platform.device}"
    if not all(isinstance(size, int) for size in (rows, depth, columns)):
        return "sizes must be known"
    if dtype != np.float32:
        return f"native matmuls take float32, got {dtype.name}"
    least = LEAST_ROWS_OF_WIDE if columns >= WIDE else LEAST_ROWS
    if rows < least or rows * depth * columns < LEAST_WORK:
        return f"{rows} x {depth} by {depth} x {columns} takes XLA less time"
    if jax.process_count() > 1 or (jax.device_count() > 1 and not attention.on_one_device()):
        return "XLA may partition the call"
    return library.unavailable()


def affine(
    x: Float[jax.Array, "m k"],
    kernel: Float[jax.Array, "k n"],
    bias: Float[jax.Array, " n"] | None,
    kept: Bool[jax.Array, " m"] | None = None,
) -> Float[jax.Array, "m n"]:
    """`x @ kernel + bias` in float32, with derivatives of every order and mode.

    `kept`: the rows of x to read; others count as zeros, whatever they hold, and cost next to
    nothing, forward and backward. None: all.
    """
    bias = operands.absent(np.float32) if bias is None else bias
    kept = operands.absent(np.bool_) if kept is None else kept
    found: jax.Array = _bind(*varying.alike((x, kernel, bias, kept)))
    return found


def _bind(
    a: Array,
    b: Array,
    bias: Array | None,
    kept: Array,
    a_transposed: bool = False,
    b_transposed: bool = False,
) -> jax.Array:
    """`A B + bias` of operands that are stored as they are or transposed.

    `kept`: of the first stored axis of a: rows of A, or, if a is transposed, depths of A and B.
    """
    if bias is None:
        bias = jnp.zeros((*[1] * (a.ndim - 2), 0), np.float32)
        a, b, bias, kept = varying.alike((a, b, bias, kept))
    flags = {"a_transposed": a_transposed, "b_transposed": b_transposed}
    found: jax.Array
    (found,) = _primitive().bind(a, b, bias, kept, **flags)
    return found


def _in_xla(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array,
    kept: jax.Array,
    *,
    a_transposed: bool,
    b_transposed: bool,
) -> list[jax.Array]:
    if kept.size:
        a = jnp.where(kept[..., None], a, 0)
        b = jnp.where(kept[..., None], b, 0) if a_transposed else b
    a = jnp.swapaxes(a, -1, -2) if a_transposed else a
    b = jnp.swapaxes(b, -1, -2) if b_transposed else b
    y = jnp.matmul(a, b, precision="highest")
    return [y + bias[..., None, :] if bias.size else y]


def _shapes(a: Any, b: Any, bias: Any, kept: Any, *, a_transposed: bool, b_transposed: bool) -> Any:
    lead = operands.batch((a, b, bias, kept), (2, 2, 1, 1))
    m, n = a.shape[-1 if a_transposed else -2], b.shape[-2 if b_transposed else -1]
    return [((*lead, m, n), np.float32)]


def _tangent(primals: Any, tangents: Any, **flags: bool) -> tuple[list[Any], list[Any]]:
    (a, b, bias, kept), (da, db, dbias, _) = primals, tangents
    out = _bind(a, b, bias, kept, **flags)
    parts: list[Any] = []
    zero: Any = ad.Zero
    if type(da) is not ad.Zero:
        parts.append(_bind(da, b, None, kept, **flags))
    if type(db) is not ad.Zero:
        parts.append(_bind(a, db, None, kept, **flags))
    if type(dbias) is not ad.Zero and bias.size:
        parts.append(jnp.broadcast_to(dbias[..., None, :], out.shape))
    return [out], [sum(parts[1:], parts[0]) if parts else zero.from_primal_value(out)]


def _transposed(
    cotangents: Any,
    a: Any,
    b: Any,
    bias: Any,
    kept: Any,
    *,
    a_transposed: bool,
    b_transposed: bool,
) -> list[Any]:
    """Cotangents of the operand that is linear: `y = A B`, so `dA = dy B^T` and `dB = A^T dy`.

    Each of them reads and writes an operand along the same axis, so `kept` passes on unchanged.
    """
    (dy,) = cotangents
    is_linear: Any = ad.is_undefined_primal
    dA = dB = None
    if is_linear(a):
        to, ta, tb = a.aval, a_transposed, b_transposed
        dA = _bind(b, dy, None, kept, tb, True) if ta else _bind(dy, b, None, kept, False, not tb)
        dA = _sum_to(dA, to.shape)
    if is_linear(b):
        to, ta, tb = b.aval, a_transposed, b_transposed
        dB = _bind(dy, a, None, kept, True, ta) if tb else _bind(a, dy, None, kept, not ta, False)
        dB = _sum_to(dB, to.shape)
    return [dA, dB, None, None]


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums over batch axes that the operand has with size 1."""
    axes = tuple(i for i, (n, size) in enumerate(zip(shape, x.shape, strict=True)) if n < size)
    return x.sum(axes, keepdims=True) if axes else x


@cache
def _primitive() -> Any:
    return register("matmul", shapes=_shapes, in_xla=_in_xla, jvp=_tangent, transpose=_transposed)
