"""Writes new tokens to a cache, by a native kernel, or by plain XLA where the kernel cannot run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations.native.replacing import in_place_of_xla, unavailable


class Settings(NamedTuple):
    """The static config of a write.

    Attributes:
      in_xla: `(settings, operands)` -> the result of `write`, computed in plain XLA.
    """

    in_xla: Callable[["Settings", Sequence[Any]], Sequence[jax.Array]]

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the FFI call: none."""
        return {}

    def shapes(self, pool: Any, *_: Any) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of the result, given all operands."""
        return [(pool.shape, pool.dtype)]


def write(
    pool: Any,
    tokens: jax.Array,
    pages: jax.Array,
    slots: jax.Array,
    sources: Any = None,
    targets: Any = None,
) -> jax.Array:
    """Returns `pool`, `P K page *H`, with `tokens`, `B T K *H`, at `pages` and `slots`, `B T`.

    Before that, page `sources[b]` is copied to page `targets[b]`, both `B` (None: no copies). Pages,
    slots and targets beyond the end of their axis write nothing. No index may be negative, and the
    source of a page that is overwritten lies in the pool. If the pool is donated, it is overwritten
    in place.
    """
    pool = jnp.asarray(pool)
    none = jnp.full(tokens.shape[0], pool.shape[0], np.int32)
    places = (pages, slots, *(none if x is None else x for x in (sources, targets)))
    operands = pool, tokens.astype(pool.dtype), *(jnp.asarray(x, np.int32) for x in places)
    if unavailable() is not None:
        return in_xla(Settings(in_xla), operands)[0]
    (found,) = in_place_of_xla("write_cache").bind(*operands, settings=Settings(in_xla))
    written: jax.Array = found
    return written


def in_xla(_: Settings, operands: Sequence[Any]) -> tuple[jax.Array]:
    """Computes `write` in plain XLA. `operands`: its arguments, with tokens in the dtype of the pool,
    and pages beyond the pool in place of None."""
    pool, tokens, pages, slots, sources, targets = operands
    bits, tokens = as_bits(pool), as_bits(tokens)
    old = jnp.take(bits, sources, 0, mode="clip")
    bits = bits.at[targets].set(old, mode="drop")
    bits = bits.at[pages, :, slots].set(tokens, mode="drop")
    return (from_bits(bits, pool.dtype),)


def as_bits(x: jax.Array) -> jax.Array:
    """Bitcasts float8 to uint8: to write one token, XLA would convert a whole cache to float16 and
    back. Other dtypes are unchanged."""
    float8 = x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, np.floating)
    return jax.lax.bitcast_convert_type(x, np.uint8) if float8 else x


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Undoes `as_bits` of an array that had the dtype `dtype`."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)
