"""Rotary position embedding, for use between `project` and `combine`."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from jaxmha.arrays import Array, require_arrays
from jaxmha.checks import promoted, reject_rounding
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.integers import require_integers, require_sizes
from jaxmha.rotary_frequencies import Frequencies, powers
from jaxmha.static_checks import flag, number


def rope(
    x: Float[Array, "*B T N H"],
    positions: Integer[Array, "*#B T"] | Integer[Array, "n *#B T"],
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    inv_freq: Float[Array, "P"] | None = None,
    rotary_dim: int | None = None,
    frequencies: Frequencies | None = None,
    sections: tuple[int, ...] | None = None,
) -> Float[jax.Array, "*B T N H"]:
    """Rotates pairs of features of queries or keys by angles proportional to the position.

    Pair p rotates by `positions * base ** (-2 * p / H)`, so that `rope(q, i) @ rope(k, j)` depends
    on the positions through `i - j` alone.

    Args:
      x: projected queries or keys, `(*B, T, N, H)`; H is even.
      positions: `(*B, T)`, batch axes may be 1, or `(T,)` for all batch rows; with `sections`, one
        more axis in front.
      base: roughly the wavelength of the slowest pair over 2 pi.
      interleaved: pairs features `(2p, 2p + 1)` (GPT-J, Meta's Llama files); by default
        `(p, p + H / 2)` (GPT-NeoX, Llama in transformers). Weights trained with one convention
        are wrong in the other unless the rows of their query and key kernels are permuted.
      inv_freq: `(P,)`, the angle per position of each of P pairs, instead of `base`: the first 2 P
        features are rotated, and the others are left as they are.
      rotary_dim: rotates the first `rotary_dim` features as if they were the whole head.
      frequencies: result of `rope_frequencies`, instead of `base`: the frequencies of a scaled
        RoPE, and a factor that multiplies cosine and sine.
      sections: the number of pairs that each kind of position rotates, in order: `(t, h, w)` for
        positions `(3, *B, T)` of time, row and column (multimodal rotary positions, Qwen2-VL).

    Returns:
      The rotated array in the dtype of `x`; angles are float32 (float64 for float64).

    Raises:
      ValueError: H is odd or less than 2 P, positions do not fit, or two of `inv_freq`,
        `rotary_dim` and `frequencies` are given. TypeError: x is not floating, or an argument has
        another type.

    Source: Su et al., "RoFormer" (2021), section 3.2; Wang et al., "Qwen2-VL" (2024).

    >>> import jax.numpy as jnp
    >>> rope(jnp.ones((2, 3, 5, 4)), jnp.arange(3)).shape
    (2, 3, 5, 4)
    """
    require_arrays(x=x, positions=positions)
    require_integers("an integer array", positions=positions)
    reject_rounding(x=x)
    promoted(x=x)
    interleaved = flag("interleaved", interleaved)
    if not number("base", base) > 0:
        raise ValueError(f"base must be positive, got {base}")
    given = {"inv_freq": inv_freq, "rotary_dim": rotary_dim, "frequencies": frequencies}
    if len(chosen := [name for name, value in given.items() if value is not None]) > 1:
        raise ValueError(f"{' and '.join(chosen)} exclude each other: each says which pairs turn")
    if not isinstance(frequencies, Frequencies | None):
        found = type(frequencies).__name__
        raise TypeError(
            f"frequencies must be those of rope_frequencies, got {found}: inv_freq= takes an array"
        )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(frequencies)):
        raise TypeError(
            "frequencies must be static, got traced ones: make them no argument of jit, but let the "
            "function close over them, or pass their values as inv_freq="
        )
    require_sizes(least=0, optional=True, rotary_dim=rotary_dim)
    if sections is not None:
        _check_sections(sections)
    values, factor = _frequencies(x, base, inv_freq, rotary_dim, frequencies)
    return rotate_pairs(x, _angles(x, positions, values, sections), interleaved, factor)


def _check_sections(sections: object) -> None:
    if not isinstance(sections, tuple | list):
        raise TypeError(f"sections must be a tuple of integers, got {type(sections).__name__}")
    for section in sections:
        require_sizes(least=0, **{"each of sections": section})


def _frequencies(
    x: Array,
    base: float,
    inv_freq: Float[Array, "P"] | None,
    rotary_dim: int | None,
    frequencies: Frequencies | None,
) -> tuple[jax.Array, float]:
    """The angle per position of every rotated pair, in the accumulation dtype, and the factor of
    cosine and sine."""
    dtype = accumulation_dtype(x.dtype)
    H = x.shape[-1] if x.ndim else 0
    if frequencies is not None:
        inv_freq = np.asarray(frequencies.values, dtype)
    if inv_freq is None:
        dims = H if rotary_dim is None else rotary_dim
        if x.ndim < 3 or dims % 2 or not 0 <= dims <= H:
            even = "an even H" if rotary_dim is None else f"H of at least rotary_dim={dims}, even"
            raise ValueError(f"x: expected axes (*B, T, N, H) with {even}, got shape {x.shape}")
        if dtype == np.float32:
            return jnp.asarray(1 / powers(float(base), dims)), 1.0
        return jnp.asarray(base, dtype) ** (-jnp.arange(0, dims, 2, dtype=dtype) / dims), 1.0
    require_arrays(inv_freq=inv_freq)
    promoted(inv_freq=inv_freq)
    if inv_freq.ndim != 1:
        raise ValueError(f"inv_freq: expected axes (P), got shape {inv_freq.shape}")
    turned = 2 * inv_freq.shape[0]
    if x.ndim < 3 or turned > H:
        raise ValueError(
            f"x: expected axes (*B, T, N, H) with H of at least {turned}, twice the "
            f"length of inv_freq {inv_freq.shape}, got shape {x.shape}"
        )
    return jnp.asarray(inv_freq, dtype), 1.0 if frequencies is None else frequencies.factor


def rotate_pairs(
    x: Float[Array, "*B T N H"],
    angle: Float[jax.Array, "*B T #N P"],
    interleaved: bool = False,
    factor: float = 1.0,
) -> Float[jax.Array, "*B T N H"]:
    """Rotates the first 2 P features by angles, in the dtype of the angles; the others stay."""
    P = angle.shape[-1]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor

    front = x[..., : 2 * P]
    exact = jnp.asarray(front).astype(angle.dtype)
    pairs = exact.reshape(*x.shape[:-1], *((P, 2) if interleaved else (2, P)))
    axis = -1 if interleaved else -2
    a, b = jnp.take(pairs, 0, axis), jnp.take(pairs, 1, axis)
    rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis)
    turned = rotated.reshape(front.shape).astype(x.dtype)
    if front.shape == x.shape:
        return turned
    return jnp.concatenate([turned, jnp.asarray(x[..., 2 * P :])], -1)


def _angles(
    x: Array, positions: Array, frequency: jax.Array, sections: tuple[int, ...] | None
) -> jax.Array:
    """The angle of every pair at every position, `*B T 1 P`."""
    *batch, T, _, _ = x.shape
    P = frequency.shape[0]
    kinds = 1 if sections is None else len(sections)
    if sections is not None and (sum(sections) != P or positions.shape[:1] != (kinds,)):
        raise ValueError(
            f"sections={sections}: expected P={P} pairs in all, and positions of axes "
            f"({kinds}, *#B, T), got positions of shape {positions.shape}"
        )
    own = positions.shape if sections is None else positions.shape[1:]
    lead = (1,) * (len(batch) - len(own) + 1) + own[:-1]
    broadcasts = len(lead) == len(batch) and all(
        size in (1, b) for size, b in zip(lead, batch, strict=True)
    )
    if own[-1:] != (T,) or not broadcasts:
        raise ValueError(
            f"positions: expected axes (T) or (*#B, T) with *B={tuple(batch)}, T={T}, got shape "
            f"{positions.shape}"
        )
    # Cast first: JAX without x64 truncates 64-bit integers.
    at = jnp.asarray(positions.astype(frequency.dtype)).reshape(kinds, *lead, T, 1, 1)
    if sections is not None:
        at = jnp.repeat(jnp.moveaxis(at, 0, -1)[..., 0, :], np.asarray(sections), -1)
    else:
        at = at[0]
    angle = at * frequency.reshape((1,) * (at.ndim - 1) + frequency.shape)
    return jnp.broadcast_to(angle, (*batch, T, 1, P))


# Rotates heads by their positions: `rotate(heads, positions) -> heads`.
Rotate: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


class _Rotation(partial[jax.Array]):
    """A `functools.partial` that compares by function and arguments, as jit requires."""

    def _compared(self) -> tuple[object, ...]:
        return self.func, self.args, tuple(sorted(self.keywords.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rotation) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())


def require_rotation(rotate: object) -> None:
    """Raises TypeError unless `rotate` is None or callable."""
    if not (rotate is None or callable(rotate)):
        raise TypeError(
            f"rotate must be a function rotate(heads, positions), such as jaxmha.rope, got {rotate!r}"
        )


def apply_rotation(rotate: Rotate, heads: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the rotated heads, cast to the dtype of `heads`: many rotations return float32 for
    half precision, and queries, keys and values must have one dtype.

    Raises ValueError if `rotate` changes the shape, and TypeError if it returns no floating array.
    """
    found = rotate(heads, positions)
    shape = getattr(found, "shape", None)
    if shape is None or not hasattr(found, "dtype"):
        raise TypeError(f"rotate must return an array, got {type(found).__name__}")
    if not jnp.issubdtype(found.dtype, np.floating):
        raise TypeError(f"rotate must return floating heads, got {found.dtype}")
    if shape != heads.shape:
        raise ValueError(
            f"rotate must return heads of the shape that it is given, {heads.shape}, got {shape}"
        )
    return found.astype(heads.dtype)


def static_rotation(rotate: Rotate | None) -> Rotate | None:
    """Returns `rotate` such that it can be a static argument of jit: a `functools.partial` becomes a
    `_Rotation`, which equals that of an equal partial. TypeError unless it is None or callable."""
    require_rotation(rotate)
    if type(rotate) is not partial:
        return rotate
    found = _Rotation(rotate.func, *rotate.args, **rotate.keywords)
    try:
        hash(found)
    except TypeError:  # an argument, such as an array, cannot be hashed
        return rotate
    return found
