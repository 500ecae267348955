"""Converts arguments that restrict attention to a `Mask`."""

from collections.abc import Sequence
from typing import Any

from jaxmha import checks, segment_runs
from jaxmha.arrays import Array
from jaxmha.integers import require_integers
from jaxmha.mask import Mask
from jaxmha.mask_checks import require_lengths
from jaxmha.semantics import Semantics


def as_mask(mask: Array | Mask | None) -> Mask:
    """Converts a mask argument (array, `Mask` or None) to a `Mask`."""
    if mask is None:
        return Mask()
    return mask if isinstance(mask, Mask) else Mask.dense(mask)


def with_window(mask: Mask, semantics: Semantics) -> Mask:
    """Adds `semantics.local_window_size` to the mask, if it is set."""
    window = semantics.local_window_size
    return mask if window is None else mask & Mask.window(*window)


def mask_of_keywords(
    is_causal: bool,
    query_lengths: Array | None,
    key_value_lengths: Array | None,
    window: int | Sequence[int | None] | None,
    segment_ids: Array | tuple[Array, Array] | None,
) -> Mask:
    """Returns one mask for the keyword arguments that restrict attention, such as `is_causal`."""
    several = isinstance(segment_ids, tuple | list)
    ids: tuple[Any, ...] = tuple(segment_ids) if several else (segment_ids, segment_ids)  # type: ignore[arg-type]
    if len(ids) != 2:
        raise ValueError(
            "segment_ids must be one array (B, T), or a pair of query ids (B, T) and key/value ids "
            f"(B, S), got {len(ids)}"
        )
    arrays = {"query_seq_lengths": query_lengths, "key_value_seq_lengths": key_value_lengths}
    require_lengths(**arrays)
    for x in ids if several or segment_ids is not None else ():
        require_integers("an integer array", segment_ids=x)
    ends = None if segment_ids is None else segment_runs.ends_of_runs(*ids)
    return Mask(
        0 if is_causal else None,
        checks.window(window).window_size,
        query_lengths=query_lengths,
        key_value_lengths=key_value_lengths,
        query_segments=ids[0],
        key_value_segments=ids[1],
        packed_ends=ends,
    )


# Field of a mask -> the keyword argument that sets it, for error messages.
KEYWORDS = {
    "query_lengths": "query_seq_lengths",
    "key_value_lengths": "key_value_seq_lengths",
    "query_segments": "segment_ids",
    "key_value_segments": "segment_ids",
}
