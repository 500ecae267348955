"""Checks of caches, and of the tokens that their methods `append`."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxmha import checks, explicit_sharding
from jaxmha.arrays import Array, require_arrays, shown
from jaxmha.compiled import compiled
from jaxmha.dims import bind
from jaxmha.implementations.native.cache_write import as_bits, from_bits
from jaxmha.integers import (
    FAR,
    is_integers,
    is_known,
    near,
    on_host,
    reject_donated,
    require_sizes,
)
from jaxmha.quantized import is_scaled, storage_dtype

ArrayT = TypeVar("ArrayT", bound=Array)

# Array of a cache -> its axes.
DENSE = {"key": "B K S H", "value": "B K S h", "lengths": "B"}
PAGED = {
    "key": "P K page H",
    "value": "P K page h",
    "table": "B M",
    "lengths": "B",
    "key_scale": "P K page",
    "value_scale": "P K page",
}

COUNTED = ("lengths", "table")  # the arrays of integers


def clipped_counts(lengths: ArrayT) -> ArrayT:
    """Clips lengths to [0, 2**30], so that lengths plus T fit int32; arrays become int32."""
    return near(lengths, 0)


def require_integers(name: str, array: Array) -> None:
    """Raises TypeError unless the array has an integer dtype; the message has its name."""
    if not jnp.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be an integer array, got {array.dtype}")


def check_dtypes(parts: Mapping[str, Array | None], *, paged: bool) -> None:
    """Raises TypeError if an array of a cache has a wrong dtype; ValueError if a cache of int8 or
    float8 lacks scales, another cache has some, or the cache was donated."""
    for name, part in parts.items():
        # Scales are None unless keys and values are int8 or float8.
        require_arrays(optional=name.endswith("_scale"), **{f"cache.{name}": part})
        reject_donated(f"cache.{name}", part)
    stored = {f"cache.{name}": part for name, part in parts.items() if name not in COUNTED}
    checks.reject_rounding(**stored)
    for name, part in parts.items():
        if part is None:
            continue
        if name in COUNTED:
            require_integers(f"cache.{name}", part)
        elif name.endswith("_scale") and part.dtype not in (np.float32, np.float64):
            raise TypeError(f"cache.{name} must be float32 or float64, got {part.dtype}")
        elif not paged:
            checks.floating_dtype(part.dtype, f"the dtype of cache.{name}")
    for name in ("key", "value") if paged else ():
        _check_scale(name, parts)


def _check_scale(name: str, parts: Mapping[str, Array | None]) -> None:
    stored, scale = parts[name], parts[f"{name}_scale"]
    assert stored is not None
    dtype = storage_dtype(stored.dtype, f"the dtype of cache.{name}")
    if is_scaled(dtype) != (scale is not None):
        raise ValueError(
            f"cache.{name} is {dtype}, which is stored "
            f"{'with' if is_scaled(dtype) else 'without'} scales, and cache.{name}_scale is "
            f"{'None' if scale is None else 'an array'}: make it by PagedKVCache.empty"
        )


def check_shapes(
    parts: Mapping[str, Array | None], axes: Mapping[str, str], sizes: dict[str, int]
) -> None:
    """Checks the arrays of a cache against their axes, and adds their sizes to `sizes`."""
    for name, letters in axes.items():
        part = parts[name]
        if part is not None:
            bind(f"cache.{name}", part.shape, letters, sizes)


def check_lengths(
    parts: Mapping[str, Array | None], axes: Mapping[str, str], left: int | None
) -> None:
    """Raises ValueError if a row has a negative length or more tokens than it can hold, or shapes do
    not fit `axes`, DENSE or LATENTS; TypeError for a wrong dtype.

    `left`: left bound of the window, as in `KVCache.validate`.
    """
    sizes: dict[str, int] = {}
    check_dtypes(parts, paged=False)
    check_shapes(parts, axes, sizes)
    lengths, slots = on_host("cache.lengths", parts["lengths"]), sizes["S"]
    require_sizes(least=0, optional=True, left=left)
    window = left is not None and left < slots
    of = "positions of a window" if window else f"the S={slots} slots of a row"
    reject_outside("cache.lengths", lengths, FAR if window else slots, of)


def checked_rows(rows: Array, batch_size: int) -> jax.Array:
    """Returns row numbers of a cache, `(C,)`, as int32; traced ones below 0 become B, as `taken` needs.

    Raises ValueError if they do not have one axis, or one is known and outside [0, B), and TypeError
    unless they are integers.
    """
    require_arrays(rows=rows)
    require_integers("rows", rows)
    bind("rows", rows.shape, "C", {})
    if is_known(rows):
        reject_outside("rows", rows, batch_size - 1, f"of the B={batch_size} rows of the cache")
    return _reaching(jnp.asarray(near(rows)), batch_size)


@compiled(1)
def _reaching(rows: jax.Array, batch_size: int) -> jax.Array:
    return jnp.where(rows < 0, batch_size, rows)


def checked_row(name: str, row: int | Array, batch_size: int) -> int | Array:
    """Returns the row; TypeError unless it is an integer, ValueError if known and not in [0, B)."""
    if isinstance(row, bool) or not (isinstance(row, int) or (is_integers(row) and row.ndim == 0)):
        raise TypeError(f"{name} must be an integer, the number of a row, got {shown(row)}")
    if isinstance(row, jax.core.Tracer):
        return row
    if not 0 <= int(row) < batch_size:
        raise ValueError(f"{name} must be in [0, {batch_size}), the rows of the cache, got {row}")
    return row


def checked_flags(rows: Array, batch_size: int) -> jax.Array:
    """Returns `rows` as a JAX array; ValueError unless they are Boolean, of shape `(B,)`."""
    require_arrays(rows=rows)
    rows = jnp.asarray(rows)
    if rows.dtype != np.bool_ or rows.shape != (batch_size,):
        raise ValueError(
            f"rows: expected a Boolean array of axes (B) ({batch_size},), True = free, got "
            f"{rows.dtype} of shape {rows.shape}"
        )
    return rows


@compiled(2)
def taken(x: Array, rows: Int[jax.Array, "C"], empty: int = 0) -> jax.Array:
    """Returns the given rows of an array of a cache; `empty` for row numbers that it does not have."""
    if not x.shape[0]:  # it has no rows
        return jnp.full((*rows.shape, *x.shape[1:]), empty, x.dtype)
    bits = as_bits(jnp.asarray(x))
    # On explicit mesh axes, the new rows are sharded as those of x if the mesh divides their number.
    whole = explicit_sharding.like(bits, rows.shape[0])
    found = bits.at[rows].get(mode="fill", fill_value=empty, out_sharding=whole)
    return from_bits(found, x.dtype)


def checked_tokens(
    sizes: dict[str, int], counts: Array, left: int | None, **new: tuple[Array, str]
) -> list[jax.Array]:
    """Checks the arguments of `append`, and adds T to `sizes`, which has all other sizes.

    `new`: the arrays of new tokens, each with its axes.

    Returns:
      counts as int32, clipped to [0, T], and the arrays of tokens.

    Raises:
      ValueError: a shape does not fit, a count is known and not in [0, T], or left is not an
        integer of at least 0.
      TypeError: tokens are not floating, or counts are not integers.
    """
    require_arrays(counts=counts)
    for name, (x, axes) in new.items():
        require_arrays(optional=False, **{name: x})
        checks.reject_rounding(**{name: x})
        checks.promoted(**{name: x})
        bind(name, x.shape, axes, sizes)
    require_sizes(least=0, optional=True, left=left)
    require_integers("counts", counts)
    bind("counts", counts.shape, "B", sizes)
    T = sizes["T"]
    if is_known(counts) and isinstance(T, int):
        reject_outside("counts", counts, T, "of the T new tokens of a row")
    clipped = _at_most(jnp.asarray(clipped_counts(counts)), T)
    return [clipped, *(jnp.asarray(x) for x, _ in new.values())]


@compiled(1)
def _at_most(counts: jax.Array, most: int) -> jax.Array:
    return jnp.minimum(counts, most)


def reject_outside(name: str, values: Array, most: int | None, of: str) -> None:
    """Raises ValueError if a value is not in `[0, most]`; `most` None: no upper bound.

    The values must not be traced. `of` describes them in the message.
    """
    found = np.asarray(values)
    wrong = found < 0 if most is None else (found < 0) | (found > most)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        end = "at least 0" if most is None else f"0 to {most}"
        raise ValueError(f"{name}[{at}] is {found[at]}: expected {end}, {of}")
