"""The keys that new tokens attend: the slots of a cache, or a copy of their window."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmha.arrays import Array
from jaxmha.cached_step import Cache
from jaxmha.kv_cache import KVCache
from jaxmha.mask import Mask
from jaxmha.read_tokens import valid_at


def with_window_copy(
    before: Cache,
    after: Cache,
    key: Float[jax.Array, "B T K H"],
    value: Float[jax.Array, "B T K h"],
    counts: Int[jax.Array, "B"],
    mask: Mask,
) -> tuple[Cache, Mask]:
    """The cache that T new tokens attend, and the mask over its slots.

    A ring buffer of S slots holds the last S tokens. If the window of the first new token has a
    token that the last new one overwrites (S < left + T), the new tokens attend a copy of left + T
    slots, in which position p is in slot `p % (left + T)`. Otherwise they attend `after`.

    Args:
      before: the cache without the new tokens; its lengths are not negative.
      after: the cache with them.
      key, value: heads of the new tokens, of which the first `counts` are valid.
      mask: with one batch axis; its array is over the S slots, and its padding over positions.
    """
    S, T = before.slots, key.shape[1]
    left, _ = mask.window_size or (None, None)
    if not isinstance(before, KVCache) or left is None or not left < S:
        return after, mask  # a slot holds one position for good
    if left + T <= S:
        return after, _padding_at(mask, _held(after.lengths, S))
    size = left + T
    # Tokens to the left of the window may be overwritten; the window excludes them.
    found = before.at(_held(before.lengths, size).clip(0))
    copy, _ = KVCache(found.keys, found.values, before.lengths).append(key, value, counts, left)
    positions = _held(copy.lengths, size)
    mask = _padding_at(mask, positions)
    if mask.array is not None:
        array = jnp.broadcast_to(mask.array, (*mask.array.shape[:3], S))
        slots = (positions % S)[:, None, None]
        mask = replace(mask, array=jnp.take_along_axis(array, slots, 3))
    return copy, mask


def _held(lengths: Array, size: int) -> Int[jax.Array, "B s"]:
    """The position of the latest token in each of `size` slots, negative if the slot is empty."""
    last = jnp.asarray(lengths)[:, None] - 1
    return last - (last - jnp.arange(size, dtype=np.int32)[None]) % size


def _padding_at(mask: Mask, positions: Int[jax.Array, "B s"]) -> Mask:
    """Returns the mask with its key/value padding over slots; `positions`: of the tokens in them."""
    padding = mask.key_value_padding
    if padding is None:
        return mask
    return replace(mask, key_value_padding=valid_at(jnp.asarray(padding), positions))
