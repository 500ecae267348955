"""Recognises mask functions that a `Mask` can express: causal masks, and documents as segment ids.

A `Mask` needs no memory per pair and no evaluation, and more implementations support it. The jaxpr
of a function is compared with the jaxprs of the usual ways to write such a condition.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations import jaxpr_equality
from jaxmha.implementations.mods import MASK, Mod
from jaxmha.mask import Mask

Pair = Callable[..., Any]


class _Form(NamedTuple):
    """One known way to write a mask function: `function(*arrays, b, n, i, j)`, of captured arrays.

    `documents`: whether it compares ids of documents. `causal`: whether it requires `j <= i`.
    """

    function: Pair
    documents: bool
    causal: bool


def as_structure(
    mask: Mask, mod: Mod | None, shape: tuple[int, ...], S: int
) -> tuple[Mask, Mod | None]:
    """Moves the condition of the mask function `mod` into `mask`, and returns (mask, None).

    Returns both unchanged if `mod` is not recognised, captures floating arrays or ids that do not
    fit the sizes, or was shifted to a part of a larger request; if a size is symbolic; or if `mask`
    already has segment ids. `shape`: of the queries, `B T N H`. `S`: the number of keys.
    """
    B, T, *_ = shape
    if mod is None or mod.starts is not None or mod.floats or mask.query_segments is not None:
        return mask, mod
    if not all(isinstance(size, int) for size in (B, T, S)):  # symbolic sizes of an export
        return mask, mod
    least = (max(T, S),) if len(mod.others) == 1 else (T, S)
    fit = all(_fits(x, B, size) for x, size in zip(mod.others, least, strict=False))
    if len(mod.others) > 2 or not fit:
        return mask, mod
    for form in _forms(tuple(x.ndim for x in mod.others)):
        if not jaxpr_equality.equal(_traced(form.function, mod.others), mod.program.jaxpr):
            continue
        if form.causal:
            mask &= Mask.causal()
        if form.documents:
            rows, keys = mod.others[0], mod.others[-1]
            mask &= Mask.segments(query_ids=_ids(rows, B, T), key_value_ids=_ids(keys, B, S))
        return mask, None
    return mask, mod


def _fits(ids: jax.Array, B: int, size: int) -> bool:
    """True for integer ids that fit int32 and cover `size` positions, in one row or in B rows. JAX
    clamps indices beyond an array, so that a function with fewer ids has a meaning which
    `Mask.segments` cannot express."""
    if ids.ndim not in (1, 2) or not jnp.issubdtype(ids.dtype, np.integer):
        return False
    rows = ids.shape[0] if ids.ndim == 2 else 1
    return (
        ids.dtype.itemsize + (ids.dtype.kind == "u") <= 4
        and ids.shape[-1] >= size
        and rows in (1, B)
    )


def _ids(ids: jax.Array, B: int, size: int) -> jax.Array:
    rows = ids.reshape(-1, ids.shape[-1])[:, :size].astype(np.int32)
    return jnp.broadcast_to(rows, (B, size))


def _forms(ranks: tuple[int, ...]) -> Iterator[_Form]:
    """The known ways to write a mask function that captures arrays of these ranks: causal without
    arrays, else equal ids of documents, with or without a causal mask."""
    orders: list[Pair] = [lambda i, j: i >= j, lambda i, j: j <= i, lambda i, j: j <= i + 0]
    if not ranks:
        for order in orders:
            yield _Form(lambda b, n, i, j, order=order: order(i, j), False, True)
        return
    if len(set(ranks)) > 1:
        return
    by_row = ranks[0] == 2

    def equal(arrays: tuple[jax.Array, ...], b: Any, i: Any, j: Any) -> Any:
        rows, keys = arrays[0], arrays[-1]
        return rows[b, i] == keys[b, j] if by_row else rows[i] == keys[j]

    def form(join: Pair | None, order: Pair | None, first: bool = False) -> _Form:
        def function(*given: Any) -> Any:
            *arrays, b, _, i, j = given
            if join is None or order is None:
                return equal(tuple(arrays), b, i, j)
            if first:
                return join(order(i, j), equal(tuple(arrays), b, i, j))
            return join(equal(tuple(arrays), b, i, j), order(i, j))

        return _Form(function, True, order is not None)

    yield form(None, None)
    for join in (lambda x, y: x & y, jnp.logical_and):
        yield from (form(join, order, first) for order in orders for first in (False, True))


def _traced(function: Pair, arrays: tuple[jax.Array, ...]) -> Any:
    """The jaxpr of a known `function`, with `arrays` as captured constants, for comparison with
    that of the user's function."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]  # type: ignore[no-untyped-call]
    scalar = jax.ShapeDtypeStruct((), np.dtype(np.int32))  # type: ignore[no-untyped-call]
    found = jax.make_jaxpr(function)(*shapes, *[scalar] * len(MASK)).jaxpr
    count = len(arrays)
    return found.replace(
        constvars=found.invars[:count], invars=found.invars[count:], debug_info=found.debug_info
    )
