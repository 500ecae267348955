"""Our side of many calls, by one program: masks in chunks of one size, materialised."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmha import MHAParams, Semantics, dot_product_attention, multi_head_attention
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.masks.spec import Masks
from tests.masks.draws import emptied, flat, pairs, repeated
from tests.tolerance import assert_close

CHUNK = 32


def layer(
    params: MHAParams, inputs: Sequence[Any], masks: Mapping[str, NDArray], semantics: Semantics
) -> list[NDArray]:
    """Outputs `(C, B, T, D)` and weights of one input under C masks `(C, B, N, T, S)`."""
    count, found = len(masks["mask"]), []
    given = repeated(CHUNK, *map(to_numpy, inputs))
    run: Any = multi_head_attention
    for chunk in _chunks(masks):
        output = run(
            params,
            *given,
            semantics=semantics,
            return_weights=True,
            implementation="reference",
            **chunk,
        )
        found.append([np.asarray(x) for x in output])
    return [np.concatenate(parts)[:count] for parts in zip(*found, strict=True)]


def heads(
    inputs: Sequence[Any],
    masks: Mapping[str, NDArray],
    semantics: Semantics,
    query_lengths: NDArray | None = None,
) -> NDArray:
    """Outputs `(C, B, T, N, h)` of `dot_product_attention`; lengths are `(C, B)`."""
    count, found = len(masks["mask"]), []
    given = repeated(CHUNK, *map(to_numpy, inputs))
    shape = given[0].shape[:4]
    full = np.full((count, shape[1]), shape[2]) if query_lengths is None else query_lengths
    run: Any = dot_product_attention
    for chunk in _chunks({**masks, "query_seq_lengths": full.astype(np.int32)}):
        output = run(
            *map(flat, given),
            fully_masked=semantics.fully_masked,
            softmax_dtype=semantics.softmax_dtype,
            implementation="reference",
            **{name: flat(array) for name, array in chunk.items()},
        )
        found.append(np.reshape(output, (*shape, -1 if output.size else given[2].shape[-1])))
    return np.concatenate(found)[:count]


def _chunks(arrays: Mapping[str, NDArray]) -> Iterator[dict[str, NDArray]]:
    """The arrays CHUNK rows at a time, the last filled up with its first row."""
    count = len(next(iter(arrays.values())))
    for start in range(0, count, CHUNK):
        rows = np.arange(start, start + CHUNK)
        rows[rows >= count] = start
        yield {name: array[rows] for name, array in arrays.items()}


def otherwise_answered(
    values: NDArray, made: Masks, actual: NDArray, theirs: NDArray, factor: float
) -> None:
    """Rows that are refused: the framework returns the mean of the values `(B, S, K, h)` that the
    mask blocks, as the message says.

    Such rows of both answers `(B, T, N, h)` become 0, and all others stay to be compared.
    """
    mask, bias = made
    for b, n, i in np.argwhere(emptied(mask, bias)):
        k = n * values.shape[2] // actual.shape[2]
        blocked = values[b, ~pairs(mask)[b, n, i], k]
        assert_close(theirs[b, i, n], blocked.mean(0), factor=factor)
        actual[b, i, n] = theirs[b, i, n] = 0
