"""Context parallelism by all-gather: each device gathers the keys and values of all positions.

The gathered arrays need O(S) memory per device, for one layer at a time: the backward pass gathers
again instead of saving them.
Source: Llama Team, "The Llama 3 Herd of Models" (2024), section 3.3.2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmha import sharding
from jaxmha.implementations.base import Request, Result
from jaxmha.implementations.context_parallel import common
from jaxmha.implementations.context_parallel.common import OutLse, Static
from jaxmha.implementations.mods import Mod, cotangent
from jaxmha.implementations.online_softmax import Softmax
from jaxmha.implementations.tiled import attention
from jaxmha.implementations.tiled.block_mask import Conditions
from jaxmha.implementations.tiled.dropout import Seed
from jaxmha.implementations.tiled.per_device import CoreInputs

In = TypeVar("In")
Out = TypeVar("Out")


def unsupported_reason(request: Request) -> str | None:
    """Returns None if this implementation supports the request, else the reason why not."""
    reason = common.unsupported(request)
    if reason is not None:
        return reason
    axes = sharding.current()
    dense = request.bias, request.mask.array
    if axes is not None and axes.zigzag and any(x is not None and x.shape[2] > 1 for x in dense):
        return "rows of biases and dense masks are not in zig-zag order: leave zigzag out"
    return None


def attend(request: Request) -> Result:
    """Computes the request; sums are float32, or float64 for float64 inputs."""
    return common.attend(request, _local)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local(
    static: Static,
    query: Float[jax.Array, "B N t H"],
    key: Float[jax.Array, "B K s H"],
    value: Float[jax.Array, "B K s h"],
    bias: Float[jax.Array, "b n t2 S"] | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None,
) -> OutLse:
    """Output and lse of one device's queries over the keys and values of all devices."""
    inputs = query, key, value, bias, traced, seed, score_mod
    out, lse = _by_parts(attention.core, static, *inputs)
    return out, lse


def _by_parts(
    compute: Callable[..., tuple[jax.Array | None, ...]],
    static: Static,
    query: Float[jax.Array, "B N t H"],
    key: Float[jax.Array, "B K s H"],
    value: Float[jax.Array, "B K s h"],
    bias: Float[jax.Array, "b n t2 S"] | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None,
) -> tuple[jax.Array, ...]:
    """Applies `compute`, which has the arguments of `attention.core`, to each of this device's
    `static.parts` contiguous ranges of queries, with the keys and values of all devices, and joins
    its results along the queries. Results that are None are left out."""
    k, v = (_gather(static, x, query.dtype) for x in (key, value))
    queries = common.split_parts(static, query)

    def part(x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array | None, ...]:
        rows, start = x
        tiling, config, conditions, part_seed, mod = common.pair_of_parts(
            static, rows, k, traced, seed, start, 0, score_mod
        )
        return compute(tiling, config, rows, k, v, bias, conditions, part_seed, mod)

    found = _map_parts(part, (queries, _starts(static)))
    return tuple(common.join_parts(x) for x in found if x is not None)


def _forward(
    static: Static,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None,
) -> tuple[OutLse, tuple[CoreInputs, Softmax]]:
    inputs = query, key, value, bias, traced, seed, score_mod
    softmax = Softmax(*_by_parts(attention.forward_for_gradient, static, *inputs))
    return (softmax.out, softmax.lse), (inputs, softmax)


def _backward(
    static: Static, saved: tuple[CoreInputs, Softmax], cotangents: OutLse
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None, None, Mod | None]:
    (query, key, value, bias, traced, seed, score_mod), softmax = saved
    k, v = (_gather(static, x, query.dtype) for x in (key, value))
    rows = tuple(common.split_parts(static, x) for x in (query, *softmax, *cotangents))

    def part(x: tuple[tuple[jax.Array, ...], jax.Array]) -> tuple[Any, ...]:
        (q, out, row_max, row_sum, d_out, d_lse), start = x
        tiling, config, conditions, part_seed, mod = common.pair_of_parts(
            static, q, k, traced, seed, start, 0, score_mod
        )
        inputs = q, k, v, bias, conditions, part_seed, mod
        saved = inputs, Softmax(out, row_max, row_sum)
        *found, _, _, d_mod = attention.core_backward(tiling, config, saved, (d_out, d_lse))
        return *found, () if d_mod is None else d_mod.floats

    dq, dk, dv, d_bias, floats = _map_parts(part, (rows, _starts(static)))
    dk, dv = (_scatter(static, x.sum(0)).astype(key.dtype) for x in (dk, dv))
    d_bias = None if d_bias is None else d_bias.sum(0)
    d_mod = cotangent(score_mod, tuple(x.sum(0) for x in floats))
    return common.join_parts(dq), dk, dv, d_bias, None, None, d_mod


_local.defvjp(_forward, _backward)


def _starts(static: Static) -> jax.Array:
    device = jax.lax.axis_index(static.axis)
    return jnp.stack([jnp.asarray(x) for x in static.starts(device, static.T)])


def _map_parts(function: Callable[[In], Out], parts: In) -> Out:
    """Computes `function` of each entry of `parts`, arrays with a common first axis, one after
    another, and stacks the results; a single entry needs no loop."""
    found: Out
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        found = function(jax.tree.map(lambda x: x[0], parts))
        return jax.tree.map(lambda x: x[None], found)  # type: ignore[no-any-return]
    found = jax.lax.map(function, parts)
    return found


def _gather(
    static: Static, x: Float[jax.Array, "B K s d"], dtype: np.dtype[np.floating]
) -> Float[jax.Array, "B K S d"]:
    """All-gathers keys or values, sorts them by position if they were in zig-zag order, and only then
    casts them to `dtype`."""
    x = jax.lax.all_gather(x, static.axis, axis=2, tiled=True)
    if static.zigzag:
        x = jnp.take(x, np.argsort(sharding.zigzag_order(static.S, static.devices)), axis=2)
    return x.astype(dtype)


def _scatter(static: Static, x: Float[jax.Array, "B K S d"]) -> Float[jax.Array, "B K s d"]:
    """Sums gradients of keys or values, sorted by position, over devices, and gives each device those
    of the positions that it holds, in their order there."""
    if static.zigzag:
        x = jnp.take(x, sharding.zigzag_order(static.S, static.devices), axis=2)
    scatter: Any = jax.lax.psum_scatter
    found: jax.Array = scatter(x, static.axis, scatter_dimension=2, tiled=True)
    return found
