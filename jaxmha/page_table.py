"""Page tables, `B M`: the pages of a pool that hold the tokens of each sequence.

Entry m of row b is the page that starts at position `m * page_size`; -1: no page. The table is the
only state: the number of rows that hold a page is counted from it when it is needed, so that it
cannot contradict the table. Every function computes with NumPy on NumPy arrays and with JAX on JAX
arrays, so that a host can predict which pages a compiled step will allocate.

Only pages that start below the length of a row may be shared with other rows. Source:
Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(2023), section 4.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jaxmha.arrays import Array
from jaxmha.integers import library

Table = Int[Array, "B M"]
Counts = Int[Array, "B"]


class Growth(NamedTuple):
    """A table with room for more tokens, and the pages to copy before they are written.

    Attributes:
      table: the new table; an entry is -1 where the pool has too few free pages.
      sources: per row, the page to copy; no copy if it is the number of pages of the pool.
      targets: per row, the page to copy it to; no copy if it is the number of pages of the pool.
    """

    table: Table
    sources: Counts
    targets: Counts


def holders(table: Table, pages: int) -> Int[Array, "P"]:
    """For each of the P pages, the number of rows that hold it."""
    held = table.reshape(-1)
    if library(table) is np:
        return np.bincount(held[held >= 0], minlength=pages).astype(np.int32)
    at = jnp.where(held < 0, pages, held)
    return jnp.zeros(pages, np.int32).at[at].add(1, mode="drop")


def pages_for(tokens: Any, page_size: int) -> Any:
    """The number of pages that `tokens` tokens need."""
    return -(-tokens // page_size)


def released(table: Table, keep: Bool[Array, "B M"]) -> Table:
    """The table with -1 where `keep` is False."""
    xp = library(table, keep)
    found: Table = xp.where(keep, table, np.int32(-1))
    return found


def truncated(table: Table, lengths: Counts, page_size: int) -> Table:
    """The table without the pages that start at or beyond the lengths."""
    entries = np.arange(table.shape[1], dtype=np.int32)[None]
    return released(table, entries < pages_for(lengths, page_size)[:, None])


def within_window(table: Table, lengths: Counts, left: int, page_size: int) -> Table:
    """Returns the table without pages that no token at position `lengths` or later can attend.

    A row keeps the page of its last token even with `left` 0, so that a row without this page is
    known to be broken.
    """
    ends = (np.arange(table.shape[1], dtype=np.int32)[None] + 1) * page_size
    return released(table, ends > lengths[:, None] - max(left, 1))


def grown(table: Table, lengths: Counts, counts: Counts, page_size: int, pages: int) -> Growth:
    """Adds pages for `counts` tokens after `lengths`, and pages for copies where these tokens would
    write to a page that another row shares."""
    xp = library(table, lengths, counts)
    (B, M), entries = table.shape, np.arange(table.shape[1], dtype=np.int32)[None]
    first, writes = lengths // page_size, counts > 0
    written = (entries >= first[:, None]) & (
        entries < pages_for(lengths + counts, page_size)[:, None]
    )
    written &= writes[:, None]
    begun = (lengths % page_size > 0)[:, None] & (entries == first[:, None])
    shared = writes & begun.any(1) & _held_by_others(table, first, writes)
    # If the page with the row's last tokens is missing, it is not replaced: the loss would not show.
    fresh = written & (((table < 0) & ~begun) | (shared[:, None] & begun))
    # The k-th entry that needs a page gets the k-th page that no row holds.
    rank = xp.cumsum(fresh.reshape(-1)).astype(np.int32).reshape(B, M)
    unheld = xp.cumsum(holders(table, pages) == 0).astype(np.int32)
    page = xp.searchsorted(unheld, rank.reshape(-1)).astype(np.int32).reshape(B, M)
    page = xp.where(page < pages, page, np.int32(-1))
    after = xp.where(fresh, page, table)
    at = xp.clip(first, 0, max(M - 1, 0))[:, None]
    old, new = (xp.take_along_axis(x, at, 1)[:, 0] for x in (table, after))
    copied = shared & (new >= 0)
    none = np.int32(pages)
    return Growth(after, xp.where(copied, old, none), xp.where(copied, new, none))


def extended(
    table: Table, lengths: Counts, counts: Counts, left: int | None, page_size: int, pages: int
) -> tuple[Growth, Bool[Array, "B"]]:
    """The table after a step that adds `counts` tokens, and the rows that lack a page.

    A row that lacks a page before the step gets no pages. A row loses the pages after a missing
    one: it then lacks the page of its last token, which no window frees, and later steps find it
    broken.

    `left`: left bound of a window, to the left of which pages are freed; None: no window.
    """
    xp = library(table, lengths, counts)
    first = lengths * 0
    # Users may have reduced lengths, or written page numbers that the pool does not have.
    table = released(truncated(table, lengths, page_size), table < pages)
    if left is not None:
        table = within_window(table, lengths, left, page_size)
        first = (lengths - max(left, 1)).clip(0)
    broken = lacks(table, first, lengths, page_size)
    growth = grown(table, lengths, xp.where(broken, 0, counts), page_size, pages)
    end = lengths + counts
    holes = missing(growth.table, first, end, page_size)
    kept = released(growth.table, xp.cumsum(holes, axis=1) == 0)
    return growth._replace(table=kept), lacks(growth.table, first, end, page_size)


def _held_by_others(table: Table, first: Counts, writes: Bool[Array, "B"]) -> Bool[Array, "B"]:
    """Rows that need a copy of their page `first` to write to, because another row keeps it.

    If all rows that share a page write to it, the first of these rows keeps it.
    """
    xp = library(table, first)
    B, M = table.shape
    at = xp.clip(first, 0, max(M - 1, 0))
    theirs = table[:, at].T if xp is np else jnp.take(table, at, 1).T  # [b, c]: table[c, first[b]]
    rows = xp.arange(B, dtype=np.int32)  # B may be symbolic, which NumPy does not know
    b, c = rows[:, None], rows[None]
    own = xp.take_along_axis(theirs, b, 1)
    same = (theirs == own) & (own >= 0) & (b != c)
    leaves = writes[None] & (first[None] == first[:, None])
    found: Array = (same & (~leaves | (c < b))).any(1)
    return found


def missing(table: Table, first: Counts, end: Counts, page_size: int) -> Bool[Array, "B M"]:
    """True for entries of the table that need a page for positions in `[first, end)`, and have none."""
    starts = np.arange(table.shape[1], dtype=np.int32)[None] * page_size
    needed = (starts + page_size > first[:, None]) & (starts < end[:, None])
    return needed & (table < 0)


def lacks(table: Table, first: Counts, end: Counts, page_size: int) -> Bool[Array, "B"]:
    """True for rows that lack a page, or an entry, for some of the positions `[first, end)`."""
    full = end > table.shape[1] * page_size
    found: Array = missing(table, first, end, page_size).any(1) | full
    return found


def problem(table: Table, lengths: Counts, page_size: int, pages: int) -> str | None:
    """Returns a message about the first entry that no sequence of calls produces, or None. The
    arrays must be NumPy arrays.

    A row may lack only its first pages, which a window frees.
    """
    M = table.shape[1]
    for row, (entries, length) in enumerate(zip(table, lengths, strict=True)):
        if not 0 <= length <= M * page_size:
            return f"lengths[{row}] is {length}: expected 0 to {M * page_size}, {M} pages of {page_size}"
        if ((entries < -1) | (entries >= pages)).any():
            at = int(np.flatnonzero((entries < -1) | (entries >= pages))[0])
            return f"table[{row}, {at}] is {entries[at]}: expected -1, or a page in [0, {pages})"
        used = pages_for(int(length), page_size)
        held = entries >= 0
        if held[used:].any():
            at = used + int(np.flatnonzero(held[used:])[0])
            return f"table[{row}, {at}] is {entries[at]}: row {row} has {length} tokens in {used} pages"
        if used and not (held[:used].any() and held[int(held.argmax()) : used].all()):
            at = int(np.flatnonzero(~held[:used])[-1])
            return f"table[{row}, {at}] is -1: row {row} lacks a page of its {length} tokens"
    rows, entries = np.nonzero(table >= 0)
    held = table[rows, entries]
    for page in np.flatnonzero(np.bincount(held, minlength=pages) > 1):
        if (
            len(set(entries[held == page])) > 1
            or len(set(rows[held == page])) < (held == page).sum()
        ):
            places = [
                f"[{r}, {m}]" for r, m in zip(rows, entries, strict=True) if table[r, m] == page
            ]
            return (
                f"page {page} is at table{' and '.join(places)}: expected one position of each row"
            )
    return None
