"""Patterns of causal masks and padding in Boolean arrays (True = attend), for the mask linter."""

import numpy as np

from jaxmha.converters.layout.arrays import NDArray

# Fault of a transposed or reversed causal triangle `(T, S)` -> expression that restores it.
TURNS = {
    "the keys of query t begin at t": "mask.swapaxes(-1, -2)",
    "its queries stand in reverse": "mask[..., ::-1, :]",
    "its keys stand in reverse": "mask[..., ::-1]",
}


def one_block(rows: NDArray) -> bool:
    """True if the True entries are a prefix of every row, or a suffix of every row, as in padding."""
    steps = np.diff(rows.astype(int), axis=1)
    return bool((steps <= 0).all() or (steps >= 0).all())


def products(slices: NDArray) -> tuple[NDArray, NDArray]:
    """For each slice, the rows and the columns that contain a True."""
    return np.asarray(slices.any(2)), np.asarray(slices.any(1))


def paddings(slices: NDArray) -> NDArray | None:
    """The padding `(B, S)` of a batch of `(T, S)` slices; None unless they differ in it alone."""
    rows = np.asarray(slices.any(1))
    if not (slices == (slices.any(0, keepdims=True) & rows[:, None])).all():
        return None
    differ = not (rows == rows[:1]).all()
    batch = differ and rows.all(1).any() and rows.any(1).all() and one_block(rows)
    return rows if batch else None


def is_batch(rows: NDArray, T: int | None) -> bool:
    """True if `rows`, `(n, S)`, are padding of a batch, and not the keys of n successive queries.

    Successive queries see no fewer keys than the query before (no more, if all see the last key).
    If T is n, the counts may differ by any number; otherwise by one, or queries see all keys up to
    their own.
    """
    known = len(rows) == T
    rows = rows[rows.any(1)]
    if not one_block(rows) or not len(rows) or (rows == rows[:1]).all():
        return False
    seen = rows.sum(1)
    if rows[:, -1].all():
        seen = seen[::-1]  # left padding: queries that see the future see ever fewer keys
    own = np.arange(len(rows)) + rows.shape[1] - len(rows) + 1  # if they are the last queries
    steps = np.diff(seen)
    ordered = known or (steps <= 1).all() or (seen >= own).all()
    return not (ordered and (steps >= 0).all())


def is_inverted_causal(slices: NDArray) -> bool:
    """True if hidden pairs form a causal triangle from either corner; padding may crop it."""
    T, S = slices.shape[1:]
    hidden = ~slices
    rows, columns = products(hidden)
    outer = rows[:, :, None] & columns[:, None]
    for offset in {0, S - T}:
        past = np.tri(T, S, offset, dtype=bool)
        shown = slices[:, ~past].all() and not past.all()
        if not shown or not (hidden == (past & outer)).all() or not one_block(columns):
            continue
        # A cropped triangle needs at least three columns to be distinguished from padding.
        if (hidden == past).all():
            return True
        if ((~past & outer).any((1, 2)) & (columns.sum(1) > 2)).any():
            return True
    return False


def is_inverted_padding(hidden: NDArray, length: int) -> bool:
    """True if `(B, S)` hides all of the longest row, and one block of tokens in every other row."""
    return length > 1 and one_block(hidden) and bool(hidden.all(1).any() and hidden.any(1).all())


def hides_longest(slices: NDArray) -> bool:
    """True if the slices combine a causal triangle with inverted padding."""
    T, S = slices.shape[1:]
    columns = np.asarray(slices.any(1))
    if not columns.any() or not is_inverted_padding(~columns, S):
        return False
    triangles = (np.tri(T, S, offset, dtype=bool) for offset in {0, S - T})
    return any((slices == (past & columns[:, None])).all() for past in triangles if not past.all())


def turned(slices: NDArray) -> str:
    """The key of `TURNS` that describes all slices; "" if none does.

    Fewer than three queries give "": such a triangle is as likely padding.
    """
    T, S = slices.shape[1:]
    if T != S or T < 3:
        return ""
    past = np.tri(T, dtype=bool)
    forms = dict(zip(TURNS, (past.T, past[::-1], past[:, ::-1]), strict=True))
    return next((name for name, form in forms.items() if (slices == form).all()), "")


def is_inverted_batch(rows: NDArray) -> bool:
    """True if `rows`, `(T, S)`, are inverted right padding, and not the keys of T queries.

    They may be keys of queries if only the last query sees a key, if each query sees one key fewer
    than the query before, or if all valid queries see the same valid keys.
    """
    T, S = rows.shape
    queries, keys = np.asarray(rows.any(1)), np.asarray(rows.any(0))
    seen = rows.sum(1)
    suffix = (np.diff(rows.astype(int), axis=1) >= 0).all()
    if not suffix or not keys.any() or not is_inverted_padding(~rows, S):
        return False
    own = seen[-1] == 1 and not seen[:-1].any()
    future = (seen[1:] == np.maximum(seen[:-1] - 1, 0)).all()
    both = T <= S and (rows == (queries[:, None] & keys)).all() and (queries == keys[S - T :]).all()
    return not (own or future or both)
