"""Score functions: `score_mod(score, b, n, i, j)` returns the new score."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmha import checks
from jaxmha.arrays import Array, require_arrays
from jaxmha.implementations.mods import Limit
from jaxmha.integers import require_sizes
from jaxmha.mods.bound import Function, limited, with_arrays
from jaxmha.mods.buckets import Bucket
from jaxmha.static_checks import number, one_of


def alibi(slopes: Float[Array, "N"]) -> Function:
    """Attention with linear biases: adds `slopes[n] * (j - i)`.

    Keys after the query get positive biases: combine it with a causal mask, as the paper does.

    Args:
      slopes: one per head, such as those of `alibi_slopes`.

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation" (2022).

    >>> import jax.numpy as jnp
    >>> from jaxmha import dot_product_attention
    >>> x = jnp.ones((1, 6, 4, 8))
    >>> mod = alibi(alibi_slopes(4))
    >>> dot_product_attention(x, x, x, is_causal=True, score_mod=mod).shape
    (1, 6, 4, 8)
    """
    require_arrays(slopes=slopes)
    checks.reject_rounding(slopes=slopes)
    if slopes.ndim != 1:
        raise ValueError(f"slopes: expected axes (N,), got shape {slopes.shape}")
    return with_arrays(_alibi, jnp.asarray(slopes))


@limited(lambda slopes: [Limit("slopes", "N", slopes.shape[0])])
def _alibi(
    slopes: jax.Array, score: jax.Array, b: jax.Array, n: jax.Array, i: jax.Array, j: jax.Array
) -> jax.Array:
    return score + slopes[n].astype(score.dtype) * (j - i).astype(score.dtype)


def alibi_slopes(num_heads: int, kind: Literal["bloom", "mpt"] = "bloom") -> jax.Array:
    """The ALiBi slopes of the paper, `2 ** (-8 * n / N)` for n = 1 to N, in float32.

    The models differ if N is not a power of two. With P the largest power of two below N, `bloom`
    takes the P values for P heads, and then every other value for 2 * P heads, from the first on.
    `mpt` takes the values for 2 * P heads, first those with even n, and keeps N of them.

    Source: `build_alibi_tensor` of BLOOM and `build_mpt_alibi_tensor` of MPT, in transformers.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    require_sizes(num_heads=num_heads)
    one_of("kind", kind, ("bloom", "mpt"))
    below = 2 ** math.floor(math.log2(num_heads))
    whole = 2.0 ** (-8.0 * np.arange(1, below + 1) / below)
    twice = 2.0 ** (-8.0 * np.arange(1, 2 * below + 1) / (2 * below))
    if below == num_heads:
        found = whole
    elif kind == "bloom":
        found = np.concatenate([whole, twice[::2][: num_heads - below]])
    else:
        found = np.concatenate([twice[1::2], twice[::2]])[:num_heads]
    return jnp.asarray(found, np.float32)


@dataclass(frozen=True)
class _RelativeBias:
    bucket: Bucket

    def limits(self, table: jax.Array) -> tuple[Limit, ...]:
        """The number of heads of a call, and the largest T and S for which `bucket` has buckets."""
        heads = Limit("table", "N", table.shape[1])
        most = getattr(self.bucket, "positions", None)
        return (heads, *(Limit("bucket", axis, most) for axis in "TS" if most is not None))

    def __call__(
        self, table: jax.Array, score: jax.Array, _: Any, n: Any, i: jax.Array, j: jax.Array
    ) -> jax.Array:
        return score + table.astype(score.dtype)[self.bucket(i, j), n]


def relative_bias(table: Float[Array, "buckets N"], bucket: Bucket) -> Function:
    """Adds a learned bias of the relative position: `table[bucket(i, j), n]`.

    Args:
      table: one row per bucket, one column per head.
      bucket: `bucket(i, j)`, such as `t5()` or `swin(7)`.

    >>> import jax.numpy as jnp
    >>> from jaxmha import dot_product_attention
    >>> from jaxmha.mods import t5
    >>> x = jnp.ones((1, 6, 4, 8))
    >>> mod = relative_bias(jnp.zeros((32, 4)), bucket=t5())
    >>> dot_product_attention(x, x, x, scale=1.0, score_mod=mod).shape
    (1, 6, 4, 8)
    """
    require_arrays(table=table)
    checks.reject_rounding(table=table)
    if table.ndim != 2:
        raise ValueError(f"table: expected axes (buckets, N), got shape {table.shape}")
    if not callable(bucket):
        raise TypeError(f"bucket must be a function, got {type(bucket).__name__}")
    rows = getattr(bucket, "rows", 0)
    if table.shape[0] < rows:
        raise ValueError(f"table: expected {rows} rows, one per bucket, got shape {table.shape}")
    return with_arrays(_RelativeBias(bucket), jnp.asarray(table))


def soft_cap(cap: float | Float[Array, ""]) -> Function:
    """`cap * tanh(score / cap)`, after biases; `logits_soft_cap` caps before them.

    Source: Gemma Team, "Gemma 2" (2024), section 2.

    >>> import jax.numpy as jnp
    >>> float(soft_cap(5.0)(jnp.float32(0), 0, 0, 0, 0))
    0.0
    """
    if not isinstance(cap, jax.Array | np.ndarray) and not number("cap", cap) > 0:
        raise ValueError(f"cap must be positive, got {cap}")
    if np.shape(cap) != ():
        raise ValueError(f"cap: expected one number, got shape {np.shape(cap)}")
    return with_arrays(_soft_cap, cap)


def _soft_cap(cap: Any, score: jax.Array, *_: Any) -> jax.Array:
    c = jnp.asarray(cap, score.dtype)
    return c * jnp.tanh(score / c)
