"""Converts lengths, offsets and ids of any integer dtype to equivalent 32-bit integers.

JAX without x64 silently truncates 64-bit integers to their lowest 32 bits, and sums of 8 or 16 bits
overflow.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.arrays import is_rounded

# Larger than any position; the sum of both still fits 32 bits.
FAR = 2**30
_LIMITS = np.iinfo(np.int32)


def library(*arrays: Any) -> Any:
    """`jax.numpy` if any array is JAX's, else NumPy, so that converters need no device."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def near(bound: Any) -> Any:
    """Clips an offset or a length, or an array of them as int32, to +-FAR."""
    if isinstance(bound, int):
        return max(-FAR, min(bound, FAR))
    bound = narrow(bound)
    return library(bound).clip(bound, -FAR, FAR) if is_integers(bound) else bound


def narrow(bound: Any) -> Any:
    """Converts integers of any dtype to int32, clipped to its range.

    Anything but an array of integers is returned unchanged.
    """
    if not is_integers(bound) or bound.dtype == np.int32:
        return bound
    given = _limits(bound)
    low, high = max(_LIMITS.min, int(given.min)), min(_LIMITS.max, int(given.max))
    if (low, high) != (given.min, given.max):
        # Bounds in the dtype of the array: NumPy and JAX agree on no other form.
        bound = library(bound).clip(bound, *np.asarray([low, high], given.dtype))
    return bound.astype(np.int32)


def comparable(query_ids: Any, key_value_ids: Any) -> tuple[Any, Any]:
    """Converts both ids to one dtype that JAX has, preserving which ids are equal.

    Ids that JAX would truncate are renumbered.

    Raises:
      TypeError: the ids are traced, and no integer dtype of the program holds both.
    """
    if not (is_integers(query_ids) and is_integers(key_value_ids)):
        return query_ids, key_value_ids
    pair = _fitting(query_ids), _fitting(key_value_ids)
    dtypes = {np.dtype(x.dtype) for x in pair}
    if dtypes == {np.dtype(np.int32)}:
        return pair
    held = not any(is_rounded(x) for x in dtypes)
    if held and len(dtypes) == 1 and library(*pair) is jnp:
        return pair
    if all(_known(x) for x in pair):
        return _renumbered(*pair)
    if held and np.dtype(np.uint64) not in dtypes and np.dtype(np.int64) in dtypes:
        return pair[0].astype(np.int64), pair[1].astype(np.int64)
    raise TypeError(
        f"segment ids: no integer dtype of this program holds both {pair[0].dtype} of the queries "
        f"and {pair[1].dtype} of the keys: make both one dtype where they are made"
    )


def is_integers(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(
        x.dtype, np.integer
    )


def _limits(x: Any) -> Any:
    return jnp.iinfo(x.dtype)  # type: ignore[no-untyped-call]


def _fitting(ids: Any) -> Any:
    """Ids as int32 where they are known to fit."""
    given = _limits(ids)
    if given.min >= _LIMITS.min and given.max <= _LIMITS.max:
        return ids.astype(np.int32)
    if library(ids) is jnp:
        return ids
    fits = ids.size == 0 or (ids.min() >= _LIMITS.min and ids.max() <= _LIMITS.max)
    return ids.astype(np.int32) if fits else ids


def _known(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def _renumbered(*pair: Any) -> tuple[Any, Any]:
    """Ids by rank among all ids of both arrays; negative ids stay negative."""
    ids = [np.asarray(x) for x in pair]
    bits = np.concatenate([x.astype(np.uint64).reshape(-1) for x in ids])  # negatives wrap around
    below = np.concatenate([(x < 0).reshape(-1) for x in ids])
    known, ranks = np.unique(bits, return_inverse=True)
    ranks = np.where(below, ranks - known.size, ranks).astype(np.int32)
    query, key_value = np.split(ranks, [ids[0].size])
    return query.reshape(ids[0].shape), key_value.reshape(ids[1].shape)
