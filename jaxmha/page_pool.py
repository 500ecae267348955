"""`PagePool`: predicts on the host how compiled steps change the pages of a cache."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmha import checks, page_table
from jaxmha.arrays import Array, shown
from jaxmha.cache_arguments import reject_outside
from jaxmha.dims import bind
from jaxmha.integers import is_integers, near, on_host, require_sizes
from jaxmha.paged_cache import PagedKVCache


class PagePool:
    """The table and lengths of a `PagedKVCache` on the host, for a scheduler.

    A compiled step cannot raise: if the cache has too few free pages, outputs are NaN. Report every
    step and every change of the cache to the pool before it runs: the pool raises ValueError for a
    step that does not fit, and leaves its own state unchanged. It does not read the device.

    Raises:
      ValueError: the table or the lengths of the cache are not valid (`PagedKVCache.validate`).

    Attributes:
      table: `(B, M)`, the table of the cache after all reported steps.
      lengths: `(B,)`, the lengths of the cache after all reported steps.

    >>> import jax
    >>> from jaxmha import PagedKVCache, init_params
    >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
    >>> cache = PagedKVCache.empty(params, 3, 32, pages=8, page_size=4)
    >>> pool = PagePool(cache)
    >>> pool.extend([5, 1, 0])
    >>> pool.free_pages, pool.empty_rows
    (5, [2])
    """

    def __init__(self, cache: PagedKVCache) -> None:
        checks.require_type(PagedKVCache, cache=cache)
        cache.validate()
        self.pages = cache.key.shape[0]
        self.page_size = cache.page_size
        self.table = np.array(cache.table, np.int32)
        self.lengths = np.array(cache.lengths, np.int32)

    @property
    def free_pages(self) -> int:
        """The number of pages that no row holds."""
        return int((page_table.holders(self.table, self.pages) == 0).sum())

    @property
    def empty_rows(self) -> list[int]:
        """Rows without tokens."""
        return [int(row) for row in np.flatnonzero(self.lengths == 0)]

    def extend(self, counts: Sequence[int], *, left: int | None = None) -> None:
        """Reports a call of `extend` or `decode_step`; for `prefill`, free all rows first.

        Args:
          counts: number of tokens of each row, at most T: the `q_lengths` of the call, or the
            lengths of the prompts. A compiled step clips counts to T, which the pool does not know:
            `require_same` finds the difference.
          left: left bound of the window of the call; None: no window.

        Raises:
          ValueError: counts are not B integers of at least 0, a sequence would be longer than its
            row of the table, or the pool has too few free pages.
        """
        given = self._integers("counts", counts)
        if left is not None:
            require_sizes(least=0, left=left)
        lengths = self.lengths.astype(np.int64) + given
        longest = self.table.shape[1] * self.page_size
        if lengths.max(initial=0) > longest:
            row = int(lengths.argmax())
            would = int(self.lengths[row]) + int(counts[row])
            raise ValueError(
                f"row {row} has {self.lengths[row]} tokens and would have {would}: a row of "
                f"the table holds {self.table.shape[1]} pages of {self.page_size} tokens"
            )
        first = self.lengths * 0 if left is None else (self.lengths - max(left, 1)).clip(0)
        freed = page_table.lacks(self.table, first, self.lengths, self.page_size)
        if freed.any():
            raise ValueError(
                f"rows {_rows_in(freed)} attend tokens whose pages a window has freed: give the "
                "left bound of that window, or free these rows and read their tokens again"
            )
        growth, lacking = page_table.extended(
            self.table, self.lengths, given, near(left), self.page_size, self.pages
        )
        if lacking.any():
            raise ValueError(
                f"the pool has {self.free_pages} free pages of {self.pages}, too few for rows "
                f"{_rows_in(lacking)}: free a row, or give them fewer tokens"
            )
        self.table, self.lengths = np.asarray(growth.table), lengths.astype(np.int32)

    def fork(self, source: int | Array, target: int | Array) -> None:
        """Reports a call of `cache.fork(source, target)`; ValueError for a row out of range, and
        TypeError unless both are integers."""
        start, end = self._row("source", source), self._row("target", target)
        self.table[end], self.lengths[end] = self.table[start], self.lengths[start]

    def take(self, rows: Sequence[int] | Array) -> None:
        """Reports a call of `cache.take(rows)`; ValueError for a row out of range, and TypeError
        unless rows are a sequence of integers."""
        given = on_host("rows", rows) if isinstance(rows, jax.Array) else rows
        if not isinstance(given, Sequence | np.ndarray) or np.ndim(given) != 1:
            raise TypeError(
                f"rows must be a sequence of row numbers, those of cache.take(rows), got {shown(rows)}"
            )
        at = np.asarray([self._row("rows", row) for row in given], np.int32)
        self.table, self.lengths = self.table[at], self.lengths[at]

    def free(self, *rows: int | Array) -> None:
        """Reports a call of `cache.free`.

        Args:
          rows: the Boolean array of that call, `(B,)`, or the numbers of the rows that it frees.

        Raises:
          ValueError: a row is out of range, or an array is not of shape `(B,)`.
          TypeError: a row is neither an integer nor a Boolean array.
        """
        lengths = self.lengths.copy()
        for row in rows:
            lengths[self._freed(row)] = 0
        self.rollback(lengths)

    def rollback(self, lengths: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        """Reports a call of `cache.rollback(lengths)`; ValueError for a negative length."""
        given = self._integers("lengths", lengths)
        self.lengths = np.minimum(given, self.lengths).astype(np.int32)
        self.table = np.asarray(page_table.truncated(self.table, self.lengths, self.page_size))

    def require_same(self, cache: PagedKVCache) -> None:
        """Raises ValueError unless the cache is in the reported state; reads from the device."""
        checks.require_type(PagedKVCache, cache=cache)
        sizes = cache.key.shape[0], cache.page_size
        if sizes != (self.pages, self.page_size):
            raise ValueError(
                f"cache has {sizes[0]} pages of {sizes[1]} tokens: expected {self.pages} pages of "
                f"{self.page_size}, those of the pool"
            )
        shape = dict(zip("BM", self.table.shape, strict=True))
        for name, axes in (("lengths", "B"), ("table", "B M")):
            expected, found = getattr(self, name), on_host(f"cache.{name}", getattr(cache, name))
            bind(f"cache.{name}", found.shape, axes, shape)
            for at in np.argwhere(expected != found)[:1].tolist():
                raise ValueError(
                    f"cache.{name} is not as reported to the pool: {name}{at} is "
                    f"{found[tuple(at)]}, expected {expected[tuple(at)]}"
                )

    def _integers(self, name: str, values: object) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Converts values to one integer per row, clipped to 2**30; ValueError if they do not fit
        or are negative."""
        given = on_host(name, values) if isinstance(values, jax.Array) else np.asarray(values)
        if given.shape != self.lengths.shape or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(
                f"{name}: expected B={self.lengths.size} integers, got {shown(values)}"
            )
        reject_outside(name, given, None, "a number of tokens")
        clipped: np.ndarray[tuple[int], np.dtype[np.int32]] = near(given)
        return clipped

    def _freed(self, row: Any) -> Any:
        """The number of a row, or a Boolean array of all rows, as an index of `lengths`."""
        if getattr(row, "dtype", None) == np.bool_ and row.shape != ():
            freed = on_host("rows", row)
            bind("rows", freed.shape, "B", {"B": self.lengths.size})
            return freed
        return self._row("row", row)

    def _row(self, name: str, row: object) -> int:
        """The number of a row, which may be an array without axes that the host can read."""
        if isinstance(row, jax.Array):
            row = on_host(name, row)
        flag = isinstance(row, bool)
        if flag or not (isinstance(row, int) or (is_integers(row) and row.ndim == 0)):
            raise TypeError(
                f"{name} must be an integer, got {shown(row)}: give the number of a row"
            )
        if not 0 <= int(row) < self.lengths.size:
            raise ValueError(f"{name} must be in [0, {self.lengths.size}), got {row}")
        return int(row)


def _rows_in(found: Array) -> str:
    """The numbers of the rows where `found` is True, for a message."""
    return shown(np.flatnonzero(found).tolist())
