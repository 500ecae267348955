"""Positions on many devices; keys and values travel around the ring of them.

Every device keeps its queries, meets one device's keys and values at a time, and merges by the
log-sum-exp. In the gradient the slopes of keys and values travel along with them. Devices too far
apart for a window or causality are never met. Source: Liu et al., "Ring Attention with Blockwise
Transformers" (2023).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations import blocked, context
from jaxmha.implementations.context import Static
from jaxmha.implementations.kernels import is_dense
from jaxmha.implementations.pairs import Pairs
from jaxmha.implementations.request import Request, Result


def supports(request: Request) -> str | None:
    """None, or why not."""
    reason = context.declined(request)
    if reason is None and is_dense(request):
        return "biases and dense masks have all pairs of positions, which no device should hold"
    return reason


def attend(request: Request) -> Result:
    """Computes the request; intermediates are float32, or float64 for float64 inputs."""
    found: Result = context.attend(request, _local)
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
    """Output and lse of one device's queries `B N t H`, from keys and values of all."""
    queries = context.split_parts(static, query)
    shape = queries.shape[:-1]
    out = jnp.zeros((*shape, value.shape[-1]), query.dtype)
    lse = jnp.full(shape, -jnp.inf, query.dtype)

    def meet(carry: Any, kv: Any, i: Any, j: Any, place: tuple[Any, Any]) -> Any:
        (out, lse), (k, v) = carry, (x[j].astype(query.dtype) for x in kv)
        plan, rules, pairs, at = context.corner(static, queries[i], k, traced, words, *place)
        more, more_lse = blocked.core(plan, rules, queries[i], k, v, None, pairs, at)
        merged, total = _merge(out[i], lse[i], more, more_lse)
        return out.at[i].set(merged), lse.at[i].set(total)

    kv = tuple(context.split_parts(static, x) for x in (key, value))
    (out, lse), _ = _travel(static, traced, (out, lse), kv, meet)
    return context.join_parts(out), context.join_parts(lse)


def _merge(out: Any, lse: Any, more: Any, more_lse: Any) -> tuple[jax.Array, jax.Array]:
    total = jnp.logaddexp(lse, more_lse)
    safe = jnp.where(total == -jnp.inf, 0.0, total)
    a, b = (jnp.exp(x - safe)[..., None] for x in (lse, more_lse))
    return out * a + more * b, total


def _forward(static: Static, *arguments: Any) -> Any:
    out, lse = _ring(static, *arguments)
    return (out, lse), (*arguments, out, lse)


def _backward(static: Static, saved: Any, slopes: Any) -> tuple[Any, ...]:
    query, key, value, traced, words, out, lse = saved
    rows = tuple(context.split_parts(static, x) for x in (query, out, lse, *slopes))
    kv = tuple(context.split_parts(static, x) for x in (key, value))
    sums = tuple(jnp.zeros(x.shape, query.dtype) for x in kv)

    def meet(carry: Any, kv: Any, i: Any, j: Any, place: tuple[Any, Any]) -> Any:
        dq, dk, dv = carry
        q, o, l, *slope = (x[i] for x in rows)
        k, v = (x[j].astype(query.dtype) for x in kv)
        plan, rules, pairs, at = context.corner(static, q, k, traced, words, *place)
        saved = q, k, v, None, pairs, at, o, l
        more_q, more_k, more_v, *_ = blocked.core_backward(plan, rules, saved, tuple(slope))
        return dq.at[i].add(more_q), dk.at[j].add(more_k), dv.at[j].add(more_v)

    start = jnp.zeros_like(rows[0]), *sums
    carry, at = _travel(static, traced, start, kv, meet, along=1)
    home = tuple(x.astype(key.dtype) for x in carry[1:])
    home = _shift(static, home, static.devices - at)
    return *(context.join_parts(x) for x in (carry[0], *home)), None, None


_ring.defvjp(_forward, _backward)


def _travel(
    static: Static,
    traced: Pairs,
    carry: tuple[Any, ...],
    kv: tuple[Any, ...],
    meet: Callable[..., Any],
    along: int | None = None,
) -> tuple[Any, int]:
    """`carry = meet(carry, kv, i, j, place)` of every two parts that may attend.

    Keys and values move on; what of the carry is from index `along` on moves with them. Answers
    also how far they are from home.
    """
    here = jax.lax.axis_index(static.axis)
    bounds = context.bounds(static, traced)
    m, T, S = static.parts, *(x // (static.devices * static.parts) for x in (static.T, static.S))
    mine = jnp.stack([jnp.asarray(x) for x in static.starts(here, static.T)])

    def visit(hop: Any, carry: Any, kv: Any) -> Any:
        owner = (here - hop) % static.devices
        theirs = jnp.stack([jnp.asarray(x) for x in static.starts(owner, static.S)])

        def pair(p: Any, carry: Any) -> Any:
            i, j = p // m, p % m
            place = mine[i], theirs[j]
            needed = context.meets(*bounds, place[0], T, place[1], S)
            if needed is True:
                return meet(carry, kv, i, j, place)
            return jax.lax.cond(
                needed, lambda carry: meet(carry, kv, i, j, place), lambda carry: carry, carry
            )

        return pair(0, carry) if m == 1 else jax.lax.fori_loop(0, m * m, pair, carry)

    def move(carry: Any, kv: Any, hops: int) -> Any:
        if along is None:
            return carry, _shift(static, kv, hops)
        moving = _shift(static, (*carry[along:], *kv), hops)
        count = len(carry) - along
        return (*carry[:along], *moving[:count]), moving[count:]

    at = 0
    for first, last in _runs(static, traced):
        carry, kv = move(carry, kv, first - at)
        carry = visit(first, carry, kv)

        def step(state: Any, hop: Any) -> Any:
            carry, kv = move(state[0], state[1], 1)
            return (visit(hop, carry, kv), kv), None

        if last > first:
            (carry, kv), _ = jax.lax.scan(step, (carry, kv), jnp.arange(first + 1, last + 1))
        at = last
    return carry, at


def _runs(static: Static, traced: Pairs) -> list[tuple[int, int]]:
    """Distances at which some device meets a key that bounds leave it: first and last of runs."""
    below, above = context.bounds(static, traced)
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
            np.any(context.meets(below, above, t, T, s, S) & np.ones(P, bool))
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
    """Every device's arrays to the device so many further on."""
    if hops % static.devices == 0:
        return arrays
    route = [(r, (r + hops) % static.devices) for r in range(static.devices)]
    move: Any = jax.lax.ppermute
    return tuple(move(x, static.axis, route) for x in arrays)
