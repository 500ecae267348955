"""A paged cache is the dense cache, and its pages are never lost, shared by mistake or read dead."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import jaxmha
from jaxmha import Mask, MHAParams, PagedKVCache, PagePool, Semantics, page_table
from jaxmha.cached_attention import attend_cache
from jaxmha.quantized import quantize
from tests import tolerance
from tests.test_cache import make

ROWS, PAGE, PAGES, ENTRIES = 3, 3, 7, 5
LONGEST = PAGE * ENTRIES


ROTATE = partial(jaxmha.rope, base=100.0, rotary_dim=4)
# The error of a number of a vector x, at most: factors of the number and of max |x|, added.
BOUNDS = {
    "int8": (0.0, 1 / 254),
    "float8_e4m3fn": (2.0**-4, 2.0**-18),
    "float8_e5m2": (2.0**-3, 2.0**-18),
}


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
            bad = jnp.asarray(127 if pool.dtype == np.int8 else poison, pool.dtype)
            found[name] = jnp.where(jnp.expand_dims(live, (1, 3)[: pool.ndim - 2]), pool, bad)
    return cache._replace(**found)


def projected(params: MHAParams, tokens: np.ndarray, rotate: Any) -> list[np.ndarray]:
    """Queries, keys and values in float64, `T N H`, `T K H` and `T K h`."""
    wide = np.zeros((LONGEST, 17))  # of one shape, so that a rotation compiles once
    wide[: len(tokens)] = tokens
    found = [
        np.einsum("td,dnh->tnh", wide, np.asarray(x.kernel, np.float64)) + np.asarray(x.bias)
        for x in (params.query, params.key, params.value)
    ]
    if rotate is not None:
        with jax.enable_x64(True):
            found[:2] = [np.asarray(rotate(x, np.arange(LONGEST))) for x in found[:2]]
    return [x[: len(tokens)] for x in found]


def attended(params: MHAParams, heads: list[np.ndarray], left: int | None) -> np.ndarray:
    """The output in float64, `T Do`, without a cache."""
    query, key, value = heads
    key, value = (x.repeat(query.shape[1] // x.shape[1], 1) for x in (key, value))
    i, j = np.indices((len(query),) * 2)
    allowed = (j <= i) & (j >= i - (LONGEST if left is None else left))
    scores = np.einsum("tnh,snh->nts", query, key) / np.sqrt(query.shape[-1])
    exps = np.where(allowed, np.exp(scores), 0)
    weights = exps / exps.sum(-1, keepdims=True)
    assert params.out is not None
    out = np.einsum("nts,snh,nhd->td", weights, value, np.asarray(params.out.kernel, np.float64))
    found: np.ndarray = out + np.asarray(params.out.bias)
    return found


class Schedule(RuleBasedStateMachine):
    """Random appends, forks, rollbacks and frees: the tokens of every row, kept on the host, give
    the output by full attention. After each of them, free pages and dead slots are poisoned."""

    left: int | None = None
    dtype: str | None = None
    rotate: Any = ROTATE

    def __init__(self) -> None:
        super().__init__()
        self.params, _ = make()
        self.cache = empty(self.params, dtype=self.dtype)
        self.pool = PagePool(self.cache)
        self.tokens: list[np.ndarray] = [np.zeros((0, 17), np.float32)] * ROWS
        self.reach = [0] * ROWS  # the shortest length to which a row can roll back
        self.rng = np.random.default_rng(0)

    @property
    def first(self) -> list[int]:
        """The first token of each row that a later one may attend."""
        return [0 if self.left is None else max(x - self.left, 0) for x in self.reach]

    @rule(counts=st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS))
    def extend(self, counts: list[int]) -> None:
        try:
            self.pool.extend(counts, left=self.left)
        except ValueError:  # the invariants see that nothing has changed
            return
        x = self.rng.standard_normal((ROWS, 4, 17)).astype(np.float32) / 2
        mask = Mask() if self.left is None else Mask.window(self.left, None)
        out, self.cache = jaxmha.extend(
            self.params, x, self.cache, q_lengths=np.asarray(counts), mask=mask, rotate=self.rotate
        )
        for row, count in enumerate(counts):
            if self.left is not None:
                self.reach[row] = len(self.tokens[row])
            self.tokens[row] = np.concatenate([self.tokens[row], x[row, :count]])
            self.check(row, count, np.asarray(out[row]))

    def check(self, row: int, count: int, out: np.ndarray) -> None:
        assert (out[count:] == 0).all()
        if not count:
            return
        heads = projected(self.params, self.tokens[row], self.rotate)
        if self.dtype is not None:
            heads[1:] = self.stored(row, heads[1:])
        want = attended(self.params, heads, self.left)[-count:]
        tolerance.assert_close(out[:count], want, factor=tolerance.LAYER)

    def stored(self, row: int, exact: list[np.ndarray]) -> list[np.ndarray]:
        """Keys and values as the cache holds them, which are within the stated bound."""
        tile, found = self.cache.tile(0, LONGEST), []
        for name, want in zip(("key", "value"), exact, strict=True):
            numbers, scale = getattr(tile, f"{name}s"), getattr(tile, f"{name}_scale")
            held = np.asarray(numbers[row], np.float64) * np.asarray(scale[row])[..., None]
            held = held.swapaxes(0, 1)[: len(want)]
            held[: self.first[row]] = 0.0  # may be freed
            of_number, of_largest = BOUNDS[str(self.dtype)]
            largest = np.abs(want).max(-1, keepdims=True)
            bound = of_number * np.abs(want) + (of_largest + 1e-6) * largest
            assert (np.abs(held - want) <= bound)[self.first[row] :].all()
            found.append(held)
        return found

    @rule(rows=st.tuples(st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)))
    def fork(self, rows: tuple[int, int]) -> None:
        source, target = rows
        self.pool.fork(source, target)
        self.cache = self.cache.fork(source, target)
        self.tokens[target], self.reach[target] = self.tokens[source], self.reach[source]

    @rule(taken=st.lists(st.integers(0, 5), min_size=ROWS, max_size=ROWS))
    def rollback(self, taken: list[int]) -> None:
        kept = [
            max(len(x) - n, least)
            for x, n, least in zip(self.tokens, taken, self.reach, strict=True)
        ]
        self.pool.rollback(kept)
        self.cache = self.cache.rollback(np.asarray(kept))
        self.tokens = [x[:n] for x, n in zip(self.tokens, kept, strict=True)]

    @precondition(lambda self: any(len(x) for x in self.tokens))
    @rule(row=st.integers(0, ROWS - 1))
    def free(self, row: int) -> None:
        self.pool.free(row)
        self.cache = self.cache.free(np.arange(ROWS) == row)
        self.tokens[row], self.reach[row] = self.tokens[row][:0], 0

    @invariant()
    def the_host_foresees_the_device(self) -> None:
        self.pool.require_same(self.cache)
        self.cache.validate()
        self.cache = poisoned(self.cache, self.first, self.rng.choice([np.nan, np.inf, -np.inf]))
        assert self.pool.lengths.tolist() == [len(x) for x in self.tokens]

    @invariant()
    def no_page_is_lost_or_shared(self) -> None:
        table, lengths = self.pool.table, self.pool.lengths
        held = page_table.holders(table, PAGES)
        assert (held > 0).sum() + self.pool.free_pages == PAGES
        assert ((table >= 0) <= (np.arange(ENTRIES) < -(-lengths[:, None] // PAGE))).all()
        for page in np.flatnonzero(held > 1):  # rows that share a page have the same tokens in it
            rows, entries = np.nonzero(table == page)
            assert len(set(entries)) == 1
            start = entries[0] * PAGE
            ends = [min(start + PAGE, lengths[row]) for row in rows]
            first = self.tokens[rows[0]][start : min(ends)]
            assert all((self.tokens[row][start : min(ends)] == first).all() for row in rows)


class Windows(Schedule):
    rotate = None

    @initialize(left=st.sampled_from([0, 1, 4]))
    def choose(self, left: int) -> None:
        self.left = left


class Bytes(Schedule):
    dtype = "int8"


class Float8(Schedule):
    dtype, left = "float8_e4m3fn", 4


class Coarse(Schedule):
    dtype, rotate = "float8_e5m2", None


MACHINES = Schedule, Windows, Bytes, Float8, Coarse
TestSchedule, TestWindows, TestBytes, TestFloat8, TestCoarse = (x.TestCase for x in MACHINES)
for case in (TestSchedule, TestWindows, TestBytes, TestFloat8, TestCoarse):
    case.settings = settings(max_examples=10, stateful_step_count=12, deadline=None)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_a_thousand_schedules(machine: type[Schedule]) -> None:
    many = settings(max_examples=1000, stateful_step_count=15, deadline=None)
    run_state_machine_as_test(machine, settings=many)


def run(params: MHAParams, cache: Any, x: Any, **options: Any) -> tuple[Any, Any]:
    return jaxmha.extend(params, x, cache, **options)


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
    found, want = (
        attend_cache(params, query, cache, positions, Mask(), Semantics(), block=PAGE)
        for cache in (small, wide)
    )
    tolerance.assert_close(found, np.asarray(want, np.float64))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_of_stored_numbers(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((101, 13)) * np.exp(rng.uniform(-60, 60, (101, 1)))).astype(np.float32)
    x[3], x[5, 2], x[7, 1] = 0, np.nan, np.inf
    stored, scale = quantize(jnp.asarray(x), jnp.dtype(dtype))
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


def test_no_room_is_nan_and_no_other_row_suffers() -> None:
    params, x = make()
    cache = empty(params, pages=4)
    out, cache = run(params, cache, x[:, :5], q_lengths=np.asarray([5, 2, 0]))
    assert np.isfinite(out).all()
    assert int(cache.free_pages()) == 1
    out, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([0, 1, 4]))
    assert np.isfinite(out[:2]).all()
    assert np.isnan(out[2]).all()
    cache = cache.free(np.asarray([True, False, True]))
    out, _ = run(params, cache, x[:, :4], q_lengths=np.asarray([0, 0, 4]))
    assert np.isfinite(out).all()


def test_a_lost_page_stays_lost() -> None:
    """A begun page without tokens, of a full pool or before a window, is not replaced by another."""
    params, x = make()
    cache = empty(params, pages=3)
    _, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([3, 3, 3]))
    out, cache = run(params, cache, x[:, :2], q_lengths=np.asarray([2, 0, 0]))
    assert np.isnan(out[0, :2]).all()
    cache = cache.free(np.asarray([False, True, True]))
    out, _ = run(params, cache, x[:, :1], q_lengths=np.asarray([1, 0, 0]))
    assert np.isnan(out[0, 0]).all()

    mask, cache = Mask.window(2, 0), empty(params)
    pool = PagePool(cache)
    for count in (8, 1):
        pool.extend([count, 0, 0], left=2)
        _, cache = run(params, cache, x[:, :8], q_lengths=np.asarray([count, 0, 0]), mask=mask)
    cache = cache.rollback(np.asarray([4, 0, 0]))
    pool.rollback([4, 0, 0])
    out, _ = run(params, cache, x[:, :1], q_lengths=np.asarray([1, 0, 0]), mask=mask)
    assert np.isnan(out[0, 0]).all()
    with pytest.raises(ValueError, match="or a page that they attend was freed"):
        pool.extend([1, 0, 0], left=2)


@pytest.mark.parametrize("cause", ["full pool", "lost page"])
@pytest.mark.parametrize("left", [None, 0, 2])
def test_a_row_that_lacks_a_page_is_broken_until_it_is_freed(left: int | None, cause: str) -> None:
    """Later pages, and a window that the lost tokens have left, do not hide it."""
    params, x = make()
    mask = Mask() if left is None else Mask.window(left, 0)
    cache = empty(params, pages=3 if cause == "lost page" else 2)
    _, cache = run(params, cache, x[:, :5], q_lengths=np.asarray([0, 5, 0]), mask=mask)
    if cause == "lost page":
        _, cache = run(params, cache, x[:, :2], q_lengths=np.asarray([2, 0, 0]), mask=mask)
        cache = cache._replace(table=cache.table.at[0, 0].set(99))
    for count in (4, *[1] * 7):
        out, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([count, 0, 0]), mask=mask)
        assert np.isnan(out[0, :count]).all()
        with pytest.raises(ValueError, match="row 0 lacks a page"):
            cache.validate()
        cache = cache.free(np.asarray([False, True, False]))
    cache = cache.free(np.asarray([True, False, False]))
    cache.validate()
    out, _ = run(params, cache, x[:, :4], q_lengths=np.asarray([4, 0, 0]), mask=mask)
    assert np.isfinite(out).all()


def test_a_rollback_to_the_tokens_that_are_held_mends_a_row() -> None:
    """Their outputs are those of a row that was never broken."""
    params, x = make()
    cache = empty(params, pages=2)
    _, cache = run(params, cache, x[:, :4], q_lengths=np.asarray([4, 0, 0]))
    out, broken = run(params, cache, x[:, 4:9], q_lengths=np.asarray([5, 0, 0]))
    assert np.isnan(out[0]).all()
    _, broken = run(params, broken, x[:, :1], q_lengths=np.asarray([1, 0, 0]))
    mended = broken.rollback(np.asarray([4, 0, 0]))
    mended.validate()
    found, want = (
        run(params, c, x[:, 4:6], q_lengths=np.asarray([2, 0, 0]))[0] for c in (mended, cache)
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


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int64])
def test_lengths_of_any_size_are_all_tokens(dtype: Any) -> None:
    """The pool and the cache agree."""
    params, x = make()
    cache = empty(params)
    pool = PagePool(cache)
    counts = np.asarray([3, 1, 0])
    pool.extend([3, 1, 0])
    _, cache = run(params, cache, x[:, :4], q_lengths=counts)
    lengths = np.full(ROWS, np.iinfo(dtype).max, dtype)
    pool.rollback(lengths)
    pool.require_same(cache.rollback(lengths))
    assert pool.lengths.tolist() == [3, 1, 0]
    with pytest.raises(ValueError, match="a row of the table holds"):
        pool.extend(lengths)  # type: ignore[arg-type]


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
        (lambda: PagePool(cache).fork(0.5, 1), "row must be an integer"),  # type: ignore[arg-type]
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
    _, window = run(
        params, cache, x[:, :4], mask=Mask.window(2, 0), q_lengths=np.asarray([4, 0, 0])
    )
    window.validate()  # it lacks its first page
    alone = Mask.window(0, None)
    _, idle = run(params, empty(params), x[:, :3], mask=alone)
    _, idle = run(params, idle, x[:, :1], mask=alone, q_lengths=np.asarray([1, 0, 0]))
    idle.validate()

    def changed(row: int, entry: int, page: int) -> np.ndarray:
        found = table.copy()
        found[row, entry] = page
        return found

    full = run(params, cache, x[:, :9])[1]
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
    _, cache = run(params, empty(params), x[:, :4], q_lengths=np.asarray([4, 2, 1]))
    pool, fork = PagePool(cache), jax.jit(PagedKVCache.fork)
    for rows in ((99, 0), (0, 99), (-1, 0), (0, -1), (3, 1)):
        pool.require_same(fork(cache, *rows))
    pool.require_same(jax.jit(PagedKVCache.rollback)(cache, jnp.asarray([9, 2, 2**31 - 1])))
    shorter = jax.jit(PagedKVCache.rollback)(cache, jnp.asarray([3, -1, -(2**31)]))
    shorter.validate()
    pool.rollback([3, 0, 0])
    pool.require_same(shorter)
    _, longer = run(params, cache, x[:, 4:6], q_lengths=jnp.asarray([3, 1, -1]))
    longer.validate()
    assert longer.lengths.tolist() == [6, 3, 1]


def test_lengths_reduced_by_hand() -> None:
    """As those of a dense cache may be: a step frees the pages beyond them, and shares none."""
    params, x = make()
    _, cache = run(params, empty(params, pages=9), x[:, :6])
    cache = cache.fork(0, 1)
    shorter = cache._replace(lengths=np.asarray([3, 6, 0], np.uint8))
    found, by_hand = run(params, shorter, x[:, 6:8])
    want, rolled_back = run(params, cache.rollback(np.asarray([3, 6, 0])), x[:, 6:8])
    by_hand.validate()
    PagePool(rolled_back).require_same(by_hand)
    tolerance.assert_same(found, want)
    PagePool(shorter.rollback(np.asarray([3, 5, 0]))).require_same(
        cache.rollback(np.asarray([3, 5, 0]))
    )


@pytest.mark.parametrize("page", [PAGES, 2**32, -(2**32), 2**63 - 1])
def test_no_page_of_a_table_is_truncated(page: int) -> None:
    """NumPy's 64 bits would become page 0, and be read. So would the last page in plain XLA."""
    params, x = make()
    _, cache = run(params, empty(params), x[:, :2])
    table = np.asarray(cache.table, np.int64)
    table[1, 0] = page
    out, longer = run(params, cache._replace(table=table), x[:, 2:3])
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[::2]).all()
    for name in ("key", "value"):
        before, after = (np.asarray(getattr(c, name))[table[0, 0], :, :2] for c in (cache, longer))
        np.testing.assert_array_equal(before, after)


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
    for counts in ([4, 1, 0], [1, 3, 5], [2, 4, 1], [4, 3, 5]):
        given = np.zeros((ROWS, 5, 17), np.float32)
        for row, count in enumerate(counts):
            given[row, :count] = x[row, at[row] : at[row] + count]
        out, cache = run(params, cache, given, q_lengths=np.asarray(counts), **options)
        outs.append([out[row, :count] for row, count in enumerate(counts)])
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
