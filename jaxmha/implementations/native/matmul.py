"""Matmuls of projections by the native kernels, with their bias.

On CPUs XLA's own matmuls leave the bias to another pass over the output. They take longer in float32
and, with AMX, in bfloat16, unless rows or multiplications are few.
"""

from collections.abc import Sequence
from functools import cache, partial
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
# The minimum rows in float32, LEAST_ROWS or, with at least WIDE columns, LEAST_ROWS_OF_WIDE, and the
# minimum multiplications in any dtype, LEAST_WORK. Below these XLA's matmul takes less time: a native
# one costs microseconds and copies the weights, for which few rows do not pay.
LEAST_ROWS, LEAST_ROWS_OF_WIDE, LEAST_WORK = 48, 16, 2**20
WIDE = 1024
# The minimum rows in bfloat16, where the copy of the weights costs little: LEAST_ROWS_OF_BF16, or
# LEAST_ROWS_OF_LARGE if the weights have at least LARGE entries. Such weights are read from memory,
# which takes most of the time if rows are few, in XLA's matmul too.
LEAST_ROWS_OF_BF16, LEAST_ROWS_OF_LARGE, LARGE = 16, 64, 2**21
BF16: np.dtype[Any] = np.dtype(jnp.bfloat16)


def unsupported_reason(
    rows: int,
    depth: int,
    columns: int,
    dtype: np.dtype[np.floating],
    implementation: str | Sequence[str] | None = None,
) -> str | None:
    """Returns None if the native kernels multiply `rows x depth` by `depth x columns`, both of
    `dtype`, else the reason why XLA does.

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
    if dtype not in (np.float32, BF16):
        return f"native matmuls take float32, and bfloat16 with AMX, got {dtype.name}"
    if dtype == BF16:
        least = LEAST_ROWS_OF_LARGE if depth * columns >= LARGE else LEAST_ROWS_OF_BF16
    else:
        least = LEAST_ROWS_OF_WIDE if columns >= WIDE else LEAST_ROWS
    if rows < least or rows * depth * columns < LEAST_WORK:
        return f"{rows} x {depth} by {depth} x {columns} takes XLA less time"
    if jax.process_count() > 1 or (jax.device_count() > 1 and not attention.in_shard_map()):
        return "XLA may partition the call"
    reason = library.unavailable()
    if reason is None and dtype == BF16 and library.isa() != "amx":
        return f"native matmuls take bfloat16 with AMX, not with {library.isa()}"
    return reason


def affine(
    x: Float[jax.Array, "m k"],
    kernel: Float[jax.Array, "k n"],
    bias: Float[jax.Array, " n"] | None,
    kept: Bool[jax.Array, " m"] | None = None,
    rounded: bool = False,
) -> Float[jax.Array, "m n"]:
    """`x @ kernel + bias`, summed in float32, with derivatives of every order and mode. x, kernel
    and bias are float32, or all are bfloat16.

    `kept`: the rows of x to read; others count as zeros, whatever they hold, and runs of them cost
    next to nothing in native kernels, forward and backward. None: all. `rounded`: the result is
    rounded to the dtype of x, instead of float32.
    """
    bias = operands.absent(x.dtype) if bias is None else bias
    kept = operands.absent(np.bool_) if kept is None else kept
    dtype = x.dtype if rounded else np.dtype(np.float32)
    found: jax.Array = _bind(*varying.alike((x, kernel, bias, kept)), dtype)
    return found


def _bind(
    a: Array,
    b: Array,
    bias: Array | None,
    kept: Array,
    dtype: np.dtype[Any],
    a_transposed: bool = False,
    b_transposed: bool = False,
) -> jax.Array:
    """`A B + bias` in `dtype`; `a` and `b`, of one dtype, are A and B or, if transposed, A^T, B^T.

    `kept`: a mask of the rows of `a`, which are rows of A or, if `a` is transposed, terms of the
    sum over the common axis of A and B. Rows where it is False count as zeros; without elements, it
    is True everywhere. All operands may have leading batch axes, each of full size or 1.
    """
    if bias is None:
        bias = jnp.zeros((*[1] * (a.ndim - 2), 0), a.dtype)
        a, b, bias, kept = varying.alike((a, b, bias, kept))
    static = {"dtype": dtype, "a_transposed": a_transposed, "b_transposed": b_transposed}
    found: jax.Array
    (found,) = _primitive().bind(a, b, bias, kept, **static)
    return found


def _in_xla(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array,
    kept: jax.Array,
    *,
    dtype: np.dtype[Any],
    a_transposed: bool,
    b_transposed: bool,
) -> list[jax.Array]:
    if kept.size:
        a = jnp.where(kept[..., None], a, 0)
        b = jnp.where(kept[..., None], b, 0) if a_transposed else b
    a = jnp.swapaxes(a, -1, -2) if a_transposed else a
    b = jnp.swapaxes(b, -1, -2) if b_transposed else b
    y = jnp.matmul(a, b, precision="highest", preferred_element_type=np.float32)
    y = y + bias[..., None, :].astype(np.float32) if bias.size else y
    return [y.astype(dtype)]


def _shapes(a: Any, b: Any, bias: Any, kept: Any, **static: Any) -> Any:
    lead = operands.batch((a, b, bias, kept), (2, 2, 1, 1))
    m = a.shape[-1 if static["a_transposed"] else -2]
    n = b.shape[-2 if static["b_transposed"] else -1]
    return [((*lead, m, n), static["dtype"])]


def _tangent(primals: Any, tangents: Any, **static: Any) -> tuple[list[Any], list[Any]]:
    (a, b, bias, kept), (da, db, dbias, _) = primals, tangents
    out = _bind(a, b, bias, kept, **static)
    parts: list[Any] = []
    zero: Any = ad.Zero
    if type(da) is not ad.Zero:
        parts.append(_bind(da, b, None, kept, **static))
    if type(db) is not ad.Zero:
        parts.append(_bind(a, db, None, kept, **static))
    if type(dbias) is not ad.Zero and bias.size:
        every = jnp.broadcast_to(dbias[..., None, :].astype(np.float32), out.shape)
        # Cast after the broadcast, whose transpose then sums the bias gradient in float32.
        parts.append(every.astype(out.dtype))
    return [out], [sum(parts[1:], parts[0]) if parts else zero.from_primal_value(out)]


def _transposed(
    cotangents: Any,
    a: Any,
    b: Any,
    bias: Any,
    kept: Any,
    *,
    dtype: np.dtype[Any],
    a_transposed: bool,
    b_transposed: bool,
) -> list[Any]:
    """The transpose rule for a linear `a` or `b`: `y = A B`, so `dA = dy B^T` and `dB = A^T dy`.

    `kept` applies to the same axis in these matmuls, so they get it unchanged.
    """
    (dy,) = cotangents
    is_linear: Any = ad.is_undefined_primal
    ta, tb = a_transposed, b_transposed
    dA = dB = None
    if is_linear(a):
        to = partial(_cotangent, a.aval, kept)
        dA = to(b, dy, tb, True) if ta else to(dy, b, False, not tb)
    if is_linear(b):
        to = partial(_cotangent, b.aval, kept)
        dB = to(dy, a, True, ta) if tb else to(a, dy, not ta, False)
    return [dA, dB, None, None]


def _cotangent(to: Any, kept: Any, a: Any, b: Any, ta: bool, tb: bool) -> jax.Array:
    """The cotangent of an operand with the abstract value `to`: `A B` in its dtype, summed over batch
    axes where it has size 1. `ta`, `tb`: whether `a` and `b` are A^T and B^T; `kept`: as in `_bind`.
    """
    if a.dtype != b.dtype:  # the cotangent is float32 and the operand bfloat16
        a, b = a.astype(np.float32), b.astype(np.float32)
    lead = operands.batch((a, b, kept), (2, 2, 1))
    axes = tuple(i for i, (n, size) in enumerate(zip(to.shape[:-2], lead, strict=True)) if n < size)
    dtype = np.dtype(np.float32) if axes else a.dtype
    y = _bind(a, b, None, kept, dtype, ta, tb)
    return (y.sum(axes, keepdims=True) if axes else y).astype(to.dtype)


def _attributes(*, dtype: np.dtype[Any], **flags: bool) -> dict[str, bool]:
    return flags  # without dtype, which the native kernel reads from the buffer of the result


@cache
def _primitive() -> Any:
    return register(
        "matmul",
        shapes=_shapes,
        in_xla=_in_xla,
        jvp=_tangent,
        attributes=_attributes,
        transpose=_transposed,
    )
