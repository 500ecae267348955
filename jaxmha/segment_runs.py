"""Ends of packed sequences from segment ids, where each id fills one run of positions.

Kernels for packed sequences read offsets. An id may have several runs, so ends are computed only if
the host can read the ids, or if the caller promises one run for each id.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, Integer
from numpy.typing import NDArray

from jaxmha.arrays import Array, shapes_too
from jaxmha.integers import require_sizes

# If the host reads the ids, a row has at most MOST runs, and the number of ends is a power of two
# of at least LEAST, so that batches of different content share few programs.
LEAST, MOST = 8, 128


def ends_of_runs(
    query_ids: Integer[Array, "*B T"],
    key_value_ids: Integer[Array, "*B S"],
    max_segments: int | None = None,
) -> Int32[Array, "*B M"] | None:
    """The position after each run of ids, padded with T; None if an id may have several runs.

    `max_segments`: promises that queries and keys have the same ids, that each id fills one run,
    and that a row has at most `max_segments` runs.

    Raises:
      ValueError: the promise is broken by ids that the host can read.

    >>> ids = np.array([[5, 5, 0], [1, 2, 3]])
    >>> ends_of_runs(ids, ids, max_segments=3).tolist()
    [[2, 3, 3], [1, 2, 3]]
    """
    promised = max_segments is not None
    require_sizes(max_segments=max_segments, optional=True)
    if isinstance(query_ids, np.ndarray) and isinstance(key_value_ids, np.ndarray):
        same = query_ids is key_value_ids or np.array_equal(query_ids, key_value_ids)
        found = _read(query_ids, max_segments or MOST) if same and query_ids.ndim else None
        if promised and found is None:
            raise ValueError(
                f"max_segments={max_segments} promises the same ids for queries and keys, each in one "
                f"run, and at most {max_segments} in a row; these ids are not so"
            )
        if promised or found is None:
            return found
        more = max(LEAST, 1 << (found.shape[-1] - 1).bit_length()) - found.shape[-1]
        pad = ((0, 0),) * (found.ndim - 1) + ((0, more),)
        return np.pad(found, pad, constant_values=query_ids.shape[-1])
    if max_segments is None:
        return None
    if query_ids is not key_value_ids:
        raise ValueError(
            "max_segments promises the same ids for queries and keys: give one array as both"
        )
    return shapes_too(partial(_traced, max_segments=max_segments))(query_ids)


def _read(ids: NDArray[np.integer[Any]], most: int) -> NDArray[np.int32] | None:
    """The ends of runs, padded to the longest row; None if an id has two runs, or a row has more
    than `most` runs."""
    *batch, T = ids.shape
    if ids.size == 0:
        return None
    flat = ids.reshape(-1, T)
    first = np.ones(flat.shape, bool)
    first[:, 1:] = flat[:, 1:] != flat[:, :-1]
    counts = first.sum(1)
    if counts.max() > most:
        return None
    rows, places = np.nonzero(first)
    values = flat[rows, places]
    order = np.lexsort((values, rows))
    repeated = np.diff(rows[order]) == 0
    repeated &= values[order][1:] == values[order][:-1]
    if repeated.any():
        return None
    ends = np.full((len(flat), counts.max()), T, np.int32)
    inner = np.arange(counts.max()) < counts[:, None] - 1  # all but each row's last
    ends[inner] = places[places > 0]  # a run ends where the next begins
    return ends.reshape(*batch, -1)


def _traced(ids: Integer[Array, "*B T"], max_segments: int) -> Int32[Array, "*B M"]:
    """The ends of runs of traced ids, by a sort: one kernel, where sums over positions take several."""
    *batch, T = ids.shape
    positions = jnp.arange(1, T, dtype=np.int32)
    first = jnp.sort(jnp.where(ids[..., 1:] != ids[..., :-1], positions, np.int32(T)), stable=False)
    more = max(max_segments - T + 1, 0)
    ends = jnp.pad(first, ((0, 0),) * len(batch) + ((0, more),), constant_values=np.int32(T))
    return ends[..., :max_segments]
