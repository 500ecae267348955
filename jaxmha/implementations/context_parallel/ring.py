"""Ring attention: context parallelism in which keys and values rotate around a ring of devices.

Each device keeps its queries, receives the keys and values of one device at a time, and folds them
into its online-softmax state. In the backward pass the gradients of keys and values rotate with
them. Hops at which static bounds, of a window or causality, mask all pairs on all devices are skipped.
Sums accumulate in place and arriving tiles reuse the buffers of departing ones, so that memory per
device falls as devices are added.
Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from jaxmha.implementations.base import Request, Result
from jaxmha.implementations.context_parallel import common
from jaxmha.implementations.context_parallel.common import OutLse, Pair, Static
from jaxmha.implementations.fused.adapter import is_dense
from jaxmha.implementations.mods import Floats, Mod, cotangent
from jaxmha.implementations.online_softmax import Softmax, State
from jaxmha.implementations.tiled import layout, loop
from jaxmha.implementations.tiled.block_mask import Conditions
from jaxmha.implementations.tiled.dropout import Seed
from jaxmha.implementations.tiled.layout import Index
from jaxmha.implementations.tiled.tile import Config
from jaxmha.implementations.tiled.tiling import Tiling

Arrays: TypeAlias = tuple[jax.Array, ...]
Tree = TypeVar("Tree")
Carry = TypeVar("Carry")


def unsupported_reason(request: Request) -> str | None:
    """Returns None if this implementation supports the request, else the reason why not."""
    reason = common.unsupported(request)
    if reason is None and is_dense(request):
        return (
            "ring takes neither a bias nor a dense mask, unless the mask is over queries or keys "
            "alone; allgather takes both"
        )
    return reason


def attend(request: Request) -> Result:
    """Computes the request; sums are float32, or float64 for float64 inputs."""
    return common.attend(request, _local)


def _local(
    static: Static,
    query: Float[jax.Array, "B N t H"],
    key: Float[jax.Array, "B K s H"],
    value: Float[jax.Array, "B K s h"],
    bias: None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None,
) -> OutLse:
    return _ring(static, query, key, value, traced, seed, score_mod)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    static: Static,
    query: Float[jax.Array, "B N t H"],
    key: Float[jax.Array, "B K s H"],
    value: Float[jax.Array, "B K s h"],
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None,
) -> OutLse:
    """Output and lse of one device's queries over the keys and values of all devices."""
    found = _softmax(static, query, key, value, traced, seed, score_mod)
    return found.out, found.lse


def _softmax(
    static: Static,
    query: Float[jax.Array, "B N t H"],
    key: Float[jax.Array, "B K s H"],
    value: Float[jax.Array, "B K s h"],
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None,
) -> Softmax:
    # Scores are transposed, `s r`, as those of the backward pass always are: logits then round
    # equally in both passes.
    static = static._replace(config=static.config._replace(transposed=True))
    part = _part(static, query, key, traced, seed)
    rows = jnp.stack(
        [layout.to_query_tiles(part.tiling, x) for x in common.split_parts(static, query)]
    )
    rows = _barrier(jnp.swapaxes(rows, -1, -2))
    start = loop.initial_state(part.config, rows, value.shape[-1])
    decode = partial(_decode, np.dtype(key.dtype), np.dtype(query.dtype))

    def fold(state: State, kv: Arrays, i: Index, j: Index, pair: Pair) -> tuple[State, Arrays]:
        keys, values = kv
        own: State = jax.tree.map(lambda x: x[i], state)
        own = loop.forward_into(
            pair.tiling,
            pair.config,
            own,
            rows[i],
            keys[j],
            values[j],
            pair.traced,
            pair.seed,
            decode,
            pair.score_mod,
        )
        return jax.tree.map(lambda x, new: x.at[i].set(new), state, own), kv

    kv = _encode(static, part, key, value)
    shared = _Shared(traced, seed, score_mod)
    state, _, _ = _rotate(static, part, shared, start, kv, fold)
    softmax = loop.normalize(part.config, loop.transpose_all(state), seed)
    whole = (jnp.stack([layout.from_query_tiles(part.tiling, x) for x in y]) for y in softmax)
    return Softmax(*map(common.join_parts, whole))


RingInputs: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, Conditions, Seed | None, Mod | None]


def _forward(
    static: Static,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None,
) -> tuple[OutLse, tuple[RingInputs, Softmax]]:
    inputs = query, key, value, traced, seed, score_mod
    softmax = _softmax(static, *inputs)
    return (softmax.out, softmax.lse), (inputs, softmax)


def _backward(
    static: Static, saved: tuple[RingInputs, Softmax], cotangents: OutLse
) -> tuple[jax.Array, jax.Array, jax.Array, None, None, Mod | None]:
    (query, key, value, traced, seed, score_mod), softmax = saved
    part = _part(static, query, key, traced, seed)
    rows = [common.split_parts(static, x) for x in (query, *softmax, *cotangents)]
    inputs = [
        loop.backward_inputs(part.tiling, x[0], Softmax(*x[1:4]), *x[4:])
        for x in zip(*rows, strict=True)
    ]
    per_row = _barrier(jax.tree.map(lambda *x: jnp.stack(x), *inputs))
    kv = _encode(static, part, key, value)
    decode = partial(_decode, np.dtype(key.dtype), np.dtype(query.dtype))
    zeros, *sums = (jnp.zeros(x.shape, query.dtype) for x in (per_row[0], *kv))
    captured = () if score_mod is None else score_mod.floats
    start = zeros, tuple(jnp.zeros(x.shape, query.dtype) for x in captured)

    def fold(
        own: tuple[jax.Array, Floats], rotating: Arrays, i: Index, j: Index, pair: Pair
    ) -> tuple[tuple[jax.Array, Floats], Arrays]:
        (dq, floats), (k, v, dk, dv) = own, rotating
        own_rows, own_cotangents = jax.tree.map(lambda x: x[i], per_row)
        (new_dq, new_dk, new_dv), floats = loop.backward_into(
            pair.tiling,
            pair.config,
            (dq[i], dk[j], dv[j]),
            own_rows,
            own_cotangents,
            k[j],
            v[j],
            pair.traced,
            pair.seed,
            decode,
            pair.score_mod,
            floats,
        )
        return (dq.at[i].set(new_dq), floats), (k, v, dk.at[j].set(new_dk), dv.at[j].set(new_dv))

    shared = _Shared(traced, seed, score_mod)
    (dq, floats), (_, _, *sums), hops = _rotate(static, part, shared, start, (*kv, *sums), fold)
    home = _send(static, tuple(x.astype(key.dtype) for x in sums), static.devices - hops)
    dk, dv = (jnp.stack([layout.from_kv_tiles(part.tiling, x) for x in y]) for y in home)
    dq = jnp.stack([layout.from_query_tiles(part.tiling, jnp.swapaxes(x, -1, -2)) for x in dq])
    dq, dk, dv = (common.join_parts(x) for x in (dq, dk, dv))
    return dq, dk, dv, None, None, cotangent(score_mod, floats)


_ring.defvjp(_forward, _backward)


class _Shared(NamedTuple):
    """Mask conditions, dropout seed and score function for the batch rows and heads of this device and
    the positions of all devices: the same at every hop."""

    traced: Conditions
    seed: Seed | None
    score_mod: Mod | None


class _Part(NamedTuple):
    """Tiling and config for a contiguous range (part) of queries and one of keys, and the shapes of
    both, `b n t H` and `b k s H`: the same for all ranges of all devices."""

    tiling: Tiling
    config: Config
    query: jax.ShapeDtypeStruct
    key: jax.ShapeDtypeStruct


def _part(
    static: Static, query: jax.Array, key: jax.Array, traced: Conditions, seed: Seed | None
) -> _Part:
    shapes = [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            (*x.shape[:2], x.shape[2] // static.parts, x.shape[3]), query.dtype
        )
        for x in (query, key)
    ]
    pair = common.pair_of_parts(static, shapes[0], shapes[1], traced, seed, 0, 0)
    return _Part(pair.tiling, pair.config, *shapes)


def _barrier(x: Tree) -> Tree:
    """Returns `x`, tiled rows, and makes XLA materialise them once: otherwise it recomputes them inside
    the loop over hops, and holds two copies."""
    held: Tree = jax.lax.optimization_barrier(x)  # type: ignore[no-untyped-call]
    return held


def _encode(static: Static, part: _Part, *arrays: Float[jax.Array, "B K s _"]) -> Arrays:
    """Tiles keys and values for the ring: `parts *tiles keys d`. Half precision is bitcast to uint16:
    XLA:CPU upcasts a whole half-precision array to slice or permute it."""
    found = []
    for x in arrays:
        tiles = [layout.to_kv_tiles(part.tiling, y) for y in common.split_parts(static, x)]
        whole = jnp.stack(tiles)
        half = x.dtype.itemsize == 2
        found.append(jax.lax.bitcast_convert_type(whole, np.uint16) if half else whole)
    return tuple(found)


def _decode(
    stored: np.dtype[np.floating], wanted: np.dtype[np.floating], x: Num[jax.Array, "*tile"]
) -> Float[jax.Array, "*tile"]:
    """Casts a tile of an array from `_encode` to dtype `wanted`; before `_encode` the array had
    dtype `stored`."""
    if x.dtype == np.uint16:
        x = jax.lax.bitcast_convert_type(x, stored)
    return x.astype(wanted)


def _rotate(
    static: Static,
    part: _Part,
    shared: _Shared,
    carry: Carry,
    rotating: Arrays,
    fold: Callable[[Carry, Arrays, Index, Index, Pair], tuple[Carry, Arrays]],
) -> tuple[Carry, Arrays, int]:
    """Sends `rotating` around the ring and folds it into `carry`.

    Computes `carry, rotating = fold(carry, rotating, i, j, pair)` for every part (contiguous range)
    i of this device's queries and, as each device's keys pass, every part j of them, unless a bound
    masks all pairs of i and j. Returns carry, rotating, and the number of hops between each rotating
    array and its home device.
    """
    device = jax.lax.axis_index(static.axis)
    traced, seed, score_mod = shared
    bounds = common.bounds(static, traced)
    m, T, S = static.parts, *(x // (static.devices * static.parts) for x in (static.T, static.S))
    own_starts = jnp.stack([jnp.asarray(x) for x in static.starts(device, static.T)])

    def visit(hop: Index, carry: Carry, rotating: Arrays) -> tuple[Carry, Arrays]:
        owner = (device - hop) % static.devices
        starts = jnp.stack([jnp.asarray(x) for x in static.starts(owner, static.S)])

        def parts(p: Index, state: tuple[Carry, Arrays]) -> tuple[Carry, Arrays]:
            i, j = p // m, p % m
            t, s = own_starts[i], starts[j]

            def run(state: tuple[Carry, Arrays]) -> tuple[Carry, Arrays]:
                carry, rotating = state
                pair = common.pair_of_parts(
                    static, part.query, part.key, traced, seed, t, s, score_mod
                )
                return fold(carry, rotating, i, j, pair)

            needed = common.any_allowed(*bounds, t, T, s, S)
            if needed is True:
                return run(state)
            # A loop of 0 or 1 steps works in place; `cond` would allocate its result in addition.
            once = jnp.asarray(needed).astype(np.int32)
            done: tuple[Carry, Arrays] = jax.lax.fori_loop(0, once, lambda _, x: run(x), state)
            return done

        if m == 1:
            return parts(0, (carry, rotating))
        found: tuple[Carry, Arrays] = jax.lax.fori_loop(
            np.int32(0), np.int32(m * m), parts, (carry, rotating)
        )
        return found

    def step(state: tuple[Carry, Arrays], hop: object) -> tuple[tuple[Carry, Arrays], None]:
        carry, rotating = state
        return visit(cast(jax.Array, hop), carry, _send(static, rotating, 1)), None

    at = 0
    for first, last in _runs(static, traced):
        rotating = _send(static, rotating, first - at)
        carry, rotating = visit(first, carry, rotating)
        if last > first:
            hops = np.arange(first + 1, last + 1, dtype=np.int32)
            state, _ = jax.lax.scan(step, (carry, rotating), hops)
            carry, rotating = state
        at = last
    return carry, rotating, at


def _runs(static: Static, traced: Conditions) -> list[tuple[int, int]]:
    """Ranges (first, last) of consecutive hops, without those at which static bounds mask all pairs on
    all devices; with a traced causal offset, only the left bound is static. Arrays are sent from a
    range to the next at once."""
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
        needed = [
            np.any(common.any_allowed(below, above, t, T, s, S) & np.ones(P, bool))
            for t in queries
            for s in keys
        ]
        if not any(needed):
            continue
        if runs and runs[-1][1] == hop - 1:
            runs[-1] = runs[-1][0], hop
        else:
            runs.append((hop, hop))
    return runs


def _send(static: Static, arrays: Arrays, hops: int) -> Arrays:
    """Sends each device's arrays `hops` devices further around the ring."""
    if hops % static.devices == 0:
        return arrays
    route = [(r, (r + hops) % static.devices) for r in range(static.devices)]

    def permute(x: jax.Array) -> jax.Array:
        sent: jax.Array = jax.lax.ppermute(x, static.axis, route)  # type: ignore[no-untyped-call]
        return sent

    return tuple(_in_place(permute, x) for x in arrays)


# `_in_place` sends an array in at most PIECES equal pieces, but whole if it has at most SMALL bytes.
PIECES, SMALL = 16, 2**18


def _in_place(send: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Computes `send(x)` of an array `... keys d`, piece by piece if it is large and the keys can be
    divided evenly: each arriving piece overwrites the piece just sent, so that only one piece needs
    additional memory."""
    s = x.shape[-2]
    count = max(n for n in range(1, PIECES + 1) if s % n == 0)
    if x.nbytes <= SMALL or count == 1:
        return send(x)

    def piece(i: Index, x: jax.Array) -> jax.Array:
        at, size = i * (s // count), s // count
        arrived = send(jax.lax.dynamic_slice_in_dim(x, at, size, -2))
        return jax.lax.dynamic_update_slice_in_dim(x, arrived, at, -2)

    sent: jax.Array = jax.lax.fori_loop(np.int32(0), np.int32(count), piece, x)
    return sent
