"""Context parallelism by all-gather: each device gathers all keys and values for its queries.

One collective each way, and O(S) memory per device for one layer at a time: the backward pass
gathers again. Source: Llama Team, "The Llama 3 Herd of Models" (2024), section 3.3.2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import sharding
from jaxmha.implementations.base import Request, Result
from jaxmha.implementations.context_parallel import common
from jaxmha.implementations.context_parallel.common import Static
from jaxmha.implementations.tiled import attention
from jaxmha.implementations.tiled.block_mask import Pairs
from jaxmha.implementations.tiled.tile import Softmax


def supports(request: Request) -> str | None:
    """None, or the reason why not."""
    reason = common.declined(request)
    if reason is not None:
        return reason
    axes = sharding.current()
    dense = request.bias, request.mask.array
    if axes is not None and axes.zigzag and any(x is not None and x.shape[2] > 1 for x in dense):
        return "rows of biases and dense masks are not in zig-zag order: leave zigzag out"
    return None


def attend(request: Request) -> Result:
    """Computes the request; intermediates are float32, or float64 for float64 inputs."""
    found: Result = common.attend(request, _local)
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local(
    static: Static,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    traced: Pairs,
    words: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of one device's queries `B N t H` over the keys and values of all devices."""
    found = _of_parts(attention.core, static, query, key, value, bias, traced, words)
    return found[0], found[1]


def _of_parts(
    compute: Callable[..., Any],
    static: Static,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    traced: Pairs,
    words: Any,
) -> tuple[jax.Array, ...]:
    """`compute` on each part of one device's queries, with the gathered keys and values."""
    k, v = (_gather(static, x, query.dtype) for x in (key, value))
    queries = common.split_parts(static, query)

    def part(x: Any) -> Any:
        rows, start = x
        plan, rules, pairs, at = common.corner(static, rows, k, traced, words, start, 0)
        return compute(plan, rules, rows, k, v, bias, pairs, at)

    return tuple(map(common.join_parts, _each(part, (queries, _starts(static)))))


def _forward(static: Static, *arguments: Any) -> Any:
    found = Softmax(*_of_parts(attention.before_gradient, static, *arguments))
    return attention.shown(static.rules, found), (*arguments, found)


def _backward(static: Static, saved: Any, slopes: Any) -> tuple[Any, ...]:
    query, key, value, bias, traced, words, found = saved
    k, v = (_gather(static, x, query.dtype) for x in (key, value))
    rows = tuple(common.split_parts(static, x) for x in (query, *found, *slopes))

    def part(x: Any) -> Any:
        (q, out, row_max, row_sum, *slope), start = x
        plan, rules, pairs, at = common.corner(static, q, k, traced, words, start, 0)
        saved = q, k, v, bias, pairs, at, Softmax(out, row_max, row_sum)
        return attention.core_backward(plan, rules, saved, tuple(slope))[:4]

    dq, dk, dv, d_bias = _each(part, (rows, _starts(static)))
    dk, dv = (_scatter(static, x.sum(0)).astype(key.dtype) for x in (dk, dv))
    return common.join_parts(dq), dk, dv, None if d_bias is None else d_bias.sum(0), None, None


_local.defvjp(_forward, _backward)


def _starts(static: Static) -> jax.Array:
    here = jax.lax.axis_index(static.axis)
    return jnp.stack([jnp.asarray(x) for x in static.starts(here, static.T)])


def _each(function: Any, parts: Any) -> Any:
    """`function` of each part, one after another; a single part needs no loop."""
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        found = function(jax.tree.map(lambda x: x[0], parts))
        return jax.tree.map(lambda x: x[None], found)
    return jax.lax.map(function, parts)


def _gather(static: Static, x: jax.Array, dtype: Any) -> jax.Array:
    """All-gathers keys or values, in the order of true positions."""
    x = jax.lax.all_gather(x, static.axis, axis=2, tiled=True)
    if static.zigzag:
        x = jnp.take(x, np.argsort(sharding.zigzag_order(static.S, static.devices)), axis=2)
    return x.astype(dtype)


def _scatter(static: Static, x: jax.Array) -> jax.Array:
    """Reduce-scatters gradients of keys or values to the devices that hold these positions."""
    if static.zigzag:
        x = jnp.take(x, sharding.zigzag_order(static.S, static.devices), axis=2)
    scatter: Any = jax.lax.psum_scatter
    found: jax.Array = scatter(x, static.axis, scatter_dimension=2, tiled=True)
    return found
