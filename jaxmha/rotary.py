"""Rotary position embedding, for use between `project` and `combine`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxmha.arrays import Array, require_arrays
from jaxmha.checks import promoted, reject_rounding
from jaxmha.implementations.base import accumulation_dtype


def rope(
    x: Float[Array, "*B T N H"],
    positions: Int[Array, "*#B T"],
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    inv_freq: Float[Array, "P"] | None = None,
) -> Float[jax.Array, "*B T N H"]:
    """Rotates pairs of features of queries or keys by angles proportional to the position.

    Pair p rotates by `positions * base ** (-2 * p / H)`, so that `rope(q, i) @ rope(k, j)` depends
    on the positions through `i - j` alone.

    Args:
      x: projected queries or keys, `(*B, T, N, H)`; H is even.
      positions: `(*B, T)`, batch axes may be 1, or `(T,)` for all batch rows.
      base: roughly the wavelength of the slowest pair over 2 pi.
      interleaved: pairs features `(2p, 2p + 1)` (GPT-J, Meta's Llama files); by default
        `(p, p + H / 2)` (GPT-NeoX, Llama in transformers). Weights trained with one convention
        are wrong in the other unless the rows of their query and key kernels are permuted.
      inv_freq: `(P,)`, the angle per position of each of P pairs, instead of `base`: the first 2 P
        features are rotated, and the others are left as they are.

    Returns:
      The rotated array in the dtype of `x`; angles are float32 (float64 for float64).

    Raises:
      ValueError: H is odd or less than 2 P, or positions do not fit. TypeError: x is not floating.

    Source: Su et al., "RoFormer" (2021), section 3.2.

    >>> import jax.numpy as jnp
    >>> rope(jnp.ones((2, 3, 5, 4)), jnp.arange(3)).shape
    (2, 3, 5, 4)
    """
    require_arrays(x=x, positions=positions)
    reject_rounding(x=x)
    promoted(x=x)
    if not base > 0:
        raise ValueError(f"base must be positive, got {base}")
    if inv_freq is not None:
        return _rotate_first(x, positions, inv_freq, interleaved)
    if x.ndim < 3 or x.shape[-1] % 2:
        raise ValueError(f"x: expected axes (*B, T, N, H) with an even H, got shape {x.shape}")
    H = x.shape[-1]
    dtype = accumulation_dtype(x.dtype)
    frequency = jnp.asarray(base, dtype) ** (-jnp.arange(0, H, 2, dtype=dtype) / H)
    return _rotated(x, positions, frequency, interleaved)


def _rotate_first(
    x: Array, positions: Array, inv_freq: Float[Array, "P"], interleaved: bool
) -> jax.Array:
    """Rotates the first 2 P features."""
    require_arrays(inv_freq=inv_freq)
    if inv_freq.ndim != 1:
        raise ValueError(f"inv_freq: expected axes (P), got shape {inv_freq.shape}")
    rotated_features = 2 * inv_freq.shape[0]
    if x.ndim < 3 or x.shape[-1] < rotated_features:
        raise ValueError(
            f"x: expected axes (*B, T, N, H) with H of at least {rotated_features}, twice the length of "
            f"inv_freq {inv_freq.shape}, got shape {x.shape}"
        )
    frequency = jnp.asarray(inv_freq, accumulation_dtype(x.dtype))
    front = _rotated(x[..., :rotated_features], positions, frequency, interleaved)
    return jnp.concatenate([front, jnp.asarray(x[..., rotated_features:])], -1)


def _rotated(x: Array, positions: Array, frequency: jax.Array, interleaved: bool) -> jax.Array:
    *batch, T, _, H = x.shape
    lead = (1,) * (len(batch) - positions.ndim + 1) + positions.shape[:-1]
    broadcasts = len(lead) == len(batch) and all(
        size in (1, b) for size, b in zip(lead, batch, strict=True)
    )
    if positions.shape[-1:] != (T,) or not broadcasts:
        raise ValueError(
            f"positions: expected axes (T) or (*#B, T) with *B={tuple(batch)}, T={T}, got shape "
            f"{positions.shape}"
        )
    dtype = frequency.dtype
    at = jnp.asarray(positions).astype(dtype).reshape(*lead, T, 1, 1)
    angle = at * frequency.reshape((1,) * (at.ndim - 1) + frequency.shape)
    angle = jnp.broadcast_to(angle, (*batch, T, 1, H // 2))
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    exact = jnp.asarray(x).astype(dtype)
    pairs = exact.reshape(*x.shape[:-1], *((H // 2, 2) if interleaved else (2, H // 2)))
    axis = -1 if interleaved else -2
    a, b = jnp.take(pairs, 0, axis), jnp.take(pairs, 1, axis)
    rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis)
    return rotated.reshape(x.shape).astype(x.dtype)


# Rotates heads by their positions: `rotate(heads, positions) -> heads`.
Rotate: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class _Rotation:
    """A `functools.partial` that compares by function and arguments, as jit requires."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, heads: jax.Array, positions: jax.Array) -> jax.Array:
        rotated: jax.Array = self.function(*self.args, heads, positions, **dict(self.keywords))
        return rotated


def static_rotation(rotate: Rotate | None) -> Rotate | None:
    """Makes `rotate` a static argument of jit: equal partials become equal `_Rotation`s."""
    if type(rotate) is not partial:
        return rotate
    found = _Rotation(rotate.func, rotate.args, tuple(sorted(rotate.keywords.items())))
    try:
        hash(found)
    except TypeError:  # an argument is an array
        return rotate
    return found
