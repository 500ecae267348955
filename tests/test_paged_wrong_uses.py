"""Wrong uses of a paged cache and of its pool are refused by name, or found by `validate`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, PagedKVCache, PagePool
from tests.paged import LONGEST, PAGES, ROWS, empty, run
from tests.test_cache import make


def with_integer_scales(cache: PagedKVCache) -> PagedKVCache:
    return cache._replace(key_scale=jnp.ones(cache.key.shape[:3], int))


def test_wrong_arguments() -> None:
    params, x = make()
    dense: Any = jaxmha.KVCache.empty(params, ROWS, LONGEST)
    cache = empty(params)
    for options, problem in (
        ({"pages": 0}, "pages must be an integer of at least 1"),
        ({"page_size": 0}, "page_size must be an integer of at least 1"),
        ({"dtype": "int16"}, "dtype must be floating or int8, got int16"),
        ({"dtype": "int4"}, "dtype must be floating or int8, got int4"),
    ):
        with pytest.raises((ValueError, TypeError), match=problem):
            empty(params, **options)
    calls: list[tuple[Any, str]] = [
        (lambda: cache.fork(0, ROWS), r"target must be in \[0, 3\)"),
        (lambda: cache.free(np.asarray([0, 1])), "rows: expected a Boolean array"),
        (lambda: cache.rollback(np.asarray([1])), r"lengths: expected integers of axes \(B\)"),
        (lambda: run(params, cache, x, q_lengths=np.ones(ROWS)), "q_lengths must be an integer"),
        (lambda: run(params, cache, x, q_lengths=np.ones(2, int)), "q_lengths"),
        (lambda: run(params, cache._replace(table=cache.table[:2]), x), "cache.table"),
        (lambda: run(params, cache, jnp.zeros((ROWS, 16, 17))), "do not fit into the S=15 slots"),
        (lambda: PagePool(cache).extend([1, 2]), "counts: expected B=3 integers"),
        (lambda: PagePool(cache).extend([16, 0, 0]), "row 0 has 0 tokens and would have 16"),
        (lambda: PagePool(cache).extend([15, 9, 0]), "has 7 free pages of 7, too few for rows"),
        (lambda: PagePool(cache).free(3), r"row must be in \[0, 3\)"),
        (lambda: PagePool(cache).fork(0.5, 1), "source must be an integer"),  # type: ignore[arg-type]
        (lambda: PagePool(cache).extend([2**40, 0, 0]), "a row of the table holds 5 pages"),
        (
            lambda: PagePool(cache).extend([1, 0, 0], left=-1),
            "left must be an integer of at least 0",
        ),
        (lambda: PagePool(cache).rollback([1.5, 0, 0]), "lengths: expected B=3 integers"),  # type: ignore[list-item]
        (lambda: cache.rollback(np.ones(3)), "lengths: expected integers"),
        (
            lambda: cache.rollback(np.asarray([3, -1, 0])),
            r"lengths\[1\] is -1: expected at least 0",
        ),
        (lambda: PagePool(cache).rollback([3, -1, 0]), r"lengths\[1\] is -1: expected at least 0"),
        (lambda: PagePool(cache).extend([3, -1, 0]), r"counts\[1\] is -1: expected at least 0"),
        (lambda: run(params, cache, x, q_lengths=np.asarray([12, 0, 0])), r"q_lengths\[0\] is 12"),
        (lambda: run(params, cache, x, q_lengths=np.asarray([0, -1, 0])), r"q_lengths\[1\] is -1"),
        (
            lambda: cache._replace(table=cache.table.astype(np.float32)).free_pages(),
            "cache.table must be",
        ),
        (lambda: PagePool(cache).require_same(empty(params, pages=9)), "cache has 9 pages of 3"),
        (lambda: PagePool(cache).require_same(dense), "must be a jaxmha.PagedKVCache"),
        (
            lambda: run(params, with_integer_scales(empty(params, dtype="int8")), x),
            "float32 or float64",
        ),
        (lambda: cache._replace(table=cache.table[:2]).fork(0, 1), "cache.lengths: expected axes"),
        (
            lambda: cache._replace(lengths=np.ones(ROWS)).free(np.ones(ROWS, bool)),
            "cache.lengths must be",
        ),
        (lambda: run(params, cache._replace(key=cache.key.astype(np.int8)), x), "with scales"),
        (
            lambda: PagePool(cache).require_same(
                cache.fork(0, 1)._replace(lengths=cache.lengths + 1)
            ),
            "cache.lengths is not as reported",
        ),
    ]
    for call, problem in calls:
        with pytest.raises((ValueError, TypeError), match=problem):
            call()


def test_validate_names_what_is_wrong() -> None:
    """A cache of another batch, pages out of range or twice, negative lengths, an overfull pool."""
    params, x = make()
    _, cache = run(params, empty(params), x[:, :5], q_lengths=np.asarray([5, 2, 4]))
    cache.validate()
    cache.fork(0, 1).validate()
    table, lengths = np.asarray(cache.table), np.asarray(cache.lengths)
    x = x[:, :5]
    _, window = run(params, cache, x, mask=Mask.window(2, 0), q_lengths=np.asarray([4, 0, 0]))
    window.validate()  # it lacks its first page
    alone = Mask.window(0, None)
    _, idle = run(params, empty(params), x, mask=alone, q_lengths=np.asarray([3, 3, 3]))
    _, idle = run(params, idle, x, mask=alone, q_lengths=np.asarray([1, 0, 0]))
    idle.validate()

    def changed(row: int, entry: int, page: int) -> np.ndarray:
        found = table.copy()
        found[row, entry] = page
        return found

    full = run(params, cache, x, q_lengths=np.asarray([5, 5, 5]))[1]
    wrong: list[tuple[PagedKVCache, str]] = [
        (cache._replace(table=changed(0, 1, PAGES)), r"table\[0, 1\] is 7: expected -1, or a page"),
        (cache._replace(table=changed(2, 0, -5)), r"table\[2, 0\] is -5"),
        (cache._replace(table=changed(0, 4, 6)), "row 0 has 5 tokens in 2 pages"),
        (cache._replace(table=changed(0, 1, -1)), "row 0 lacks a page of its 5 tokens"),
        (cache._replace(table=changed(0, 1, table[0, 0])), "expected one position of each row"),
        (cache._replace(table=changed(1, 0, table[0, 1])), r"is at table\[0, 1\] and \[1, 0\]"),
        (cache._replace(table=table[[1, 0, 2]]), "row 0 lacks a page of its 5 tokens"),
        (cache._replace(lengths=lengths * [1, -1, 1]), r"lengths\[1\] is -2: expected 0 to 15"),
        (cache._replace(lengths=lengths + 11), r"lengths\[0\] is 16"),
        (cache._replace(table=table[:2]), r"cache.lengths: expected axes \(B\) with B=2"),
        (cache._replace(value=cache.value[:2]), r"cache.value: expected axes \(P, K, page, h\)"),
        (cache._replace(lengths=lengths.astype(np.float32)), "cache.lengths must be an integer"),
        (cache._replace(table=table * 1.0), "cache.table must be an integer"),
        (with_integer_scales(empty(params, dtype="int8")), "must be float32 or float64, got int32"),
        (full, "lacks a page"),
    ]
    for given, problem in wrong:
        for check in (PagedKVCache.validate, PagePool):
            with pytest.raises((ValueError, TypeError), match=problem):
                check(given)


def test_what_is_out_of_range_and_traced() -> None:
    """Forks change nothing, negative lengths are 0, and counts are clipped to [0, T]."""
    params, x = make()
    _, cache = run(params, empty(params), x[:, :5], q_lengths=np.asarray([4, 2, 1]))
    pool, fork = PagePool(cache), jax.jit(PagedKVCache.fork)
    for rows in ((99, 0), (0, 99), (-1, 0), (0, -1), (3, 1)):
        pool.require_same(fork(cache, *rows))
    pool.require_same(jax.jit(PagedKVCache.rollback)(cache, jnp.asarray([9, 2, 2**31 - 1])))
    shorter = jax.jit(PagedKVCache.rollback)(cache, jnp.asarray([3, -1, -(2**31)]))
    shorter.validate()
    pool.rollback([3, 0, 0])
    pool.require_same(shorter)
    _, longer = run(params, cache, x[:, 4:9], q_lengths=jnp.asarray([6, 1, -1]))
    longer.validate()
    assert longer.lengths.tolist() == [9, 3, 1]


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int64])
def test_lengths_of_any_size_are_all_tokens(dtype: Any) -> None:
    """The pool and the cache agree."""
    params, x = make()
    cache = empty(params)
    pool = PagePool(cache)
    counts = np.asarray([3, 1, 0])
    pool.extend([3, 1, 0])
    _, cache = run(params, cache, x[:, :5], q_lengths=counts)
    lengths = np.full(ROWS, np.iinfo(dtype).max, dtype)
    pool.rollback(lengths)
    pool.require_same(cache.rollback(lengths))
    assert pool.lengths.tolist() == [3, 1, 0]
    with pytest.raises(ValueError, match="a row of the table holds"):
        pool.extend(lengths)  # type: ignore[arg-type]


def test_messages_about_many_rows_are_short() -> None:
    """They name the first number that is wrong, not all tables and counts of a large batch."""
    params, _ = make()
    cache = PagedKVCache.empty(params, 211, 3 * 97, pages=31, page_size=3)
    pool = PagePool(cache)
    pool.extend([0, 2] + [0] * 209)
    tall: Any = np.zeros((211, 2), int)
    calls: list[tuple[Any, str]] = [
        (lambda: pool.require_same(cache), r"lengths\[1\] is 0, expected 2"),
        (
            lambda: pool.require_same(cache._replace(lengths=pool.lengths)),
            r"table\[1, 0\] is -1, expected 0",
        ),
        (
            lambda: pool.require_same(cache._replace(lengths=pool.lengths, table=cache.table[:5])),
            r"cache.table: expected axes \(B, M\) with B=211, M=97, got shape \(5, 97\)",
        ),
        (lambda: pool.extend([3] * 211), r"too few for rows \[30, 31, 32, 33, 34, 35, ...\]"),
        (lambda: pool.extend([1] * 210), r"B=211 integers, got \[1, 1, 1, 1, 1, 1, ...\]"),
        (lambda: pool.extend(tall), r"B=211 integers, got int64 of shape \(211, 2\)"),
        (lambda: pool.free(tall), r"row must be an integer, got int64 of shape \(211, 2\)"),
        (
            lambda: PagedKVCache.empty(params, 3, 32, pages=tall),
            r"at least 1, got int64 of shape \(211, 2\)",
        ),
        (lambda: pool.extend([2**62] + [0] * 210), f"0 tokens and would have {2**62}"),
    ]
    for call, problem in calls:
        with pytest.raises((ValueError, TypeError), match=problem) as found:
            call()
        assert len(str(found.value)) < 200


def test_what_the_host_reads_is_not_traced() -> None:
    params, _ = make()
    cache = empty(params)
    pool = PagePool(cache)
    calls: list[tuple[Any, str]] = [
        (PagedKVCache.validate, "cache.table"),
        (PagePool, "cache.table"),
        (pool.require_same, "cache.lengths"),
        (lambda cache: pool.extend(cache.lengths), "counts"),
        (lambda cache: pool.rollback(cache.lengths), "lengths"),
        (lambda cache: pool.free(cache.lengths[0]), "row"),
    ]
    for call, name in calls:
        message = f"{name} is traced, and its values are needed on the host: .* outside of the"
        with pytest.raises(TypeError, match=message):
            jax.make_jaxpr(lambda cache, call=call: (call(cache), 0)[1])(cache)


def test_a_donated_cache_is_not_used_again() -> None:
    """JAX names neither the argument nor what to do."""
    params, x = make()
    step = jax.jit(partial(run, params), donate_argnums=0)
    old = empty(params, dtype="int8")
    pool = PagePool(old)
    step(old, x[:, :2])
    dense: Any = jaxmha.KVCache.empty(params, ROWS, 8)
    step(dense, x[:, :2])
    tokens, ones = jnp.zeros((ROWS, 1, 3, 5)), np.ones(ROWS, int)
    for call in (
        lambda: run(params, old, x[:, :2]),
        lambda: run(params, dense, x[:, :2]),
        lambda: jaxmha.prefill(params, x, old),
        lambda: jaxmha.decode_step(params, x[:, :2], dense),
        lambda: old.append(tokens, tokens, ones),
        lambda: old.fork(0, 1),
        lambda: old.free(ones > 0),
        lambda: old.rollback(ones),
        old.free_pages,
        old.validate,
        lambda: PagePool(old),
        lambda: pool.require_same(old),
    ):
        with pytest.raises(ValueError, match=r"^cache.\w+ was donated .*: use the cache that it"):
            call()
