"""cuDNN's fused attention under key padding without bounds; valid keys may be at any positions.

`in_place` reads keys and values in place: cuDNN's paged attention runs with pages of one position
each, and its table lists the valid positions. That kernel has no gradient, so that a call with a
gradient copies the valid keys to the front. `valid_first` does so without a gradient too, for
callers to whom `unsupported_reason` or the kernel's probe declines `in_place`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Int32, Shaped

from jaxmha.implementations import partitioned
from jaxmha.implementations.base import Request
from jaxmha.implementations.fused import adapter, cudnn_kernel, cudnn_packed
from jaxmha.implementations.fused.cudnn_kernel import Settings, folding

NAME = "cudnn, keys in place"

# With more queries per key head than this, valid keys are copied to the front: cuDNN's kernel for
# pages of one position does not use Hopper's instructions. At this number reading in place should
# take about as long as copying, by cuDNN's list of kernels and the bytes of the copies; not
# measured.
MOST_QUERIES = 2048
Pull: TypeAlias = Callable[[jax.Array], tuple[jax.Array, ...]]
# Numbers of valid queries and of valid keys of each batch row.
Counts: TypeAlias = tuple[Int32[jax.Array, "B"], Int32[jax.Array, "B"]]


def unsupported_reason(request: Request) -> str | None:
    """Returns None if `in_place` can compute a request that cuDNN supports, else the reason why its
    valid keys and values are copied."""
    (_, T, N, H), (_, S, K, h) = request.query.shape, request.value.shape
    if adapter.diagonals(request.mask, T, S) != (None, None):
        return "keys that are sorted are neither causal nor in a window"
    if request.mask.key_value_padding is None or request.return_lse:
        return "it takes padding of keys, and returns no log-sum-exp"
    if request.bias is not None or request.mask.array is not None:
        return "it takes no bias and no dense mask"
    if h != H or H % 8:
        return f"keys and values must have the same multiple of 8 features, got {H} and {h}"
    if T * N > MOST_QUERIES * K:
        return f"copies cost less from {MOST_QUERIES} queries per key head on"
    return cudnn_packed.unknown()


def counts(valid: Bool[jax.Array, "B S"], queries: Int32[jax.Array, "B"] | None, T: int) -> Counts:
    """Numbers of valid queries and keys of each batch row; 0 queries if no key is valid.

    `valid`: True for valid keys. `queries`: lengths of the queries; None: all T are valid.
    """
    some = jnp.where(valid, np.int32(T), np.int32(0)).max(1)
    some = some if queries is None else jnp.minimum(queries, some)
    return some, valid.sum(1, dtype=np.int32)


def valid_first(
    arrays: tuple[jax.Array, jax.Array], valid: Bool[jax.Array, "B S"]
) -> tuple[jax.Array, jax.Array]:
    """Moves the valid positions of keys and values to the front, in their order, so that a length
    excludes the others."""
    order = jnp.argsort(~valid, axis=1, stable=True)
    key, value = (_permuted(x, order) for x in arrays)
    return key, value


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_place(
    settings: Settings,
    query: Float[jax.Array, "B T N H"],
    key: Float[jax.Array, "B S K H"],
    value: Float[jax.Array, "B S K H"],
    valid: Bool[jax.Array, "B S"],
    counts: Counts,
) -> Float[jax.Array, "B T N H"]:
    """The output over the keys where `valid` is True, without bounds. Keys and values are copied
    only if a gradient is computed. `counts`: the result of the function of that name."""

    def call(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        valid: jax.Array,
        rows: jax.Array,
        keys: jax.Array,
    ) -> tuple[jax.Array]:
        from jax._src.cudnn import fused_attention_stablehlo as private

        B, S = valid.shape
        pages = (x.reshape(B * S, 1, *x.shape[2:]) for x in (key, value))
        table = _table(valid)[:, None, :, None]
        unused = jnp.zeros(0, query.dtype)
        primitive: Any = private._dot_product_attention_fwd_p
        found = primitive.bind(
            query, *pages, unused, rows, keys, unused, unused, table, table,
            **cudnn_packed.static(settings), is_training=False,
        )  # fmt: skip
        return (found[0],)

    # Each device computes its own table: it counts the positions of its own batch rows.
    letters = "b.n.", "b.k.", "b.k.", "b.", "b", "b"
    operands = query, key, value, valid, *counts
    (found,) = partitioned.run(folding(call), operands, letters, lambda _: ("b.n.",))
    out: jax.Array = found
    return out


def _save(
    settings: Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    valid: jax.Array,
    counts: Counts,
) -> tuple[jax.Array, Pull]:
    def copied(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        arrays = valid_first((key, value), valid)
        return cudnn_kernel.out(settings, query, *arrays, None, counts)

    found, pull = jax.vjp(copied, query, key, value)
    return found, pull


in_place.defvjp(_save, lambda settings, pull, d_out: (*pull(d_out), None, None))


def _table(valid: Bool[jax.Array, "B S"]) -> Int32[jax.Array, "B S"]:
    """The valid positions of each batch row, in order, as indices into all positions of the batch.

    The last valid one fills the remaining entries, so that a tile that reads these reads no invalid
    key. Rows without valid keys list their position 0, which is not read since no query is valid.
    """
    B, S = valid.shape
    positions = jnp.arange(S, dtype=np.int32)[None]
    last = jnp.where(valid, positions, np.int32(0)).max(1, keepdims=True)
    first = np.int32(S) * jnp.arange(B, dtype=np.int32)[:, None]
    return jnp.sort(first + jnp.where(valid, positions, last), axis=1, stable=False)


@jax.custom_vjp
def _permuted(x: Shaped[jax.Array, "B S *rest"], order: Int[jax.Array, "B S"]) -> jax.Array:
    """Permutes axis 1 of each batch row by `order`. Its gradient is a gather too; that of
    `take_along_axis` would be a scatter."""
    return _gather(x, order)


def _gather(x: Shaped[jax.Array, "B S *rest"], order: Int[jax.Array, "B S"]) -> jax.Array:
    index = order.reshape(order.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, 1, mode="promise_in_bounds")


def _permuted_backward(order: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return _gather(cotangent, jnp.argsort(order, axis=1)), None


_permuted.defvjp(lambda x, order: (_gather(x, order), order), _permuted_backward)
