"""Rows of a cache are kept, permuted and repeated by `take`; `validate` finds impossible lengths."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import KVCache, Mask, PagedKVCache, PagePool, latent
from tests import test_latent, tolerance
from tests.drawn import to_jax
from tests.paged import LONGEST, PAGE, PAGES, ROWS, empty, run
from tests.test_cache import make

COUNTS = np.asarray([5, 2, 4])


def of_kind(kind: str, params: Any) -> Any:
    """A cache of 3 rows; "float8" rounds numbers in whole arrays."""
    if kind == "pages":
        return empty(params)
    return KVCache.empty(params, ROWS, LONGEST, "float8_e4m3fn" if kind == "float8" else None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "float8", "pages"])
def test_rows_go_on_from_the_tokens_of_their_parents(kind: str) -> None:
    params, x = make()
    _, cache = run(params, of_kind(kind, params), x[:, :5], q_lengths=COUNTS)
    parents, new = np.asarray([2, 0, 2]), x[::-1, 5:7]
    want = []
    for row, parent in enumerate(parents):  # each alone, in the batch that it comes from
        given = jnp.zeros_like(new).at[parent].set(new[row])
        want.append(run(params, cache, given, q_lengths=2 * (np.arange(ROWS) == parent))[0][parent])
    taken = cache.take(parents)
    out, longer = run(params, taken, new)
    tolerance.assert_close(out, np.stack(want), factor=2)
    assert longer.lengths.tolist() == [6, 7, 6]
    fewer = cache.take(jnp.asarray([1]))
    out, _ = run(params, fewer, new[1:2])
    again = run(params, cache, jnp.broadcast_to(new[1], new.shape))[0][1]
    tolerance.assert_close(out[0], np.asarray(again), factor=2)


def test_pages_are_shared_freed_and_predicted() -> None:
    params, x = make()
    _, cache = run(params, empty(params), x[:, :5], q_lengths=COUNTS)
    pool = PagePool(cache)
    for rows in (jnp.asarray([2, 0, 2]), np.asarray([1, 1, 0]), [2, 1, 1], []):
        cache = jax.jit(PagedKVCache.take)(cache, to_jax(rows, int))
        cache.validate()
        pool.take(rows)
        pool.require_same(cache)
    assert pool.free_pages == PAGES


def test_latents() -> None:
    latents = np.random.default_rng(0).standard_normal((2, 7, 5)).astype(np.float32)
    cache = latent.LatentCache(to_jax(latents), jnp.full(2, 5, np.int32))
    taken = cache.take(np.asarray([1, 1, 0]))
    tolerance.assert_same(taken.latents, latents[[1, 1, 0]])
    assert taken.lengths.tolist() == [5, 5, 5]
    taken.validate()
    with pytest.raises(ValueError, match=r"cache.lengths\[0\] is 8: expected 0 to 7"):
        cache._replace(lengths=cache.lengths + 3).validate()


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("kind", ["whole", "pages"])
def test_numbers_of_rows_out_of_range(kind: str) -> None:
    params, x = make()
    _, cache = run(params, of_kind(kind, params), x[:, :5], q_lengths=COUNTS)
    for rows, problem in (
        (np.asarray([0, 3]), r"rows\[1\] is 3: expected 0 to 2"),
        (jnp.asarray([-1]), r"rows\[0\] is -1"),
        (np.zeros((1, 1), int), r"rows: expected axes \(C\)"),
        (np.ones(3, bool), "rows must be an integer array, got bool"),
    ):
        with pytest.raises((ValueError, TypeError), match=problem):
            cache.take(rows)
    taken = jax.jit(type(cache).take)(cache, jnp.asarray([-1, 3, 1]))  # traced: empty rows
    taken.validate()
    assert taken.lengths.tolist() == [0, 0, 2]


@pytest.mark.usefixtures("no_shape_hook")
def test_a_pool_frees_the_rows_of_a_cache() -> None:
    """By the argument of `cache.free`, or by their numbers."""
    params, x = make()
    _, cache = run(params, empty(params), x[:, :5], q_lengths=COUNTS)
    ended = np.asarray([True, False, True])
    freed = cache.free(ended)
    calls: list[tuple[Any, ...]] = [(ended,), (to_jax(ended),), (0, 2), (ended, 0), (0, ended)]
    for rows in calls:
        pool = PagePool(cache)
        pool.free(*rows)
        pool.require_same(freed)
    with pytest.raises(ValueError, match=r"rows: expected axes \(B\) with B=3, got shape \(2,\)"):
        pool.free(ended[:2])
    with pytest.raises(TypeError, match="row must be an integer, got True"):
        pool.free(True)


def test_a_pool_says_why_a_step_does_not_fit() -> None:
    params, _ = make()
    pool = PagePool(empty(params))
    pool.extend([9, 3, 0])
    with pytest.raises(ValueError, match=r"has 3 free pages of 7, too few for rows \[2\]: free a"):
        pool.extend([0, 0, 3 * PAGE + 1])
    pool.extend([1, 0, 0], left=2)
    with pytest.raises(
        ValueError, match=r"rows \[0\] attend tokens whose pages a window has freed"
    ):
        pool.extend([1, 0, 0])
    pool.extend([1, 0, 0], left=2)


@pytest.mark.usefixtures("no_shape_hook")
def test_lengths_that_a_ring_cannot_have() -> None:
    params, x = make()
    _, cache = run(params, KVCache.empty(params, ROWS, 7), x[:, :5], q_lengths=COUNTS)
    cache.validate()
    _, over = run(params, cache, x[:, :4])
    with pytest.raises(ValueError, match=r"lengths\[0\] is 9: expected 0 to 7, the S=7 slots"):
        over.validate()
    with pytest.raises(ValueError, match=r"lengths\[0\] is 9"):
        over.validate(left=7)
    _, ring = run(params, cache, x[:, :4], mask=Mask.window(3, None))
    ring.validate(left=3)
    wrong: list[tuple[KVCache, str]] = [
        (cache._replace(lengths=cache.lengths - 3), r"lengths\[1\] is -1"),
        (cache._replace(lengths=cache.lengths[:2]), r"cache.lengths: expected axes \(B\)"),
        (
            cache._replace(lengths=cache.lengths.astype(np.float32)),
            "cache.lengths must be an integer",
        ),
    ]
    for given, problem in wrong:
        with pytest.raises((ValueError, TypeError), match=problem):
            given.validate()
    with pytest.raises(TypeError, match=r"cache.lengths is traced"):
        jax.make_jaxpr(lambda cache: (cache.validate(), 0)[1])(cache)


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("kind", ["heads", "latents"])
def test_take_and_validate_refuse_what_is_no_cache(kind: str) -> None:
    """A float64 array is not rounded, and a wrong rank, dtype or type is named."""
    whole: Any = KVCache.empty(make()[0], 2, 7)
    if kind == "latents":
        whole = latent.LatentCache.empty(test_latent.made(), 2, 7)
    name = whole._fields[0]
    wrong: list[tuple[str, Any, str]] = [
        (name, np.full(whole[0].shape, 1 / 3), f"cache.{name} is float64, which JAX would round"),
        (name, whole[0].astype(np.int8), f"dtype of cache.{name} must be floating"),
        (name, whole[0][0, 0], f"cache.{name}: expected axes"),
        (name, [1.0], f"cache.{name} must be an array"),
        ("lengths", None, "cache.lengths must be an array"),
    ]
    for field, given, problem in wrong:
        cache = whole._replace(**{field: given})
        for call in (cache.validate, lambda cache=cache: cache.take(np.asarray([0]))):
            with jax.enable_x64(False), pytest.raises((ValueError, TypeError), match=problem):
                call()


def test_rows_of_an_empty_cache_are_empty() -> None:
    cache = KVCache.empty(make()[0], 0, 7)
    taken = jax.jit(cache.take)(jnp.asarray([0, 3, 1]))
    assert taken.key.shape[0] == 3
    assert taken.lengths.tolist() == [0, 0, 0]


@pytest.mark.usefixtures("no_shape_hook")
def test_a_step_is_exported_for_any_batch() -> None:
    params, x = make()
    (b,) = jax.export.symbolic_shape("b")
    cache = jax.eval_shape(lambda: KVCache.empty(params, 1, 7))
    struct: Any = jax.ShapeDtypeStruct
    of_any = jax.tree.map(lambda a: struct((b, *a.shape[1:]), a.dtype), cache)
    step: Any = jax.export.export(jax.jit(jaxmha.extend))
    found = step(params, struct((b, 1, x.shape[2]), x.dtype), of_any)
    empty = KVCache.empty(params, ROWS, 7)
    out, longer = found.call(params, x[:, :1], empty)
    tolerance.assert_close(out, np.asarray(jaxmha.extend(params, x[:, :1], empty)[0]))
    assert longer.lengths.tolist() == [1] * ROWS


@pytest.mark.slow
@pytest.mark.usefixtures("no_shape_hook")
def test_a_step_over_pages_is_exported_for_any_batch() -> None:
    """The pool has a number of pages that is known; rows that share a page get copies."""
    params, x = make()
    pages = PagedKVCache.empty(params, ROWS, 12, pages=11, page_size=4)
    prompt = jaxmha.extend(params, x[:, :3], pages)[1].fork(0, 1)
    (b,) = jax.export.symbolic_shape("b")
    struct: Any = jax.ShapeDtypeStruct
    of_any = jax.tree.map(lambda a: struct(a.shape, a.dtype), prompt)._replace(
        table=struct((b, 3), np.int32), lengths=struct((b,), np.int32)
    )
    step: Any = jax.export.export(jax.jit(jaxmha.extend))
    found = step(params, struct((b, 1, x.shape[2]), x.dtype), of_any)
    expected, kept = jaxmha.extend(params, x[:, 3:4], prompt)
    out, longer = found.call(params, x[:, 3:4], prompt)
    tolerance.assert_close(out, np.asarray(expected))
    np.testing.assert_array_equal(longer.table, kept.table)


@pytest.mark.usefixtures("no_shape_hook")
def test_caches_of_the_other_attention_name_its_functions() -> None:
    params: Any = test_latent.made()
    pages: Any = latent.paged_cache(params, 2, 8, pages=3, page_size=4)
    whole: Any = latent.LatentCache.empty(params, 2, 8)
    with pytest.raises(TypeError, match=r"got LatentParams: call .* such as jaxmha.latent.extend"):
        jaxmha.extend(params, test_latent.inputs(), pages)
    with pytest.raises(TypeError, match=r"got LatentCache: it is a cache of jaxmha.latent.extend"):
        jaxmha.extend(make()[0], make()[1], whole)
    plain, x = make()
    query, key, value = jaxmha.project(plain, x)
    calls: list[Callable[[], object]] = [
        lambda: jaxmha.extend(plain, x, pages),
        lambda: jaxmha.prefill(plain, x, pages),
        lambda: jaxmha.extend_heads(query, key, value, pages),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"got shape .* a cache of jaxmha.latent.paged_cache"):
            call()
    other: Any = plain
    with pytest.raises(TypeError, match=r"got MHAParams: call .* such as jaxmha.extend"):
        latent.extend(other, x, whole)
    kept = PagedKVCache.empty(plain, 2, 8, pages=3, page_size=4)
    with pytest.raises(ValueError, match=r"with h=0, .* make the cache by .*paged_cache"):
        latent.extend(params, test_latent.inputs(), kept)


def test_messages_of_extend_heads_name_its_arguments() -> None:
    params, x = make()
    cache = KVCache.empty(params, ROWS, 3)
    query, key, value = jaxmha.project(params, x)
    T = x.shape[1]
    with pytest.raises(ValueError, match=f"^query, key, value: T={T} new tokens do not fit"):
        jaxmha.extend_heads(query, key, value, cache)
    with pytest.raises(ValueError, match=r"of the T tokens of a row of query$"):
        jaxmha.extend_heads(query, key, value, cache, q_lengths=np.full(ROWS, T + 1))


def test_a_pool_takes_the_rows_of_the_cache() -> None:
    """Numbers on the device too, as the methods of the cache; others are refused by name."""
    pool = PagePool(empty(make()[0]))
    pool.extend([5, 2, 4])
    pool.fork(jnp.asarray(0), np.asarray(1))
    pool.free(jnp.asarray(2))
    assert pool.lengths.tolist() == [5, 5, 0]
    pool.take(jnp.asarray([1, 2]))
    assert pool.lengths.tolist() == [5, 0]
    wrong: Any
    for wrong in (3, None, "01", {0: 1}, np.asarray(0), np.asarray([[0, 1]]), iter([0])):
        with pytest.raises(TypeError, match="rows must be a sequence of row numbers"):
            pool.take(wrong)
    for wrong in ([True, False], np.asarray([True]), [1.0], ["0"], [None]):
        with pytest.raises(TypeError, match=r"rows must be an integer, got .*: give the number"):
            pool.take(wrong)
    for wrong in (jnp.asarray(1.5), jnp.asarray(True), np.asarray([0, 1]), None):
        with pytest.raises(TypeError, match=r"row must be an integer, got .*: give the number"):
            pool.free(wrong)
    assert pool.lengths.tolist() == [5, 0]
