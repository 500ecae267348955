"""Steps over a paged cache are those over the dense cache, also where pages or numbers are few."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, PagedKVCache, PagePool, Semantics, page_table
from jaxmha.cached_attention import attend_cache
from jaxmha.quantized import quantize
from tests import tolerance
from tests.drawn import to_jax
from tests.paged import ENTRIES, LONGEST, PAGE, PAGES, ROWS, empty, poisoned, run
from tests.test_cache import make


@pytest.mark.slow_variants("float8*")
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_what_is_stored_is_what_is_attended(dtype: str) -> None:
    """Exactly: the output is that of a float32 cache that holds the rounded numbers."""
    params, x = make()
    _, small = run(params, empty(params, dtype=dtype), x[:, :7])
    wide = empty(params)._replace(table=small.table, lengths=small.lengths)
    for name in ("key", "value"):
        pool, scale = getattr(small, name), getattr(small, f"{name}_scale")
        wide = wide._replace(**{name: pool.astype(np.float32) * scale[..., None]})
    positions = jnp.full((ROWS, 1), 6, np.int32)
    query = jaxmha.project(params, x[:, 6:7])[0]

    @jax.jit
    def attend(cache: PagedKVCache) -> Any:
        return attend_cache(params, query, cache, positions, Mask(), Semantics(), block=PAGE)

    found, want = map(attend, (small, wide))
    tolerance.assert_close(found, np.asarray(want, np.float64))


def test_scales_of_free_slots_reach_no_gradient() -> None:
    """They are NaN; the gradient of a query is that over a float32 cache of the rounded numbers."""
    rng, params = np.random.default_rng(4), make()[0]
    query, grad = (to_jax(rng.standard_normal((ROWS, 1, 6, n)), "f") for n in (5, 7))
    small = empty(params, dtype="int8")._replace(
        table=np.asarray([[0, 3, -1, -1, -1], [5, -1, -1, -1, -1], [1, 2, -1, -1, -1]]),
        lengths=np.asarray([5, 2, 6]),
    )
    pools = {x: rng.integers(-127, 128, getattr(small, x).shape, np.int8) for x in ("key", "value")}
    scales = {f"{x}_scale": jnp.full(small.key.shape[:3], 0.01) for x in pools}
    small = poisoned(small._replace(**pools, **scales))
    floats = {x: to_jax(y * np.float32(0.01)) for x, y in pools.items()}
    wide = small._replace(**floats, key_scale=None, value_scale=None)

    @jax.jit
    def gradients(query: Any, caches: Any) -> Any:
        def step(query: Any, cache: Any) -> Any:
            at = jnp.asarray(cache.lengths)[:, None] - 1
            return attend_cache(params, query, cache, at, Mask(), Semantics(), block=PAGE)

        return [jax.vjp(lambda query, own=own: step(query, own), query)[1](grad) for own in caches]

    (found,), (want,) = gradients(query, (small, wide))
    tolerance.assert_close(found, np.asarray(want, np.float64))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_of_stored_numbers(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((101, 13)) * np.exp(rng.uniform(-60, 60, (101, 1)))).astype(np.float32)
    x[3], x[5, 2], x[7, 1] = 0, np.nan, np.inf
    stored, scale = quantize(to_jax(x), jnp.dtype(dtype))
    back = np.asarray(stored, np.float64) * np.asarray(scale, np.float64)[:, None]
    assert np.isnan(back[[5, 7]]).all()
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    bound = largest / 254 if dtype == "int8" else np.abs(x) * 2.0 ** -(4 if "e4" in dtype else 3)
    fine = np.isfinite(x).all(-1)
    slack = largest * (2e-7 if dtype == "int8" else 2.0**-12)  # of the scale; of subnormal numbers
    assert (np.abs(back - x) <= bound + slack)[fine].all()


def test_prefill_and_steps_are_those_of_the_dense_cache() -> None:
    params, x = make(use_bias_kv=True)
    semantics = Semantics(logits_soft_cap=0.7, scale=0.9, add_zero_attn=True)
    dense = jaxmha.KVCache.empty(params, ROWS, LONGEST)
    paged = empty(params, pages=3 * ENTRIES)
    lengths = Mask.lengths(key_value=np.asarray([4, 1, 3]))
    found = []
    caches: list[Any] = [dense, paged]
    for cache in caches:
        outs = []
        out, cache = jaxmha.prefill(params, x[:, :4], cache, semantics=semantics, mask=lengths)
        outs.append(out)
        for t in range(4, 9):
            out, cache = jaxmha.decode_step(params, x[:, t : t + 1], cache, semantics=semantics)
            outs.append(out)
        found.append(np.concatenate(outs, 1))
    tolerance.assert_close(found[1], found[0].astype(np.float64), factor=tolerance.LAYER)


@pytest.mark.slow_variants("int8", "pages")
@pytest.mark.parametrize("kind", ["ring", "pages", "int8"])
def test_a_copy_of_the_window_keeps_what_masks_say(kind: str) -> None:
    """Masks count slots or positions: GPUs attend a copy of the window, CPUs the slots in place."""
    rng = np.random.default_rng(0)
    params, _ = make()
    params = params._replace(sinks=jnp.asarray([0.3, -1.0, 2.0, 0.0, 1.0, -0.5]))
    cache: Any = jaxmha.KVCache.empty(params, ROWS, 9)
    if kind != "ring":
        cache = empty(params, pages=3 * ENTRIES, dtype="int8" if kind == "int8" else None)
    slots = rng.random((ROWS, 6, 2, cache.slots)) < 0.8
    padding = Mask.padding(key_value=slots[:, 0, 0])
    options: dict[str, Any] = {
        "mask": Mask.window(2, 0) & padding & Mask.dense(slots[::-1]),
        "semantics": Semantics(logits_soft_cap=0.9),
        "score_mod": lambda s, b, n, i, j: s + (j * (n + 1) % 5).astype(s.dtype) / 10,
        "mask_mod": lambda b, n, i, j: (j + n) % 4 != 1,
    }
    for counts in (*[[2, 1, 0], [1, 2, 2]] * 4, [2, 2, 2]):
        x = rng.standard_normal((ROWS, 2, 17)).astype(np.float32)
        given = {**options, "q_lengths": np.asarray(counts)}
        want, _ = run(params, cache, x, **given)
        with jaxmha.lowering_for("rocm"):
            out, cache = run(params, cache, x, **given)
        tolerance.assert_close(out, np.asarray(want, np.float64), factor=tolerance.LAYER)
    assert max(cache.lengths) > 9


def test_no_room_is_nan_and_no_other_row_suffers() -> None:
    params, x = make()
    cache = empty(params, pages=3)
    out, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([3, 2, 0]))
    assert np.isfinite(out).all()
    assert int(cache.free_pages()) == 1
    out, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([0, 1, 4]))
    assert np.isfinite(out[:2]).all()
    assert np.isnan(out[2]).all()
    cache = cache.free(np.asarray([True, False, True]))
    out, _ = run(params, cache, x[:, :4], q_lengths=np.asarray([0, 0, 4]))
    assert np.isfinite(out).all()


def test_no_room_for_prompts_is_nan() -> None:
    params, x = make()
    out, cache = jaxmha.prefill(params, x[:, :4], empty(params, pages=3))
    assert np.isnan(out).all((1, 2)).tolist() == [False, True, True]
    assert cache.table[0, :2].tolist() == [0, 1]


def test_a_lost_page_stays_lost() -> None:
    """A begun page without tokens, of a full pool or before a window, is not replaced by another."""
    params, x = make()
    cache = empty(params, pages=3)
    _, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([3, 3, 3]))
    out, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([2, 0, 0]))
    assert np.isnan(out[0, :2]).all()
    cache = cache.free(np.asarray([False, False, True]))
    out, _ = run(params, cache, x[:, :4], q_lengths=np.asarray([2, 1, 0]))
    assert np.isnan(out[0, :2]).all()
    assert np.isfinite(out[1]).all()  # the lost row leaves the only free page to it

    mask, cache = Mask.window(2, 0), empty(params)
    pool = PagePool(cache)
    for count in (4, 4, 2):
        pool.extend([count, 0, 0], left=2)
        _, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([count, 0, 0]), mask=mask)
    out, _ = run(params, cache, x[:, :4], q_lengths=np.asarray([1, 0, 0]))
    assert np.isnan(out[0, 0]).all()  # without the window it attends pages that are freed
    cache = cache.rollback(np.asarray([4, 0, 0]))
    pool.rollback([4, 0, 0])
    out, _ = run(params, cache, x[:, :4], q_lengths=np.asarray([1, 0, 0]), mask=mask)
    assert np.isnan(out[0, 0]).all()
    with pytest.raises(ValueError, match=r"rows \[0\] attend tokens whose pages a window"):
        pool.extend([1, 0, 0], left=2)


@pytest.mark.slow_variants("2-full pool", "None-lost page", "0-*")
@pytest.mark.parametrize("cause", ["full pool", "lost page"])
@pytest.mark.parametrize("left", [None, 0, 2])
def test_a_row_that_lacks_a_page_is_broken_until_it_is_freed(left: int | None, cause: str) -> None:
    """Later pages, and a window that the lost tokens have left, do not hide it."""
    params, x = make()
    mask = Mask() if left is None else Mask.window(left, 0)
    cache = empty(params, pages=3)
    held = [0, 4, 0] if cause == "lost page" else [0, 4, 1]
    _, cache = run(params, cache, x[:, :4], q_lengths=np.asarray(held), mask=mask)
    if cause == "lost page":
        _, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([2, 0, 0]), mask=mask)
        cache = cache._replace(table=cache.table.at[0, 0].set(99))
    for count in (4, *[1] * 7):
        out, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([count, 0, 0]), mask=mask)
        assert np.isnan(out[0, :count]).all()
        with pytest.raises(ValueError, match="row 0 lacks a page"):
            cache.validate()
        cache = cache.free(np.asarray([False, True, True]))
    cache = cache.free(np.asarray([True, False, False]))
    cache.validate()
    out, _ = run(params, cache, x[:, :4], q_lengths=np.asarray([4, 0, 0]), mask=mask)
    assert np.isfinite(out).all()


def test_a_rollback_to_the_tokens_that_are_held_mends_a_row() -> None:
    """Their outputs are those of a row that was never broken."""
    params, x = make()
    cache = empty(params, pages=3)
    _, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([4, 1, 0]))
    out, broken = run(params, cache, x[:, 4:8], q_lengths=np.asarray([4, 0, 0]))
    assert np.isnan(out[0]).all()
    _, broken = run(params, broken, x[:, :4], q_lengths=np.asarray([1, 0, 0]))
    mended = broken.rollback(np.asarray([4, 1, 0]))
    mended.validate()
    found, want = (
        run(params, c, x[:, 4:8], q_lengths=np.asarray([2, 0, 0]))[0] for c in (mended, cache)
    )
    tolerance.assert_same(found, want)


def test_nothing_recompiles_while_sequences_grow() -> None:
    params, x = make()
    cache = empty(params, pages=3 * ENTRIES)
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def step(cache: PagedKVCache, x: jax.Array) -> tuple[Any, Any]:
        traces.append(1)
        out, cache = jaxmha.decode_step(params, x, cache)
        return out, cache.fork(0, 2)

    for t in range(11):
        out, cache = step(cache, x[:, t : t + 1])
    assert len(traces) == 1
    assert np.isfinite(out).all()


def test_lengths_reduced_by_hand() -> None:
    """As those of a dense cache may be: a step frees the pages beyond them, and shares none."""
    params, x = make()
    _, cache = run(params, empty(params), x[:, :4])
    cache = cache.fork(0, 1)
    shorter = cache._replace(lengths=np.asarray([3, 4, 0], np.uint8))
    found, by_hand = run(params, shorter, x[:, 4:8], q_lengths=np.asarray([2, 2, 2]))
    want, rolled_back = run(
        params, cache.rollback(np.asarray([3, 4, 0])), x[:, 4:8], q_lengths=np.asarray([2, 2, 2])
    )
    by_hand.validate()
    PagePool(rolled_back).require_same(by_hand)
    tolerance.assert_same(found, want)
    PagePool(shorter.rollback(np.asarray([3, 2, 0]))).require_same(
        cache.rollback(np.asarray([3, 2, 0]))
    )
    # Row 0 writes to a page that row 1, which writes to a later one, keeps.
    earlier = cache.rollback(np.asarray([2, 4, 0]))
    found, _ = run(params, earlier, x[:, 4:8], q_lengths=np.asarray([2, 2, 2]))
    tolerance.assert_same(found[1], want[1])


def test_rows_get_no_pages_beyond_lengths_reduced_by_hand() -> None:
    """`fork` and `take` share the pages of tokens alone; those beyond become free."""
    table = np.asarray([[0, 3, -1, -1, -1], [5, 1, -1, -1, -1], [-1] * 5], np.int32)
    cache = empty(make()[0])._replace(table=table, lengths=np.asarray([3, 2, 0]))
    rows = np.asarray([1, 0, 1])
    forked, taken = jax.jit(lambda cache: (cache.fork(0, 2).table, cache.take(rows).table))(cache)
    assert forked[2].tolist() == [0, -1, -1, -1, -1]
    assert taken[:, :2].tolist() == [[5, -1], [0, -1], [5, -1]]


def test_pages_that_a_window_or_a_hole_frees() -> None:
    """A page goes once no later token attends it; after a missing page, all go."""
    whole = np.asarray([[4, 1, 2, -1]])
    for length, left, held in ((8, 2, [-1, -1, 2]), (7, 2, [-1, 1, 2]), (8, 5, [-1, 1, 2])):
        kept = page_table.within_window(whole, np.asarray([length]), left, PAGE)
        assert kept.tolist() == [[*held, -1]]
    holed, lengths, more = np.asarray([[4, PAGES, 2, -1]]), np.asarray([7]), np.asarray([1])
    growth, lacking = page_table.extended(holed, lengths, more, None, PAGE, PAGES)
    assert growth.table.tolist() == [[4, -1, -1, -1]]
    _, later = page_table.extended(growth.table, lengths + 1, more, 1, PAGE, PAGES)
    assert [*lacking, *later] == [True, True]


@pytest.mark.parametrize("page", [PAGES, 2**32, -(2**32), 2**63 - 1])
def test_no_page_of_a_table_is_truncated(page: int) -> None:
    """NumPy's 64 bits would become page 0, and be read. So would the last page in plain XLA."""
    params, x = make()
    _, cache = run(params, empty(params), x[:, :4], q_lengths=np.asarray([2, 2, 2]))
    table = np.asarray(cache.table, np.int64)
    table[1, 0] = page
    given = cache._replace(table=table)
    out, longer = run(params, given, x[:, 2:6], q_lengths=np.asarray([1, 1, 1]))
    assert np.isnan(out[1, 0]).all()
    assert np.isfinite(out[::2]).all()
    for name in ("key", "value"):
        before, after = (np.asarray(getattr(c, name))[table[0, 0], :, :2] for c in (cache, longer))
        np.testing.assert_array_equal(before, after)


@pytest.mark.slow_variants("float8*", "int8")
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2", None])
def test_functions_of_scores_sinks_and_caps_over_pages(dtype: str | None) -> None:
    """Ragged chunks over pages give what full attention over the same tokens gives."""
    params, x = make()
    params = params._replace(sinks=jnp.asarray([0.3, -1.0, 2.0, 0.0, 1.0, -0.5]))
    semantics = Semantics(logits_soft_cap=0.9)
    options: dict[str, Any] = {
        "semantics": semantics,
        "score_mod": lambda s, b, n, i, j: s - ((i - j) * (n + 1)).astype(s.dtype) / 10,
        "mask_mod": lambda b, n, i, j: (i - j) % 3 != 1,
    }
    cache, at, outs = empty(params, dtype=dtype, pages=3 * ENTRIES), np.zeros(ROWS, int), []
    x = np.asarray(x)
    for counts in ([4, 1, 0], [1, 3, 5], [2, 4, 1], [4, 3, 5]):
        given = np.zeros((ROWS, 5, 17), np.float32)
        for row, count in enumerate(counts):
            given[row, :count] = x[row, at[row] : at[row] + count]
        out, cache = run(params, cache, given, q_lengths=np.asarray(counts), **options)
        outs.append([np.asarray(out)[row, :count] for row, count in enumerate(counts)])
        at += counts
    assert at.tolist() == [11] * ROWS
    found = np.stack([np.concatenate(rows) for rows in zip(*outs, strict=True)])
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x))
        full = jaxmha.multi_head_attention(
            *exact, is_causal=True, implementation="reference", **options
        )
    want = np.asarray(full)
    if dtype is None:
        tolerance.assert_close(found, want, factor=tolerance.LAYER)
    else:
        bound = {"int8": 0.02, "float8_e4m3fn": 0.1, "float8_e5m2": 0.2}[dtype]
        assert np.abs(found - want).max() <= bound * np.abs(want).max()
