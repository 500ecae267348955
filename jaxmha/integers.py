"""Converts lengths, offsets and ids of any integer dtype to equivalent 32-bit integers.

JAX without x64 silently truncates 64-bit integers to their lowest 32 bits, and sums of 8 or 16 bits
overflow.
"""

from types import ModuleType
from typing import Any, TypeGuard, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxmha.arrays import Array, conversion_hint, is_rounded, reject_foreign, shown
from jaxmha.compiled import compiled

# An integer or an array of integers; `near` and `narrow` return anything else unchanged.
Bound = TypeVar("Bound")

# Bounds positions and lengths: FAR plus a position still fits int32.
FAR = 2**30
_LIMITS = np.iinfo(np.int32)


def library(*arrays: object) -> ModuleType:
    """`jax.numpy` if any array is JAX's, else NumPy, so that converters need no device."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def near(bound: Bound, least: int = -FAR) -> Bound:
    """Clips an integer to [least, FAR]; an array of integers is also converted to int32."""
    clipped: Any = bound
    if isinstance(bound, int):
        clipped = max(least, min(bound, FAR))
    elif is_integers(bound):
        clipped = _clipped(narrow(bound), least, FAR)
    found: Bound = clipped
    return found


def narrow(bound: Bound) -> Bound:
    """Converts integers of any dtype to int32, clipped to its range.

    Anything but an array of integers is returned unchanged.
    """
    if not is_integers(bound) or bound.dtype == np.int32:
        return bound
    clipped: Any = bound
    least, most = _limits(bound)
    low, high = max(_LIMITS.min, least), min(_LIMITS.max, most)
    if (low, high) != (least, most):
        # NumPy and JAX give equal results only if the bounds have the dtype of the array.
        clipped = _clipped(bound, *map(np.dtype(bound.dtype).type, (low, high)))
    found: Bound = clipped.astype(np.int32)
    return found


def _clipped(x: Any, low: Any, high: Any) -> Any:
    return (np.clip if library(x) is np else _clipped_on_device)(x, low, high)


@compiled(1, 2)
def _clipped_on_device(x: jax.Array, low: Any, high: Any) -> jax.Array:
    return jnp.clip(x, low, high)


def comparable(
    query_ids: Array | None, key_value_ids: Array | None
) -> tuple[Array | None, Array | None]:
    """Converts segment ids of queries and keys to one dtype that JAX has; equal ids stay equal.

    Ids that JAX would truncate are renumbered if their values are known.

    Raises:
      TypeError: ids are traced, and no integer dtype that JAX has holds both arrays.
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
    if all(is_known(x) for x in pair):
        return _renumbered(*pair)
    if held and np.dtype(np.uint64) not in dtypes and np.dtype(np.int64) in dtypes:
        return pair[0].astype(np.int64), pair[1].astype(np.int64)
    raise TypeError(
        f"segment ids: no integer dtype of this program holds both {pair[0].dtype} of the queries "
        f"and {pair[1].dtype} of the keys: make both one dtype where they are made"
    )


def require_integers(kind: str, *, optional: bool = False, **arguments: object) -> None:
    """Raises TypeError for an argument that is not an array of integers; `optional` allows None.

    `kind` names the expected kind in the message, such as "an integer array".
    """
    for name, value in arguments.items():
        if value is None and optional:
            continue
        reject_foreign(name, value)
        dtype = getattr(value, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, np.integer):
            found = type(value).__name__ if dtype is None else dtype
            raise TypeError(f"{name} must be {kind}, got {found}{conversion_hint(name, value)}")


def require_sizes(
    *, least: int = 1, most: int = _LIMITS.max, optional: bool = False, **arguments: object
) -> None:
    """Raises ValueError unless sizes are integers in `[least, most]`; `optional` allows None."""
    for name, size in arguments.items():
        if (optional and size is None) or export.is_symbolic_dim(cast(int, size)):
            continue
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {shown(size)}")
        if size > most:
            raise ValueError(f"{name} must be at most {most}, got {size!r}")


def is_integers(x: object) -> TypeGuard[Array]:
    return isinstance(x, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(
        x.dtype, np.integer
    )


def _limits(x: Array | np.integer[Any]) -> tuple[int, int]:
    """The smallest and largest integer of the dtype of `x`."""
    info = jnp.iinfo(x.dtype)  # type: ignore[no-untyped-call]
    return int(info.min), int(info.max)


def _fitting(ids: Array) -> Array:
    """Casts ids to int32 if all are known to fit, else returns them unchanged."""
    least, most = _limits(ids)
    if least >= _LIMITS.min and most <= _LIMITS.max:
        return ids.astype(np.int32)
    if library(ids) is jnp:
        return ids
    fits = ids.size == 0 or (ids.min() >= _LIMITS.min and ids.max() <= _LIMITS.max)
    return ids.astype(np.int32) if fits else ids


def is_known(x: Array) -> bool:
    """True if the host can read the values: the array is not traced, and its shards are local."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def has_values(x: object) -> bool:
    """True if the host can read `x`: a NumPy array or number, or a known JAX array not yet donated."""
    if isinstance(x, jax.Array):
        return is_known(x) and not is_donated(x)
    return isinstance(x, np.ndarray | np.generic)


def is_donated(x: object) -> bool:
    """True for a JAX array that was donated to an earlier call, which deleted it."""
    return isinstance(x, jax.Array) and is_known(x) and x.is_deleted()


def on_host(name: str, array: object) -> np.ndarray[Any, np.dtype[Any]]:
    """The values of an array; TypeError if it has none or is traced, ValueError if it was donated."""
    reject_donated(name, array)
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{name} is traced, and its values are needed on the host: make this call outside of the "
            "compiled function"
        )
    if not hasattr(array, "__array__"):
        raise TypeError(f"{name} must be an array with values, got {type(array).__name__}")
    return np.asarray(jax.device_get(array))


def reject_donated(name: str, array: object) -> None:
    """Raises ValueError for a JAX array that was donated to an earlier call."""
    if is_donated(array):
        raise ValueError(
            f"{name} was donated to an earlier call, which deleted it: use the cache that it returned"
        )


def _renumbered(*pair: Array) -> tuple[Array, Array]:
    """Replaces each id by its rank among the ids of both arrays; negative ids stay negative."""
    ids = [np.asarray(x) for x in pair]
    bits = np.concatenate([x.astype(np.uint64).reshape(-1) for x in ids])  # negatives wrap around
    below = np.concatenate([(x < 0).reshape(-1) for x in ids])
    known, ranks = np.unique(bits, return_inverse=True)
    ranks = np.where(below, ranks - known.size, ranks).astype(np.int32)
    query, key_value = np.split(ranks, [ids[0].size])
    return query.reshape(ids[0].shape), key_value.reshape(ids[1].shape)
