"""Attention of few queries over many keys, as in decoding, by matmuls over all heads at once.

Matmuls per head would first transpose keys and values, which costs more than the matmuls. Here each
query is zero-padded over the other key/value heads, its weights are multiplied by the values of all
heads, and the output of its own head is selected.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxmha.implementations import reference
from jaxmha.implementations.base import Request, Result
from jaxmha.matmul import matmul
from jaxmha.semantics import Precision

# Crossover points, by measurement: up to MOST_ROWS rows (T*N) the matmul over all heads is
# memory-bound even with K times the necessary FLOPs, and from LEAST_KEYS keys on it saves enough
# time to be worth a program of its own.
MOST_ROWS = 32
LEAST_KEYS = 64

# Arrays of a request -> the request; its static fields are captured.
Rebuild: TypeAlias = Callable[[Sequence[Any]], Request]


def unsupported_reason(request: Request) -> str | None:
    """Returns None if this implementation supports the request, else the reason why not."""
    (_, T, N, _), S = request.query.shape, request.key.shape[1]
    if not all(isinstance(size, int) for size in (*request.query.shape, *request.value.shape)):
        return "sizes must be known"
    if not N:
        return "there are no query heads"
    if T * N > MOST_ROWS:
        return f"T*N = {T * N} queries of all heads are more than {MOST_ROWS}"
    if S < LEAST_KEYS:
        return f"S = {S} keys are less than {LEAST_KEYS}"
    return None


def attend(request: Request) -> Result:
    """Computes the request. Intermediates are float32, or float64 for float64 queries; the logits and
    their exponentials are in `softmax_dtype` if that is given."""
    leaves, tree = jax.tree.flatten(request)
    arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]
    static = [None if isinstance(x, jax.Array | np.ndarray) else x for x in leaves]

    def rebuild(arrays: Sequence[Any]) -> Request:
        rest = iter(arrays)
        found: Request = jax.tree.unflatten(tree, [next(rest) if x is None else x for x in static])
        return found

    return _attend(rebuild, arrays)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(rebuild: Rebuild, arrays: Sequence[Any]) -> Result:
    request = rebuild(arrays)
    if request.mask.empty and request.bias is None:
        return _all_heads(request)
    return _masked(request)


@_attend.defjvp
def _jvp(
    rebuild: Rebuild, primals: tuple[list[Any]], tangents: tuple[list[Any]]
) -> tuple[Result, Result]:
    """Computes results and tangents by `reference`, without the matmuls over all heads.

    Gradients of those would carry NaN from one head into others (0 * NaN). `reference` computes the
    gradient of the keys head by head, which is as fast.
    """
    return jax.jvp(lambda arrays: reference.attend(rebuild(arrays)), primals, tangents)


def _masked(request: Request) -> Result:
    """Computes a masked request without zeroing unattended keys and values, which would copy them
    all; if the sum of the logits or the output is then not finite, computes it with zeroing."""
    finite: list[jax.Array] = []

    def query_key(query: jax.Array, key: jax.Array, precision: Precision) -> jax.Array:
        logits = _query_key(query, key, precision)
        finite.append(jnp.isfinite(logits.sum()))
        return logits

    def weights_value(weights: jax.Array, value: jax.Array, precision: Precision) -> jax.Array:
        out = _weights_value(weights, value, precision)
        # Not of `out.sum()`, which XLA would split into a sum per head.
        finite.append(jnp.isfinite(out).all())
        return out

    matmuls = reference.Matmuls(query_key, weights_value)
    quick = reference.attend(request, matmuls, all_finite=True)
    result: Result = jax.lax.cond(
        _all(finite[0] & finite[1]), lambda: quick, lambda: _all_heads(request)
    )
    return result


def _all_heads(request: Request) -> Result:
    """Computes the request with matmuls over all heads. If the lse has NaN and K is above 1, computes
    it again with logits head by head: a non-finite key may have reached the logits of other heads,
    as 0 * inf. A score function may turn NaN into a number, so the logits before it are checked too."""
    leaked: list[jax.Array] = []

    def query_key(query: jax.Array, key: jax.Array, precision: Precision) -> jax.Array:
        logits = _query_key(query, key, precision)
        if request.score_mod is not None:
            leaked.append(jnp.isnan(logits).any())
        return logits

    result = reference.attend(request, reference.Matmuls(query_key, _weights_value))
    if request.key.shape[2] == 1:
        return result
    assert result.lse is not None
    none = ~jnp.isnan(result.lse).any()
    for x in leaked:
        none &= ~x
    found: Result = jax.lax.cond(
        _all(none),
        lambda: result,
        lambda: reference.attend(request, EACH_HEAD),
    )
    return found


@jax.custom_batching.custom_vmap
def _all(x: Bool[jax.Array, "..."]) -> Bool[jax.Array, ""]:
    """`x.all()` over all axes and those of `jax.vmap`: with a batched predicate, `cond` would run
    both branches."""
    return x.all()


@_all.def_vmap
def _all_of_batch(_: int, __: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return _all(x), False


def _query_key(
    query: Float[jax.Array, "B T N H"], key: Float[jax.Array, "B S K H"], precision: Precision
) -> Float[jax.Array, "B N T S"]:
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    own = jnp.repeat(jnp.eye(K, dtype=bool), N // K, 1)  # axes K N
    columns = jnp.where(
        own.reshape(1, K, 1, N, 1), jnp.transpose(query, (0, 3, 2, 1))[:, None], 0.0
    )  # axes B K H N T
    columns = columns.reshape(B, K * H, N * T)
    logits = matmul(key.reshape(B, S, K * H), columns, precision=precision)
    # The barrier keeps XLA from fusing matmul and transpose, which is several times slower.
    logits = jax.lax.optimization_barrier(logits)  # type: ignore[no-untyped-call]
    return jnp.swapaxes(logits, 1, 2).reshape(B, N, T, S)


def _query_key_by_head(
    query: Float[jax.Array, "B T N H"], key: Float[jax.Array, "B S K H"], precision: Precision
) -> Float[jax.Array, "B N T S"]:
    """Multiplies queries and keys, one key head at a time: XLA allocates memory for both branches of
    the `cond` in `_all_heads`, and a transposed copy of all keys would take memory even if it is
    never made."""
    (B, T, N, _), (S, K) = query.shape, key.shape[1:3]

    def head(k: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(query, k * (N // K), N // K, 2)
        keys = jax.lax.dynamic_slice_in_dim(key, k, 1, 2)
        return reference.HEAD_BY_HEAD.query_key(rows, keys, precision)

    return jnp.moveaxis(jax.lax.map(head, jnp.arange(K)), 0, 1).reshape(B, N, T, S)


def _weights_value(
    weights: Float[jax.Array, "B N T S"], value: Float[jax.Array, "B S K h"], precision: Precision
) -> Float[jax.Array, "B T N h"]:
    (B, N, T, S), (K, h) = weights.shape, value.shape[2:]
    out = matmul(weights.reshape(B, N * T, S), value.reshape(B, S, K * h), precision=precision)
    heads = out.reshape(B, N, T, K, h)
    own = [heads[:, n, :, n // (N // K)] for n in range(N)]  # N arrays with axes B T h
    return jnp.stack(own, 2)


EACH_HEAD = reference.Matmuls(_query_key_by_head, _weights_value)
