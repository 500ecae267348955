"""Patterns of Boolean arrays, True = attend, by which the mask linter knows causal and padding masks."""

import numpy as np

from jaxmha.converters.layout.arrays import NDArray

# How a causal triangle of axes (T, S) was turned -> what turns it back.
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
    """Padding `(B, S)` of a batch of `(T, S)` slices; None unless the slices differ only by it."""
    rows = np.asarray(slices.any(1))
    if not (slices == (slices.any(0, keepdims=True) & rows[:, None])).all():
        return None
    differ = not (rows == rows[:1]).all()
    batch = differ and rows.all(1).any() and rows.any(1).all() and one_block(rows)
    return rows if batch else None


def is_batch(rows: NDArray, T: int | None) -> bool:
    """True if rows of `S` entries are padding of a batch, and cannot be what successive queries see.

    Each query sees as many keys as the one before or more: one more, or all up to its own key, or
    any number where `T` says that there are as many queries as rows.
    """
    known = len(rows) == T
    rows = rows[rows.any(1)]
    if not one_block(rows) or not len(rows) or (rows == rows[:1]).all():
        return False
    seen = rows.sum(1)
    if rows[:, -1].all():
        seen = seen[::-1]  # left padding: queries that see the future see less and less
    own = np.arange(len(rows)) + rows.shape[1] - len(rows) + 1  # the last queries of all keys
    steps = np.diff(seen)
    ordered = known or (steps <= 1).all() or (seen >= own).all()
    return not (ordered and (steps >= 0).all())


def is_inverted_causal(slices: NDArray) -> bool:
    """True if the hidden pairs form a causal triangle, at either corner, cropped by padding."""
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
    """True if slices are a causal triangle within padding that is inverted."""
    T, S = slices.shape[1:]
    columns = np.asarray(slices.any(1))
    if not columns.any() or not is_inverted_padding(~columns, S):
        return False
    triangles = (np.tri(T, S, offset, dtype=bool) for offset in {0, S - T})
    return any((slices == (past & columns[:, None])).all() for past in triangles if not past.all())


def turned(slices: NDArray) -> str:
    """The key of `TURNS` if all slices are a causal triangle turned so; else empty.

    A triangle of two queries is as likely padding.
    """
    T, S = slices.shape[1:]
    if T != S or T < 3:
        return ""
    past = np.tri(T, dtype=bool)
    forms = dict(zip(TURNS, (past.T, past[::-1], past[:, ::-1]), strict=True))
    return next((name for name, form in forms.items() if (slices == form).all()), "")


def is_inverted_batch(rows: NDArray) -> bool:
    """True if rows of `S` entries show padding on the right, and cannot be what queries see.

    Queries see their own key alone next to left padding, or one key fewer than the query before.
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
