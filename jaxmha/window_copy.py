"""Copies the window of new tokens out of a ring buffer that is too short to hold all of it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmha.cached_step import Cache
from jaxmha.kv_cache import KVCache
from jaxmha.mask import Mask


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
      mask: over the S slots, with one batch axis.
    """
    S, T = before.slots, key.shape[1]
    left, _ = mask.window_size or (None, None)
    if not isinstance(before, KVCache) or left is None or not left < S < left + T:
        return after, mask
    size = left + T
    slots = jnp.arange(size, dtype=np.int32)[None]

    def held(lengths: jax.Array) -> Int[jax.Array, "B s"]:
        """The position of the latest token in each slot of the copy, negative if it is empty."""
        last = lengths[:, None] - 1
        return last - (last - slots) % size

    # Tokens to the left of the window may be overwritten; the window excludes them.
    found = before.at(held(jnp.asarray(before.lengths)).clip(0))
    copy, _ = KVCache(found.keys, found.values, before.lengths).append(key, value, counts, left)
    return copy, _over_copy(mask, held(jnp.asarray(copy.lengths)) % S, S)


def _over_copy(mask: Mask, slots: Int[jax.Array, "B s"], S: int) -> Mask:
    """A mask over the slots of the copy: `slots` gives the slot of each in the mask over S slots."""
    padding, array = mask.key_value_padding, mask.array
    if padding is not None:
        padding = jnp.take_along_axis(jnp.asarray(padding), slots, 1)
    if array is not None:
        array = jnp.broadcast_to(array, (*array.shape[:3], S))
        array = jnp.take_along_axis(array, slots[:, None, None], 3)
    return replace(mask, key_value_padding=padding, array=array)
