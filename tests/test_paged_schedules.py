"""Random schedules of a paged cache: attention is that of its tokens, and no page is lost, shared
wrongly or read dead."""

from functools import partial
from typing import Any

import jax
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
from jaxmha import Mask, MHAParams, PagePool, page_table
from tests import tolerance
from tests.paged import ENTRIES, LONGEST, PAGE, PAGES, ROWS, empty, poisoned
from tests.test_cache import make

ROTATE = partial(jaxmha.rope, base=100.0, rotary_dim=4)
# The error of a number of a vector x, at most: factors of the number and of max |x|, added.
BOUNDS = {
    "int8": (0.0, 1 / 254),
    "float8_e4m3fn": (2.0**-4, 2.0**-18),
    "float8_e5m2": (2.0**-3, 2.0**-18),
}


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
            turn = jax.jit(rotate)
            found[:2] = [np.asarray(turn(x, np.arange(LONGEST))) for x in found[:2]]
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
    platform = "cpu"

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
        with jaxmha.lowering_for(self.platform):
            out, self.cache = jaxmha.extend(
                self.params,
                x,
                self.cache,
                q_lengths=np.asarray(counts),
                mask=mask,
                rotate=self.rotate,
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
            numbers, scale = (np.asarray(getattr(tile, name + x)) for x in ("s", "_scale"))
            held = numbers[row].astype(np.float64) * scale[row][..., None]
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

    @initialize(left=st.sampled_from([0, 1, 4]), platform=st.sampled_from(["cpu", "rocm"]))
    def choose(self, left: int, platform: str) -> None:
        self.left, self.platform = left, platform


class Bytes(Schedule):
    dtype = "int8"


class Float8(Schedule):
    dtype, left, platform = "float8_e4m3fn", 4, "rocm"


class Coarse(Schedule):
    dtype, rotate = "float8_e5m2", None


MACHINES = Schedule, Windows, Bytes, Float8, Coarse


@pytest.mark.slow_variants("1000-*", "5-Bytes", "5-Coarse")
@pytest.mark.parametrize("machine", MACHINES, ids=[machine.__name__ for machine in MACHINES])
@pytest.mark.parametrize("examples", [5, 1000])
def test_random_schedules(examples: int, machine: type[Schedule]) -> None:
    given = settings(max_examples=examples, stateful_step_count=15, deadline=None)
    run_state_machine_as_test(machine, settings=given)
