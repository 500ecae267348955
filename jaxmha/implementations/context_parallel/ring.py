"""Ring attention: context parallelism in which keys and values rotate around a ring of devices.

Each device keeps its queries, receives the keys and values of one device at a time, and folds them
into its online-softmax state. In the backward pass the gradients of keys and values rotate with
them. Hops that a window or causality masks fully are skipped. Sums accumulate in place and arriving
tiles reuse the buffers of departing ones, so that memory per device falls as devices are added.
Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations.base import Request, Result
from jaxmha.implementations.context_parallel import common
from jaxmha.implementations.context_parallel.common import Static
from jaxmha.implementations.fused.adapter import is_dense
from jaxmha.implementations.tiled import layout, loop, tile
from jaxmha.implementations.tiled.block_mask import Pairs
from jaxmha.implementations.tiled.tile import Rules, Softmax
from jaxmha.implementations.tiled.tiling import Plan


def supports(request: Request) -> str | None:
    """None, or why not."""
    reason = common.declined(request)
    if reason is None and is_dense(request):
        return (
            "the ring takes no bias, and no dense mask but one of queries or of keys alone; "
            "allgather does"
        )
    return reason


def attend(request: Request) -> Result:
    """Computes the request; intermediates are float32, or float64 for float64 inputs."""
    found: Result = common.attend(request, _local)
    return found


def _local(static: Static, query: Any, key: Any, value: Any, _: Any, *rest: Any) -> Any:
    return _ring(static, query, key, value, *rest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    static: Static,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    traced: Pairs,
    words: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of one device's queries `B N t H` over the keys and values of all devices."""
    found = _softmax(static, query, key, value, traced, words)
    return found.out, found.lse


def _softmax(
    static: Static, query: Any, key: Any, value: Any, traced: Pairs, words: Any
) -> Softmax:
    static = static._replace(rules=static.rules._replace(transposed=True))  # as in the gradient
    cut = _cut(static, query, key, traced, words)
    rows = jnp.stack([layout.tiles(cut.plan, x) for x in common.split_parts(static, query)])
    rows = _once(jnp.swapaxes(rows, -1, -2))
    start = tile.nothing_yet(cut.rules, rows, value.shape[-1])
    read = partial(_numbers, key.dtype, query.dtype)

    def meet(seen: Any, kv: Any, i: Any, j: Any, at: common.Corner) -> Any:
        parts = rows[i], *(x[j] for x in kv)
        mine = jax.tree.map(lambda x: x[i], seen)
        more = loop.forward(at.plan, at.rules, parts, None, *at[2:], lambda x: x, mine, read)
        return jax.tree.map(lambda x, part: x.at[i].set(part), seen, more)

    seen, _, _ = _travel(static, cut, traced, words, start, _chunks(static, cut, key, value), meet)
    seen = loop.turned(seen)
    found = loop.finished(cut.rules, seen, words)
    whole = (jnp.stack([layout.rows(cut.plan, x) for x in y]) for y in found)
    return Softmax(*map(common.join_parts, whole))


def _forward(static: Static, *arguments: Any) -> Any:
    found = _softmax(static, *arguments)
    return (found.out, found.lse), (*arguments, found)


def _backward(static: Static, saved: Any, slopes: Any) -> tuple[Any, ...]:
    query, key, value, traced, words, found = saved
    cut = _cut(static, query, key, traced, words)
    rows = [common.split_parts(static, x) for x in (query, *found, *slopes)]
    parts = [
        loop.rows_of_gradient(cut.plan, part[0], Softmax(*part[1:4]), *part[4:])
        for part in zip(*rows, strict=True)
    ]
    rows = _once(jax.tree.map(lambda *x: jnp.stack(x), *parts))
    kv = _chunks(static, cut, key, value)
    read = partial(_numbers, key.dtype, query.dtype)
    start, *sums = (jnp.zeros(x.shape, query.dtype) for x in (rows[0], *kv))

    def meet(dq: Any, moving: Any, i: Any, j: Any, at: common.Corner) -> Any:
        k, v, *sums = moving
        mine = dq[i], *(x[j] for x in sums)
        per_row = tuple(x[i] for x in rows)
        per_key = k[j], v[j]
        _, (mine, *more) = loop.backward(
            at.plan, at.rules, per_row, per_key, None, *at[2:], mine, read
        )
        return dq.at[i].set(mine), (
            k,
            v,
            *(x.at[j].set(y) for x, y in zip(sums, more, strict=True)),
        )

    dq, (_, _, *sums), at = _travel(
        static, cut, traced, words, start, (*kv, *sums), meet, writes=True
    )
    home = _shift(static, tuple(x.astype(key.dtype) for x in sums), static.devices - at)
    whole = [jnp.stack([layout.unchunked(cut.plan, x) for x in y]) for y in home]
    dq = jnp.stack([layout.rows(cut.plan, jnp.swapaxes(x, -1, -2)) for x in dq])
    return *(common.join_parts(x) for x in (dq, *whole)), None, None


class _Cut(NamedTuple):
    """Tiling, config and shapes of a part of the queries `b n t H` and of the keys `b k s H`."""

    plan: Plan
    rules: Rules
    query: Any
    key: Any


def _cut(static: Static, query: Any, key: Any, traced: Pairs, words: Any) -> _Cut:
    make: Any = jax.ShapeDtypeStruct
    shapes = [
        make((*x.shape[:2], x.shape[2] // static.parts, x.shape[3]), query.dtype)
        for x in (query, key)
    ]
    plan, rules, *_ = common.corner(static, shapes[0], shapes[1], traced, words, 0, 0)
    return _Cut(plan, rules, *shapes)


def _once(x: Any) -> Any:
    """Keeps XLA from rematerialising the tiled rows within the loop over hops, in a second copy."""
    barrier: Any = jax.lax.optimization_barrier
    return barrier(x)


def _chunks(static: Static, cut: _Cut, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Tiled keys and values for the ring. Half precision is bitcast to uint16: XLA:CPU upcasts the
    whole array when it is sliced or permuted."""
    found = []
    for x in arrays:
        parts = [layout.chunks(cut.plan, part) for part in common.split_parts(static, x)]
        whole = jnp.stack(parts)
        half = x.dtype.itemsize == 2
        found.append(jax.lax.bitcast_convert_type(whole, np.uint16) if half else whole)
    return tuple(found)


def _numbers(kept: Any, wanted: Any, x: jax.Array) -> jax.Array:
    """Decodes a tile of `_chunks`, originally of dtype `kept`, to dtype `wanted`."""
    if x.dtype == np.uint16:
        x = jax.lax.bitcast_convert_type(x, kept)
    return x.astype(wanted)


_ring.defvjp(_forward, _backward)


def _travel(
    static: Static,
    cut: _Cut,
    traced: Pairs,
    words: jax.Array | None,
    carry: Any,
    moving: tuple[Any, ...],
    meet: Callable[..., Any],
    *,
    writes: bool = False,
) -> tuple[Any, tuple[Any, ...], int]:
    """`carry = meet(carry, moving, i, j, corner)` for every pair of parts with an allowed pair.

    `moving` arrays rotate around the ring; if `writes`, `meet` returns `(carry, moving)`. Returns
    carry, moving, and the number of hops that moving arrays are away from their home device.
    """
    here = jax.lax.axis_index(static.axis)
    bounds = common.bounds(static, traced)
    m, T, S = static.parts, *(x // (static.devices * static.parts) for x in (static.T, static.S))
    mine = jnp.stack([jnp.asarray(x) for x in static.starts(here, static.T)])

    def visit(hop: Any, carry: Any, moving: Any) -> Any:
        owner = (here - hop) % static.devices
        theirs = jnp.stack([jnp.asarray(x) for x in static.starts(owner, static.S)])

        def pair(p: Any, state: Any) -> Any:
            i, j = p // m, p % m
            t, s = mine[i], theirs[j]

            def met(state: Any) -> Any:
                carry, moving = state
                at = common.corner(static, cut.query, cut.key, traced, words, t, s)
                found = meet(carry, moving, i, j, at)
                return found if writes else (found, moving)

            needed = common.meets(*bounds, t, T, s, S)
            if needed is True:
                return met(state)
            # A loop of 0 or 1 steps works in place; `cond` would allocate its result in addition.
            return jax.lax.fori_loop(0, needed.astype(np.int32), lambda _, x: met(x), state)

        state = carry, moving
        return (
            pair(0, state)
            if m == 1
            else jax.lax.fori_loop(np.int32(0), np.int32(m * m), pair, state)
        )

    at = 0
    for first, last in _runs(static, traced):
        moving = _shift(static, moving, first - at)
        carry, moving = visit(first, carry, moving)

        def step(state: Any, hop: Any) -> Any:
            carry, moving = state
            return visit(hop, carry, _shift(static, moving, 1)), None

        if last > first:
            state = carry, moving
            (carry, moving), _ = jax.lax.scan(
                step, state, np.arange(first + 1, last + 1, dtype=np.int32)
            )
        at = last
    return carry, moving, at


def _runs(static: Static, traced: Pairs) -> list[tuple[int, int]]:
    """Runs (first, last) of hops at which some device has an allowed pair within the bounds."""
    below, above = common.bounds(static, traced)
    if above is not None and not isinstance(above, int):
        above = None
    P = static.devices
    T, S = (x // (P * static.parts) for x in (static.T, static.S))
    device = np.arange(P)
    runs: list[tuple[int, int]] = []
    for hop in range(P):
        queries = static.starts(device, static.T)
        keys = static.starts((device - hop) % P, static.S)
        met = [
            np.any(common.meets(below, above, t, T, s, S) & np.ones(P, bool))
            for t in queries
            for s in keys
        ]
        if not any(met):
            continue
        if runs and runs[-1][1] == hop - 1:
            runs[-1] = runs[-1][0], hop
        else:
            runs.append((hop, hop))
    return runs


def _shift(static: Static, arrays: tuple[Any, ...], hops: int) -> tuple[Any, ...]:
    """Sends each device's arrays `hops` devices further around the ring."""
    if hops % static.devices == 0:
        return arrays
    route = [(r, (r + hops) % static.devices) for r in range(static.devices)]
    move: Any = jax.lax.ppermute
    return tuple(_in_place(lambda x: move(x, static.axis, route), x) for x in arrays)


def _in_place(move: Callable[[Any], jax.Array], x: jax.Array) -> jax.Array:
    """`move(x)` of a large array `... keys d`, piece by piece: arriving pieces overwrite departed
    ones, so that only one piece needs additional memory."""
    s = x.shape[-2]
    count = max(n for n in range(1, PIECES + 1) if s % n == 0)
    if x.nbytes <= SMALL or count == 1:
        return move(x)

    def piece(i: Any, x: Any) -> Any:
        at, size = i * (s // count), s // count
        arrived = move(jax.lax.dynamic_slice_in_dim(x, at, size, -2))
        return jax.lax.dynamic_update_slice_in_dim(x, arrived, at, -2)

    moved: jax.Array = jax.lax.fori_loop(np.int32(0), np.int32(count), piece, x)
    return moved


PIECES, SMALL = 16, 2**18  # maximum number of pieces; bytes that are sent whole
