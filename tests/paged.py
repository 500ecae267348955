"""A small paged cache for tests: poisoned wherever no row has a token."""

from typing import Any

import numpy as np

import jaxmha
from jaxmha import MHAParams, PagedKVCache
from tests.drawn import to_jax

ROWS, PAGE, PAGES, ENTRIES = 3, 3, 7, 5
LONGEST = PAGE * ENTRIES


def empty(params: MHAParams, **options: Any) -> PagedKVCache:
    sizes = {"pages": PAGES, "page_size": PAGE} | options
    return poisoned(PagedKVCache.empty(params, ROWS, LONGEST, **sizes))


def poisoned(cache: PagedKVCache, first: Any = None, poison: float = np.nan) -> PagedKVCache:
    """The cache with poison wherever no row has a token, or only tokens before its `first`."""
    table, lengths = np.asarray(cache.table), np.asarray(cache.lengths)
    live = np.zeros((cache.key.shape[0], cache.page_size), bool)
    for row, length in enumerate(lengths):
        at = np.arange(0 if first is None else first[row], length)
        live[table[row, at // cache.page_size], at % cache.page_size] = True
    found = {}
    for name in ("key", "value", "key_scale", "value_scale"):
        pool = getattr(cache, name)
        if pool is not None:
            bad = np.asarray(127 if pool.dtype == np.int8 else poison, pool.dtype)
            kept = np.expand_dims(live, (1, 3)[: pool.ndim - 2])
            found[name] = to_jax(np.where(kept, np.asarray(pool), bad))
    return cache._replace(**found)


def run(params: MHAParams, cache: Any, x: Any, **options: Any) -> tuple[Any, Any]:
    return jaxmha.extend(params, x, cache, **options)
