"""Mask functions: `mask_mod(b, n, i, j)`, True where query i may attend key j."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Integer

from jaxmha.arrays import Array, reject_foreign, require_arrays
from jaxmha.implementations.mods import Limit, limits_of
from jaxmha.integers import comparable, is_integers, near, require_sizes
from jaxmha.mods.bound import Function, limited, with_arrays

Index: TypeAlias = jax.Array | int
# An integer of Python, NumPy or JAX.
Bound: TypeAlias = int | np.integer[Any] | jax.Array


def _bound(name: str, value: Any, axes: str = "") -> Any:
    """Clips an integer, or an array of integers, so that its sum with a position fits int32.

    Raises TypeError for other values, and ValueError for a shape that `axes` does not allow.
    """
    reject_foreign(name, value)
    if isinstance(value, bool) or not (isinstance(value, int) or is_integers(value)):
        found = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{name} must be an integer{' or integers' * bool(axes)}, got {found}")
    if np.ndim(value) > bool(axes):
        expected = f"one integer{f' or axes {axes}' * bool(axes)}"
        raise ValueError(f"{name}: expected {expected}, got shape {np.shape(value)}")
    one = isinstance(value, np.integer | np.ndarray) and np.ndim(value) == 0
    return near(int(value) if one else value)


def _functions(name: str, functions: tuple[Function, ...]) -> tuple[Function, ...]:
    """Returns the functions; TypeError if there are none, or one is not callable."""
    if not functions:
        raise TypeError(f"{name} takes at least one mask function, got none")
    for function in functions:
        if not callable(function):
            raise TypeError(f"{name} takes mask functions, got {type(function).__name__}")
    return functions


def causal(offset: Bound = 0) -> Function:
    """Allows `j <= i + offset`. If offset is not 0, `Mask.causal` is faster: it tests no pairs."""
    return with_arrays(_causal, _bound("offset", offset))


def _causal(offset: Any, b: Any, n: Any, i: Index, j: Index) -> jax.Array:
    return jnp.asarray(j <= i + offset)


def window(left: Bound, right: Bound) -> Function:
    """Allows `i - left <= j <= i + right`. `Mask.window` is faster: it evaluates no pair."""
    return with_arrays(_window, _bound("left", left), _bound("right", right))


def _window(left: Any, right: Any, b: Any, n: Any, i: Index, j: Index) -> jax.Array:
    return jnp.asarray((j >= i - left) & (j <= i + right))


def document(
    query_ids: Integer[Array, "*B T"], key_ids: Integer[Array, "*b S"] | None = None
) -> Function:
    """Packed documents: allows pairs with equal ids; ids may be in any order.

    Args:
      query_ids: `(T,)` or `(B, T)`, the document of each query.
      key_ids: `(S,)` or `(B, S)`; default `query_ids`.

    >>> import jax.numpy as jnp
    >>> mask_mod = document(jnp.asarray([0, 0, 1]))
    >>> bool(mask_mod(0, 0, 1, 0)), bool(mask_mod(0, 0, 2, 0))
    (True, False)
    """
    require_arrays(query_ids=query_ids)
    require_arrays(optional=True, key_ids=key_ids)
    ids = query_ids, query_ids if key_ids is None else key_ids
    for name, x in zip(("query_ids", "key_ids"), ids, strict=True):
        if x.ndim not in (1, 2) or not jnp.issubdtype(x.dtype, np.integer):
            raise ValueError(
                f"{name}: expected integers with axes (T,) or (B, T), got {x.dtype} of shape "
                f"{x.shape}"
            )
    return with_arrays(_document, *(jnp.asarray(x) for x in comparable(*ids)))


def _id_limits(rows: Any, keys: Any) -> Iterable[Limit]:
    for name, axis, x in (("query_ids", "T", rows), ("key_ids", "S", keys)):
        yield Limit(name, axis, x.shape[-1])
        if x.ndim == 2:
            yield Limit(name, "B", x.shape[0])


@limited(_id_limits)
def _document(rows: Any, keys: Any, b: Any, n: Any, i: Index, j: Index) -> jax.Array:
    one, other = (x[at] if x.ndim == 1 else x[b, at] for x, at in ((rows, i), (keys, j)))
    same: jax.Array = one == other
    return same


def prefix_lm(prefix: Bound | Integer[Array, "*B"]) -> Function:
    """Causal, except that every query also attends the first `prefix` keys.

    `prefix`: one number, or `(B,)`, one per batch row.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (2020), section 3.2.1.
    """
    most = _bound("prefix", prefix, "(B,)")
    return with_arrays(_prefix_lm, most)


@limited(lambda prefix: [Limit("prefix", "B", x) for x in np.shape(prefix)])
def _prefix_lm(prefix: Any, b: Any, n: Any, i: Index, j: Index) -> jax.Array:
    most = jnp.asarray(prefix)
    return jnp.asarray(j <= i) | (j < (most if most.ndim == 0 else most[b]))


def dilated(dilation: Bound, left: Bound, right: Bound = 0) -> Function:
    """Allows every `dilation`-th key of a window: up to `left` of them before the query and `right`
    after it.

    Source: Beltagy et al., "Longformer: The Long-Document Transformer" (2020), section 3.1.

    >>> [j for j in range(9) if bool(dilated(2, 2)(0, 0, 6, j))]
    [2, 4, 6]
    """
    given = {"dilation": dilation, "left": left, "right": right}
    bounds = [_bound(name, value) for name, value in given.items()]
    if isinstance(bounds[0], int) and bounds[0] < 1:
        raise ValueError(f"dilation must be at least 1, got {dilation}")
    return with_arrays(_dilated, *bounds)


def _dilated(dilation: Any, left: Any, right: Any, b: Any, n: Any, i: Index, j: Index) -> jax.Array:
    distance = jnp.asarray(j - i)
    steps = distance // dilation  # `left * dilation` might overflow
    found: jax.Array = (distance % dilation == 0) & (steps >= -left) & (steps <= right)
    return found


def block_sparse(layout: Bool[Array, "*N I J"], block: int | np.integer[Any]) -> Function:
    """Allows the blocks of pairs that are True in `layout`.

    Args:
      layout: `(I, J)`, I blocks of queries and J blocks of keys; or `(N, I, J)`, one per head.
      block: number of queries, and of keys, in a block.

    Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences" (2020), appendix D.
    """
    require_arrays(layout=layout)
    if layout.ndim not in (2, 3) or layout.dtype != np.bool_:
        raise ValueError(
            f"layout: expected Booleans with axes (I, J) or (N, I, J), got {layout.dtype} of shape "
            f"{layout.shape}"
        )
    require_sizes(block=block)
    return with_arrays(_BlockSparse(near(int(block))), jnp.asarray(layout))


@dataclass(frozen=True)
class _BlockSparse:
    block: int

    def limits(self, layout: jax.Array) -> Iterable[Limit]:
        """The sizes that the axes of a call may have, given the layout."""
        yield Limit("layout", "T", layout.shape[-2] * self.block)
        yield Limit("layout", "S", layout.shape[-1] * self.block)
        if layout.ndim == 3:
            yield Limit("layout", "N", layout.shape[0])

    def __call__(self, layout: jax.Array, _: Any, n: Any, i: Index, j: Index) -> jax.Array:
        at = i // self.block, j // self.block
        return layout[at] if layout.ndim == 2 else layout[n, *at]


def all_of(*functions: Function) -> Function:
    """Allows the pairs that every function allows.

    >>> both = all_of(causal(), window(1, 1))
    >>> [j for j in range(5) if bool(both(0, 0, 3, j))]
    [2, 3]
    """
    return with_arrays(_all_of, _functions("all_of", functions))


@limited(lambda functions: [x for f in functions for x in limits_of(f)])
def _all_of(functions: tuple[Function, ...], *pair: Any) -> jax.Array:
    return reduce(jnp.logical_and, (jnp.asarray(function(*pair)) for function in functions))


def any_of(*functions: Function) -> Function:
    """Allows the pairs that at least one function allows."""
    return with_arrays(_any_of, _functions("any_of", functions))


@limited(lambda functions: [x for f in functions for x in limits_of(f)])
def _any_of(functions: tuple[Function, ...], *pair: Any) -> jax.Array:
    return reduce(jnp.logical_or, (jnp.asarray(function(*pair)) for function in functions))
