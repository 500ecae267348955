"""`KVCache`: keys and values of the tokens so far, one ring buffer per sequence."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from jaxmha import checks
from jaxmha.arrays import Array, DTypeLike
from jaxmha.cache_arguments import (
    DENSE,
    check_dtypes,
    check_lengths,
    check_shapes,
    checked_rows,
    checked_tokens,
    clipped_counts,
    taken,
)
from jaxmha.cached_step import Tile
from jaxmha.compiled import compiled
from jaxmha.explicit_sharding import full_like, in_auto_axes, specs_of_leaves
from jaxmha.implementations.native.cache_write import as_bits, from_bits, write
from jaxmha.implementations.native.replacing import unavailable
from jaxmha.integers import FAR, require_sizes
from jaxmha.params import MHAParams, check
from jaxmha.quantized import unscaled_dtype
from jaxmha.record_repr import record_repr


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, in a ring buffer: slot `p % S` holds position p.

    A plain pytree: donate it to the step that returns the next cache. To roll back, reduce the
    lengths, `cache._replace(lengths=earlier)`, as long as no token that is still attended has been
    overwritten: once a cache with `Mask.window(left, ...)` has wrapped around, by at most S - left
    tokens.

    Attributes:
      key: `(B, K, S, H)`, S slots.
      value: `(B, K, S, h)`.
      lengths: `(B,)` int32, number of tokens so far per sequence; a negative length counts as 0.
        Positions are counted up to 2**30, beyond which the outputs of a sequence are NaN.
    """

    key: Array
    value: Array
    lengths: Array

    def __repr__(self) -> str:
        return record_repr(self)

    @classmethod
    def empty(
        cls, params: MHAParams, batch_size: int, length: int, dtype: DTypeLike | None = None
    ) -> "KVCache":
        """A cache with room for `length` tokens of each sequence.

        Args:
          params: parameters of the layer, which give K, H and h.
          batch_size: B.
          length: S, at most 2**30. With `Mask.window(left, ...)` in every step, left + 1 slots
            are enough for sequences of up to 2**30 tokens.
          dtype: default the dtype of the parameters. Keys and values are rounded to it once, when a
            token is written, as by `astype`: values beyond its range become inf, or NaN if it has
            no inf. Steps compute in the dtype of their inputs. float8 takes a quarter of the bytes
            of float32.

        Raises:
          ValueError: a size is not an integer of at least 0, or length is more than 2**30.
          TypeError: dtype is not floating, has fewer than 8 bits or no zero (float8_e8m0fnu), or is
            float64 without x64.

        >>> from jaxmha import init_params
        >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
        >>> KVCache.empty(params, 5, 7).key.shape
        (5, 2, 7, 3)
        """
        sizes = check(params)
        require_sizes(least=0, batch_size=batch_size)
        require_sizes(least=0, most=FAR, length=length)
        dtype = (
            checks.promoted(
                **{
                    "params.key.kernel": params.key.kernel,
                    "params.value.kernel": params.value.kernel,
                }
            )
            if dtype is None
            else dtype
        )
        dtype = unscaled_dtype(dtype)
        shape = (batch_size, sizes["K"], length)
        return cls(
            jnp.zeros((*shape, sizes["H"]), dtype),
            jnp.zeros((*shape, sizes["h"]), dtype),
            jnp.zeros(batch_size, np.int32),
        )

    @property
    def slots(self) -> int:
        """S, the number of slots of a sequence."""
        return self.key.shape[2]

    def emptied(self) -> "KVCache":
        """The cache with lengths 0."""
        return self._replace(lengths=full_like(self.lengths, 0))

    def take(self, rows: Integer[Array, "C"]) -> "KVCache":
        """The cache with copies of these rows, in this order: it has C rows.

        Keeps, permutes or repeats rows, for beam search: `cache.take(parents)`. A traced number of
        a row outside [0, B) gives an empty row.

        Raises:
          ValueError: rows do not have one axis, or one is known and outside [0, B).
          TypeError: rows are not integers, or an array of the cache has a wrong dtype.
        """
        check_dtypes(self._asdict(), paged=False)
        check_shapes(self._asdict(), DENSE, {})
        at = checked_rows(rows, self.key.shape[0])
        lengths = clipped_counts(self.lengths)
        return KVCache(taken(self.key, at), taken(self.value, at), taken(lengths, at))

    def validate(self, left: int | None = None) -> None:
        """Raises ValueError if a row has a negative length, or more tokens than it can hold.

        `left`: left bound of the window of the steps; with one below S, the cache is a ring buffer,
        and lengths have no bound but 2**30. Raises ValueError also if shapes do not fit each other,
        and TypeError for a wrong dtype. It reads lengths from the device, and cannot run under jit;
        a compiled step counts negative lengths as 0, and returns NaN for rows that are too long.
        """
        check_lengths(self._asdict(), DENSE, left)

    def append(
        self,
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K h"],
        counts: Integer[Array, "B"],
        left: int | None = None,
    ) -> tuple["KVCache", Bool[jax.Array, "B"]]:
        """Writes the first `counts` of T tokens to each row; token p is written to slot `p % S`.

        Returns the cache, and True for rows that have too many tokens: more than S, or more than
        2**30 if `left`, the left bound of a window, is below S (a ring buffer). Tokens are rounded
        to the dtype of the cache. Traced counts are clipped to [0, T].

        Raises:
          ValueError: a shape does not fit, a count is known and not in [0, T], or left is not an
            integer of at least 0.
          TypeError: tokens or the cache are not floating, or counts or lengths are not integers.
        """
        sizes: dict[str, int] = {}
        check_dtypes(self._asdict(), paged=False)
        check_shapes(self._asdict(), DENSE, sizes)
        tokens = {"key": (key, "B T K H"), "value": (value, "B T K h")}
        more, keys, values = checked_tokens(sizes, counts, left, **tokens)
        starts = jnp.asarray(clipped_counts(self.lengths))
        # A ring buffer never fills, but positions are limited to FAR.
        rings = left is not None and left < self.slots
        most = FAR if rings else self.slots

        def written(*arrays: jax.Array) -> tuple[KVCache, jax.Array]:
            return _appended(most, *arrays)

        specs = specs_of_leaves((self, self.lengths))
        return in_auto_axes(written, specs, self.key, self.value, keys, values, starts, more)

    def tile_size(self, block: int) -> int:
        """The number of slots per tile: at most `block`."""
        return min(block, self.slots)

    def tile(self, first: int | jax.Array, size: int) -> Tile:
        """Keys and values of `size` slots, starting at slot `first`."""
        keys, values = (
            jax.lax.dynamic_slice_in_dim(x, first, size, 2) for x in (self.key, self.value)
        )
        return Tile(keys, values)

    def at(self, positions: Int[jax.Array, "B s"]) -> Tile:
        """Keys and values of these positions, in their order."""
        slots = (positions % self.slots)[:, None, :, None]

        def gather(x: Array) -> jax.Array:
            bits = as_bits(jnp.asarray(x))
            return from_bits(jnp.take_along_axis(bits, slots, 2, mode="clip"), x.dtype)

        return Tile(gather(self.key), gather(self.value))

    def whole(self) -> Tile:
        """Keys and values of all slots."""
        return Tile(jnp.asarray(self.key), jnp.asarray(self.value))

    def pages(self) -> None:
        """Returns None: the cache has no page table."""
        return


@compiled(0)
def _appended(most: int, *arrays: jax.Array) -> tuple[KVCache, jax.Array]:
    """`KVCache.append` on checked arrays; `most`: the tokens that a row can have."""
    *stored, keys, values, starts, more = arrays
    keys, values = with_tokens(stored, [keys, values], starts, more)
    return KVCache(keys, values, starts + more), starts + more > most


def with_tokens(
    stored: Sequence[Array],
    new: Sequence[jax.Array],
    starts: Int[jax.Array, "B"],
    counts: Int[jax.Array, "B"],
) -> list[jax.Array]:
    """Writes the first `counts` of T tokens, `B T K _`, to the arrays `stored`, `B K S _`.

    Positions count from `starts`; position p is written to slot `p % S`.
    """
    S, (B, T) = stored[0].shape[2], new[0].shape[:2]
    if S == 0:
        return [jnp.asarray(x) for x in stored]
    # Numbers of 8 bits are written as bits, which have no derivative: no gradient passes the cache.
    if stored[0].dtype.itemsize == 1:
        stored, new = jax.lax.stop_gradient((list(stored), list(new)))
    if T > S:  # writes only the last S tokens, which would overwrite the earlier ones
        rows = jnp.maximum(counts - S, 0)[:, None] + jnp.arange(S, dtype=np.int32).reshape(1, S)
    else:
        rows = jnp.broadcast_to(jnp.arange(T, dtype=np.int32).reshape(1, T), (B, T))
    # Tokens beyond `counts` get slot S, which does not exist: they are not written.
    slots = jnp.where(rows < counts[:, None], (starts[:, None] + rows) % S, S)

    if unavailable() is None:
        batch = jnp.arange(B, dtype=np.int32)[:, None]
        pages = jnp.broadcast_to(batch, rows.shape)
        chosen = (x if T <= S else x[batch, rows] for x in new)
        return [write(old, x, pages, slots) for old, x in zip(stored, chosen, strict=True)]

    def put(old: jax.Array, new: jax.Array, row: jax.Array, slot: jax.Array) -> jax.Array:
        chosen = jnp.swapaxes(new[row], 0, 1).astype(old.dtype)  # K T H
        return old.at[:, slot].set(chosen, mode="drop", unique_indices=False)

    mapped = jax.vmap(put)
    pairs = zip(stored, new, strict=True)
    return [mapped(jnp.asarray(old), tokens, rows, slots) for old, tokens in pairs]
