"""`PagedKVCache`: keys and values of a ragged batch in pages of one pool."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from jaxmha import checks, page_table
from jaxmha.arrays import Array, DTypeLike, require_arrays
from jaxmha.cache_arguments import (
    PAGED,
    check_dtypes,
    check_shapes,
    checked_flags,
    checked_row,
    checked_rows,
    checked_tokens,
    clipped_counts,
    reject_outside,
    taken,
)
from jaxmha.cached_step import Tile
from jaxmha.compiled import compiled
from jaxmha.explicit_sharding import full_like, in_auto_axes, specs_of_leaves
from jaxmha.implementations import platforms
from jaxmha.implementations.native.cache_write import as_bits, from_bits, write
from jaxmha.integers import FAR, is_integers, is_known, near, on_host, require_sizes
from jaxmha.params import MHAParams, check
from jaxmha.quantized import is_scaled, quantize, storage_dtype
from jaxmha.record_repr import record_repr
from jaxmha.sharding import spec


class PagedKVCache(NamedTuple):
    """Keys and values of the tokens so far, in pages that sequences take from one pool.

    Position p of row b is slot `p % page` of page `table[b, p // page]`. A plain pytree with static
    shapes: every method can run under jit, and the cache can be donated. Rows may share pages
    (`fork`); before a row writes to a page that another row keeps, it gets a copy of the page.
    `take` keeps and permutes rows: indexing every array by rows would mix up the pages, which have
    no axis B.

    A compiled program cannot raise: if the pool has no free page, or the table has no entry left,
    the row is broken until it is freed, or rolled back to tokens whose pages it still holds. Its
    outputs are NaN, with a window too, it gets no more pages, and `validate` finds it. `PagePool`
    predicts this on the host and raises. Row numbers, lengths and counts out of range raise if
    their values are known; each method describes the effect of traced ones.

    Attributes:
      key: `(P, K, page, H)`, P pages.
      value: `(P, K, page, h)`.
      table: `(B, M)` int32, M pages at most per sequence; -1: no page.
      lengths: `(B,)` int32, the number of tokens so far per sequence; a negative length counts as
        0. `rollback` reduces them and frees pages; otherwise the next step frees these pages.
      key_scale: `(P, K, page)`; None: keys are stored as they are.
      value_scale: `(P, K, page)`; None: values are stored as they are.
    """

    key: Array
    value: Array
    table: Array
    lengths: Array
    key_scale: Array | None = None
    value_scale: Array | None = None

    def __repr__(self) -> str:
        return record_repr(self)

    @classmethod
    def empty(
        cls,
        params: MHAParams,
        batch_size: int,
        length: int,
        *,
        pages: int,
        page_size: int = 64,
        dtype: DTypeLike | None = None,
    ) -> "PagedKVCache":
        """A pool of free pages, and a batch of empty sequences.

        Args:
          params: parameters of the layer, which give K, H and h.
          batch_size: B.
          length: maximum number of tokens of a sequence, which gives M.
          pages: P, the number of pages of the pool, which holds `P * page_size` tokens.
          page_size: number of tokens per page; cuDNN reads pages in place if it is a power of 2.
          dtype: default the dtype of the parameters; another floating dtype stores values rounded
            to it. int8 and float8 store, per token and head, a vector x as q * scale with scale =
            max |x| / max |dtype|. The error of a number is at most max |x| / 254 in int8; in float8
            it is at most its relative rounding, 2**-4 in e4m3 and 2**-3 in e5m2, plus 2**-18 max
            |x|. A scale is at least 2**-126, so that neither bound holds for max |x| below
            2**-126 max |dtype|. A step casts q to a wider dtype when it reads the cache.

        Raises:
          ValueError: a size is not an integer of at least 1 (0 for batch_size), or exceeds 2**30.
          TypeError: dtype is neither floating nor int8, or is float64 without x64.

        >>> from jaxmha import init_params
        >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
        >>> PagedKVCache.empty(params, 5, 100, pages=7, page_size=16).key.shape
        (7, 2, 16, 3)
        """
        sizes = check(params)
        if dtype is None:
            kernels = {f"params.{x}.kernel": getattr(params, x).kernel for x in ("key", "value")}
            dtype = checks.promoted(**kernels)
        heads = sizes["K"], sizes["H"], sizes["h"]
        return empty_pages(heads, batch_size, length, pages, page_size, dtype)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.key.shape[2]

    @property
    def slots(self) -> int:
        """The maximum number of tokens of a sequence: M pages of `page_size` tokens."""
        return self.table.shape[1] * self.page_size

    def validate(self) -> None:
        """Raises ValueError if no sequence of calls on a cache produces its table and lengths.

        Raises ValueError also if shapes do not fit each other, and TypeError for a wrong dtype. It
        reads table and lengths from the device, and cannot run under jit. A compiled step does not
        check them: rows that lack pages, or name pages outside of the pool, have outputs NaN, and a
        table of another batch makes outputs wrong or NaN. A row without its first pages passes,
        since a window frees them; if a step needs these pages, the row is broken and no longer
        passes.
        """
        table, lengths = (on_host(f"cache.{x}", getattr(self, x)) for x in ("table", "lengths"))
        _checked(self)
        found = page_table.problem(table, lengths, self.page_size, self.key.shape[0])
        if found is not None:
            raise ValueError(f"{found}: the table or the lengths are not those of this cache")

    def free_pages(self) -> Int[Array, ""]:
        """The number of pages that no sequence holds."""
        P = self.key.shape[0]
        return in_auto_axes(lambda table: _free_pages(table, P), spec(), _checked(self).table)

    def fork(self, source: int | Int[Array, ""], target: int | Int[Array, ""]) -> "PagedKVCache":
        """The row `target` becomes a copy of the row `source`, with which it shares all pages.

        Pages that only `target` held become free. A page is copied only when a row writes to it. If
        a traced row is not in [0, B), nothing changes, which `PagePool.require_same` finds.

        Raises:
          ValueError: a row is known and not in [0, B).
          TypeError: a row is not an integer.
        """
        B = self.table.shape[0]
        rows = [checked_row("source", source, B), checked_row("target", target, B)]
        at = [near(jax.device_put(np.int32(x)) if isinstance(x, int) else x) for x in rows]
        table, lengths, _ = _checked(self)
        shared = _truncated(table, lengths, self.page_size)
        table, lengths = (
            in_auto_axes(_copied, specs_of_leaves(old), old, new, *at)
            for old, new in ((table, shared), (lengths, lengths))
        )
        return self._replace(table=table, lengths=lengths)

    def take(self, rows: Integer[Array, "C"]) -> "PagedKVCache":
        """The cache with these rows, in this order: it has C rows, which share their pages.

        Keeps, permutes or repeats rows, for beam search: `cache.take(parents)`. Pages of rows that
        are left out become free. A page is copied only when a row writes to it. A traced row
        number outside [0, B) gives an empty row, which `PagePool.require_same` finds.

        Raises:
          ValueError: rows do not have one axis, or one is known and outside [0, B).
          TypeError: rows are not integers, or an array of the cache is of a wrong dtype.
        """
        table, lengths, sizes = _checked(self)
        at = checked_rows(rows, sizes["B"])
        held = _truncated(table, lengths, self.page_size)
        return self._replace(table=taken(held, at, -1), lengths=taken(lengths, at))

    def emptied(self) -> "PagedKVCache":
        """The cache without its tokens; all pages are free."""
        return self._replace(table=full_like(self.table, -1), lengths=full_like(self.lengths, 0))

    def free(self, rows: Array) -> "PagedKVCache":
        """Empties the rows where `rows`, a Boolean `(B,)`, is True.

        Their pages become free unless another row holds them.

        Raises:
          ValueError: rows are not Boolean, or not of shape `(B,)`.
          TypeError: rows are not an array, or an array of the cache is of a wrong dtype.
        """
        table, lengths, sizes = _checked(self)
        kept = _emptied(checked_flags(rows, sizes["B"]), lengths)
        kept_pages = _truncated(table, kept, self.page_size)
        return self._replace(table=kept_pages, lengths=kept)

    def rollback(self, lengths: Array) -> "PagedKVCache":
        """Reduces the lengths to `lengths`, `(B,)`, and frees the pages beyond them.

        A row with a larger length does not change; a negative traced length counts as 0. With
        `Mask.window`, a step frees the pages to the left of the window of its first token: a row
        that is rolled back below its length before the last step may lack pages.

        Raises:
          ValueError: lengths are not integers of shape `(B,)`, or one is known and negative.
          TypeError: lengths are not an array, or an array of the cache is of a wrong dtype.
        """
        table, old, _ = _checked(self)
        require_arrays(lengths=lengths)
        if lengths.shape != self.lengths.shape or not is_integers(lengths):
            raise ValueError(
                f"lengths: expected integers of axes (B) {self.lengths.shape}, got {lengths.dtype} of "
                f"shape {lengths.shape}"
            )
        if is_known(lengths):
            reject_outside("lengths", lengths, None, "the tokens that a row keeps")
        shorter = jnp.minimum(jnp.asarray(clipped_counts(lengths)), old)
        kept = _truncated(table, shorter, self.page_size)
        return self._replace(table=kept, lengths=shorter)

    def append(
        self,
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K h"],
        counts: Integer[Array, "B"],
        left: int | None = None,
    ) -> tuple["PagedKVCache", Bool[jax.Array, "B"]]:
        """Writes the first `counts` of T tokens to each row, in pages taken from the pool.

        `left`: left bound of a window, to the left of which pages are freed; None: no window.
        Returns the cache, and True for rows that lack a page. Tokens are rounded to the dtype of
        the cache. Traced counts are clipped to [0, T], which `PagePool.require_same` finds.

        Raises:
          ValueError: a shape does not fit, a count is known and not in [0, T], or left is not an
            integer of at least 0.
          TypeError: tokens are not floating, counts are not integers, or an array of the cache has
            a wrong dtype.
        """
        table, lengths, sizes = _checked(self)
        tokens = {"key": (key, "B T K H"), "value": (value, "B T K h")}
        more, *new = checked_tokens(sizes, counts, left, **tokens)
        return in_auto_axes(
            lambda *arrays: _appended(near(left), *arrays),
            specs_of_leaves((self, self.lengths)),
            self._replace(table=table, lengths=lengths),
            more,
            *new,
        )

    def tile_size(self, block: int) -> int:
        """The number of slots per tile, a multiple of the page size: about `block`."""
        return min(max(block // self.page_size, 1) * self.page_size, self.slots)

    def tile(self, first: int | jax.Array, size: int) -> Tile:
        """Keys and values of `size` slots, starting at slot `first`, gathered from their pages."""
        entries = first // self.page_size + jnp.arange(size // self.page_size, dtype=np.int32)
        pages = jnp.take(jnp.asarray(self.table), entries, 1, mode="clip").clip(0)

        def gather(pool: jax.Array) -> jax.Array:
            found = jnp.moveaxis(jnp.take(pool, pages, 0, mode="clip"), 1, 2)  # B K m page H
            return found.reshape(*found.shape[:2], size, *pool.shape[3:])

        return self._gathered(gather)

    def at(self, positions: Int[jax.Array, "B s"]) -> Tile:
        """Keys and values of these positions, gathered from their pages."""
        table, slots = jnp.asarray(self.table), positions % self.page_size
        entries = positions // self.page_size
        pages = jnp.take_along_axis(table, entries, 1, mode="clip").clip(0)

        return self._gathered(
            lambda pool: jnp.moveaxis(pool.at[pages, :, slots].get(mode="clip"), 1, 2)  # B K s H
        )

    def _gathered(self, gather: Callable[[jax.Array], jax.Array]) -> Tile:
        """Applies `gather` to the bits of keys, values and scales; absent scales stay None."""

        def of(pool: Array) -> jax.Array:
            return from_bits(gather(as_bits(jnp.asarray(pool))), pool.dtype)

        scales = (None if x is None else of(x) for x in (self.key_scale, self.value_scale))
        return Tile(of(self.key), of(self.value), *scales)

    def whole(self) -> None:
        """None: reading all slots needs a copy."""
        return

    def pages(self) -> jax.Array | None:
        """The table; None if numbers are stored with scales."""
        scaled = self.key_scale is not None or self.value_scale is not None
        return None if scaled else jnp.asarray(self.table)


_truncated = compiled(2)(page_table.truncated)


@compiled(1)
def _free_pages(table: jax.Array, pages: int) -> jax.Array:
    return (page_table.holders(table, pages) == 0).sum()


@compiled()
def _copied(old: jax.Array, new: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    """`old` with row `end` from row `start` of `new`; `old` if one of them does not exist."""
    B = old.shape[0]
    at = jnp.where((start >= 0) & (start < B) & (end >= 0), end, B)  # B: dropped
    return old.at[at].set(new[start], mode="drop")


@compiled()
def _emptied(rows: jax.Array, lengths: jax.Array) -> jax.Array:
    return jnp.where(rows, 0, lengths)


class _Checked(NamedTuple):
    """Table and lengths as JAX arrays of int32, with lengths >= 0, and the sizes by letter."""

    table: jax.Array
    lengths: jax.Array
    sizes: dict[str, int]


def _checked(cache: PagedKVCache) -> _Checked:
    """Checks dtypes and shapes of a cache; TypeError or ValueError if they do not fit."""
    sizes: dict[str, int] = {}
    check_dtypes(cache._asdict(), paged=True)
    check_shapes(cache._asdict(), PAGED, sizes)
    table, lengths = near(cache.table), clipped_counts(cache.lengths)
    return _Checked(jnp.asarray(table), jnp.asarray(lengths), sizes)


@compiled(0)
def _appended(
    left: int | None, cache: PagedKVCache, more: Int[jax.Array, "B"], *new: jax.Array
) -> tuple[PagedKVCache, Bool[jax.Array, "B"]]:
    """`PagedKVCache.append` on checked arrays: writes the first `more` tokens of each row."""
    tokens, lengths = list(new), jnp.asarray(cache.lengths)
    pages, page = cache.key.shape[0], cache.page_size
    growth, lacking = page_table.extended(cache.table, lengths, more, left, page, pages)
    ends = lengths + more
    if platforms.current().name == "tpu":
        # The TPU's kernel multiplies all slots of a page by weights, 0 after the last token: these
        # slots become 0, because 0 * NaN is NaN.
        tokens = [_with_zeros(x, more, page - 1) for x in tokens]
        ends = jnp.where(more > 0, -(-ends // page) * page, ends)
    positions = lengths[:, None] + jnp.arange(tokens[0].shape[1], dtype=np.int32)[None]
    entries = positions // page
    held = jnp.take_along_axis(growth.table, entries, 1, mode="fill", fill_value=-1)
    written = (positions < ends[:, None]) & (held >= 0)
    at = jnp.where(written, held, pages), positions % page
    found = {"table": growth.table, "lengths": lengths + more}
    for name, x in zip(("key", "value"), tokens, strict=True):
        pool = getattr(cache, name)
        if is_scaled(pool.dtype):
            x, scale = quantize(jax.lax.stop_gradient(x), pool.dtype)  # see `with_tokens`
            scales = getattr(cache, f"{name}_scale")
            found[f"{name}_scale"] = write(scales, scale, *at, growth.sources, growth.targets)
        found[name] = write(pool, x, *at, growth.sources, growth.targets)
    return cache._replace(**found), jnp.asarray(lacking)


def _with_zeros(
    x: Float[jax.Array, "B T K H"], counts: Int[jax.Array, "B"], more: int
) -> Float[jax.Array, "B T2 K H"]:
    """Replaces all but the first `counts` of T tokens by zeros, and appends `more` tokens of 0."""
    tokens = jnp.arange(x.shape[1], dtype=np.int32)[None]
    x = jnp.where((tokens < counts[:, None])[..., None, None], x, 0.0)
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))


def empty_pages(
    heads: tuple[int, int, int],
    batch_size: int,
    length: int,
    pages: int,
    page_size: int,
    dtype: DTypeLike,
) -> PagedKVCache:
    """`PagedKVCache.empty` without params. `heads`: their sizes (K, H, h)."""
    require_sizes(least=0, batch_size=batch_size)
    require_sizes(most=FAR, length=length, pages=pages, page_size=page_size)
    stored, (K, H, h) = storage_dtype(dtype), heads
    shape = (pages, K, page_size)
    scales = [jnp.ones(shape, np.float32) if is_scaled(stored) else None for _ in range(2)]
    return PagedKVCache(
        jnp.zeros((*shape, H), stored),
        jnp.zeros((*shape, h), stored),
        jnp.full((batch_size, page_table.pages_for(length, page_size)), -1, np.int32),
        jnp.zeros(batch_size, np.int32),
        *scales,
    )
