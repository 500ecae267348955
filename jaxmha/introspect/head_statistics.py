"""Statistics of the positions that every head attends."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmha.converters.layout.arrays import AnyArray, NDArray, to_numpy

# Rows of weights may sum to 1 + ROUNDED, because they may have been rounded to half precision.
ROUNDED = 0.02


class HeadStatistics(NamedTuple):
    """Means over the queries of one head; shares are fractions of the attention weight.

    Attributes:
      entropy: entropy of a query's weights in nats: 0 for a single key, log S for uniform weights.
      itself: the share of the query's own position.
      previous: the share of the position before, over the queries that have one.
      next: the share of the position after, likewise.
      first: the share of the first key.
      named: the share of keys whose token is in the argument `named`; None if that is empty.
      same: the share of other positions with the query's own token, over the queries that have one;
        None if no token occurs twice, or if there are no tokens.
    """

    entropy: float
    itself: float | None
    previous: float | None
    next: float | None
    first: float
    named: float | None
    same: float | None


def head_statistics(
    weights: AnyArray,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    named: Sequence[str] = (),
) -> list[HeadStatistics]:
    """Statistics of each head of `(N, T, S)` weights; the rows are assumed to sum to 1.

    Args:
      weights: `(N, T, S)`.
      tokens: T tokens of the queries.
      key_tokens: S tokens of the keys; default `tokens` if T equals S.
      named: tokens such as `[CLS]` and `[SEP]`.

    `itself`, `previous` and `next` are None unless T equals S (self-attention).

    Raises:
      ValueError: a shape or a number of tokens does not fit, or tokens are missing.

    >>> import numpy as np
    >>> (head,) = head_statistics(np.eye(3)[None, [0, 0, 1]], ["a", "b", "a"])
    >>> head.previous, head.entropy, head.same
    (1.0, 0.0, 0.0)
    """
    array = as_weights(weights)
    _, T, S = array.shape
    keys = tokens if key_tokens is None and T == S else key_tokens
    check_tokens("tokens", tokens, T, "T")
    check_tokens("key_tokens", keys, S, "S")
    if named and keys is None:
        raise ValueError(f"the tokens of the keys are needed to find {', '.join(named)}")
    chosen = None if not named else np.isin(np.array(keys), list(named))
    twin = np.zeros((T, S), bool)
    if tokens is not None and key_tokens is None and T == S:
        twin = np.equal.outer(np.array(tokens), np.array(tokens)) & ~np.eye(T, dtype=bool)
    rows = twin.any(1)
    found = []
    for head in array.astype(np.float64):
        positive = np.where(head > 0, head, 1.0)

        def along(offset: int, head: NDArray = head) -> float | None:
            return float(np.diagonal(head, offset).mean()) if T == S > abs(offset) else None

        found.append(
            HeadStatistics(
                float(-(head * np.log(positive)).sum(1).mean()) + 0.0,
                along(0),
                along(-1),
                along(1),
                float(head[:, 0].mean()),
                None if chosen is None else float(head[:, chosen].sum(1).mean()),
                float(np.where(twin, head, 0.0).sum(1)[rows].mean()) if rows.any() else None,
            )
        )
    return found


def as_weights(weights: AnyArray, batch: int | None = None) -> NDArray:
    """Weights as `(N, T, S)`; for `(B, N, T, S)` the batch row with index `batch`.

    Raises:
      ValueError: the shape is another, the batch row is out of range, or values are not weights.
    """
    array = to_numpy(weights)
    if array.dtype.kind not in "fiub" and "float" not in array.dtype.name:
        raise ValueError(f"weights: expected numbers, got {array.dtype}")
    if array.ndim == 4:
        if batch is None:
            raise ValueError(
                f"weights: axes (B, N, T, S) = {array.shape} are several pictures: choose one of the "
                f"{len(array)} batch rows by batch= (--batch)"
            )
        if not -len(array) <= batch < len(array):
            raise ValueError(f"expected batch from 0 to {len(array) - 1}, got {batch}")
        array = array[batch]
    elif batch is not None:
        raise ValueError(
            f"batch={batch} is given, and weights of shape {array.shape} have no batch"
        )
    array = array[None] if array.ndim == 2 else array
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(
            "weights: expected axes (N, T, S), (T, S) or, with batch=, (B, N, T, S), got shape "
            f"{array.shape}"
        )
    array = array.astype(np.float32) if array.dtype.itemsize < 4 else array
    if np.isinf(array).any() or (array < 0).any():
        low, high = np.nanmin(array), np.nanmax(array)
        raise ValueError(
            f"weights are finite and not negative, got values from {low:.3g} to {high:.3g}: these "
            "look like logits; take their softmax over the last axis first"
        )
    if (most := np.nanmax(array.sum(-1), initial=0.0)) > 1 + ROUNDED:
        raise ValueError(
            f"weights: a row of keys sums to 1, or to 0 where nothing may be attended, got {most:.3g}: "
            "give weights before dropout, normalised over the last axis"
        )
    return array


def check_tokens(name: str, tokens: Sequence[str] | None, size: int, letter: str) -> None:
    """Raises ValueError if the number of tokens differs from the number of positions."""
    if tokens is not None and len(tokens) != size:
        raise ValueError(
            f"{name}: expected {letter}={size} strings, one for each position, got {len(tokens)}"
        )
