"""Matmuls and sums with small rounding errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmha.arrays import DTypeLike
from jaxmha.semantics import Precision

# Backends compute a small matmul as a plain loop over k terms, whose error grows with k. Pairwise
# summation of parts has an error that grows with the terms of a part and the logarithm of the
# number of parts. Up to SMALL multiplications it costs microseconds; beyond, it would slow the
# matmul down.
SMALL = 2**19
TERMS, PARTS = 4, 64  # minimum terms per part, maximum number of parts
ROWS = 32  # rows summed in one step


def matmul(
    a: Float[jax.Array, "*b m k"],
    b: Float[jax.Array, "*b k n"],
    *,
    precision: Precision = None,
    dtype: np.dtype[np.floating] | None = None,
) -> Float[jax.Array, "*b m n"]:
    """`a @ b` over `(..., m, k)` and `(..., k, n)` with equal leading axes, accumulated in `dtype`.

    If `precision` is None, JAX's configuration determines it, else it is `highest`: float32 stays
    float32.

    >>> import jax.numpy as jnp
    >>> matmul(jnp.ones((2, 3, 5)), jnp.ones((2, 5, 7))).shape
    (2, 3, 7)
    """
    precision = resolved(precision)
    if a.shape[-1] == 1:
        # XLA would fuse a matmul over one term with later operations, such as `a * b - row_max`:
        # an FMA would round these logits differently from the logits that gave the row max.
        a = jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, 1),))
        b = jnp.pad(b, ((0, 0),) * (b.ndim - 2) + ((0, 1), (0, 0)))
    *lead, m, k = a.shape
    n = b.shape[-1]
    sizes = (*lead, m, k, n)
    known = all(isinstance(size, int) for size in sizes)  # False for symbolic sizes (`jax.export`)
    if not known or k <= TERMS or math.prod(sizes) > SMALL:
        return jnp.matmul(a, b, precision=precision, preferred_element_type=dtype)
    if dtype is not None:  # the parts are a batch axis, and backends may lack such half precision
        a, b = a.astype(dtype), b.astype(dtype)
    terms = max(TERMS, -(-k // PARTS))
    parts = -(-k // terms)
    extra = parts * terms - k
    a = jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, extra),))
    b = jnp.pad(b, ((0, 0),) * (b.ndim - 2) + ((0, extra), (0, 0)))
    products = jnp.einsum(
        "...mck,...ckn->c...mn",
        a.reshape(*lead, m, parts, terms),
        b.reshape(*lead, parts, terms, n),
        precision=precision,
    )
    return add_pairwise(list(products))  # adding matrices is faster than reducing an axis


def add_pairwise(sums: list[jax.Array]) -> jax.Array:
    """The sum of the arrays; its error grows as the logarithm of their number.

    >>> import jax.numpy as jnp
    >>> float(add_pairwise([jnp.float32(n) for n in range(5)]))
    10.0
    """
    while len(sums) > 1:
        half, rest = len(sums) // 2, sums[len(sums) // 2 * 2 :]
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=False)] + rest
    return sums[0]


def operand_dtype(
    dtype: DTypeLike, precision: Precision, platform: str
) -> np.dtype[np.floating] | None:
    """The matmul operand dtype of heads of `dtype`; None: the accumulation dtype.

    bfloat16 operands stay bfloat16, except if a precision is set, and except on CPUs, which would
    cast them to float32 repeatedly. float16 operands are cast: their range is too small for
    gradients of logits (see `has_float16_significand`).

    >>> with jax.default_matmul_precision(None):
    ...     [operand_dtype(jnp.bfloat16, None, platform) for platform in ("cuda", "cpu")]
    [dtype(bfloat16), None]
    """
    native = dtype == jnp.bfloat16 and _chosen(precision) is None and platform != "cpu"
    operands: np.dtype[np.floating] = np.dtype(jnp.bfloat16)
    return operands if native else None


def has_float16_significand(dtype: DTypeLike, precision: Precision, platform: str) -> bool:
    """True if `matmul_of_float16` computes the matmuls of heads of `dtype`.

    >>> with jax.default_matmul_precision(None):
    ...     [has_float16_significand(jnp.float16, None, platform) for platform in ("cuda", "cpu")]
    [True, False]
    """
    return dtype == jnp.float16 and _chosen(precision) is None and platform != "cpu"


def matmul_of_float16(
    a: Float[jax.Array, "*b m k"], b: Float[jax.Array, "*b k n"]
) -> Float[jax.Array, "*b m n"]:
    """`a @ b` of float32 arrays, each rounded to the 11 significand bits of float16 in the range of float32.

    Tensor cores multiply such numbers exactly as TF32, and sum in float32. float16 itself has too
    small a range for gradients of logits.
    """
    x, y = (jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) for x in (a, b))
    return matmul(x, y, precision="high")


def split_scale(scale: float) -> tuple[float, float]:
    """Splits a scale into a power of two, by which multiplication is exact, and a rest in [1, 2).

    >>> split_scale(-0.125), split_scale(6.0)
    ((-0.125, 1.0), (4.0, 1.5))
    """
    rest = 2 * abs(math.frexp(scale)[0]) or 1.0
    return scale / rest, rest


def resolved(precision: Precision) -> Precision:
    """The given precision, else `jax_default_matmul_precision`, else `highest`."""
    return _chosen(precision) or "highest"


def _chosen(precision: Precision) -> Precision:
    return precision or jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


def pairwise_sum(x: Float[jax.Array, "*b k"]) -> Float[jax.Array, "*b 1"]:
    """The sum over the last axis, with keepdims; its error grows as the logarithm of the axis size.

    >>> import jax.numpy as jnp
    >>> pairwise_sum(jnp.arange(5.0))
    Array([10.], dtype=float32)
    """
    if not isinstance(x.shape[-1], int):  # a symbolic size (`jax.export`) cannot be split
        return x.sum(-1, keepdims=True)
    if x.shape[-1] == 0:
        return jnp.zeros((*x.shape[:-1], 1), x.dtype)
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, 1),))
        x = x[..., 0::2] + x[..., 1::2]
    return x


def sum_of_rows(x: Float[jax.Array, "*b rows n"]) -> Float[jax.Array, "*b 1 n"]:
    """The sum over the second-to-last axis, with keepdims; XLA:CPU takes several times as long to
    sum more than 32 rows in one step.

    >>> import jax.numpy as jnp
    >>> sum_of_rows(jnp.ones((67, 2)))
    Array([[67., 67.]], dtype=float32)
    """
    *lead, rows, columns = x.shape
    parts = rows // ROWS
    if parts < 2:
        return x.sum(-2, keepdims=True)
    first = x[..., : parts * ROWS, :].reshape(*lead, parts, ROWS, columns)
    total = first.sum(-2).sum(-2, keepdims=True)
    return total + x[..., parts * ROWS :, :].sum(-2, keepdims=True) if rows % ROWS else total
