"""Which pairs of query and key may attend, kept as structure."""

from dataclasses import dataclass, fields, replace
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jaxmha import picture
from jaxmha.arrays import Array


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class Mask:
    """Pairs (query i, key j) that may attend: a record of conditions that all have to hold.

    Build one with the constructors below and join with `&`. Structure is kept, not
    materialised, so that an implementation can skip work; `to_array` materialises it, and
    `print` shows it as a picture.

    >>> mask = Mask.causal() & Mask.lengths(key_value=np.array([3, 1]))
    >>> mask.to_array(2, 3).astype(int).tolist()
    [[[[1, 0, 0], [1, 1, 0]]], [[[1, 0, 0], [1, 0, 0]]]]
    """

    causal_offset: int | np.integer[Any] | Array | None = None
    window_size: tuple[int | None, int | None] | None = None
    query_lengths: Array | None = None
    key_value_lengths: Array | None = None
    query_padding: Array | None = None
    key_value_padding: Array | None = None
    query_segments: Array | None = None
    key_value_segments: Array | None = None
    array: Array | None = None

    @classmethod
    def causal(cls, offset: int | np.integer[Any] | Int[Array, "*B"] = 0) -> "Mask":
        """`j <= i + offset`: 0 is top-left, S - T bottom-right; an array has one per batch row."""
        known = isinstance(offset, int | np.integer | np.ndarray)
        return cls(causal_offset=near(offset) if known else offset)

    @classmethod
    def window(cls, left: int | None, right: int | None) -> "Mask":
        """`i - left <= j <= i + right`; None: no bound on that side."""
        for side in (left, right):
            if side is not None and (isinstance(side, bool) or not hasattr(side, "__index__")):
                raise TypeError(f"window sides must be integers or None, got ({left}, {right})")
            if side is not None and side < 0:
                raise ValueError(f"window sides must be >= 0 or None, got ({left}, {right})")
        left, right = (None if side is None else near(index(side)) for side in (left, right))
        return cls(window_size=(left, right))

    @classmethod
    def lengths(
        cls, query: Int[Array, "*B"] | None = None, key_value: Int[Array, "*B"] | None = None
    ) -> "Mask":
        """The first `query` rows and the first `key_value` keys of each batch row, `(B,)`."""
        return cls(query_lengths=query, key_value_lengths=key_value)

    @classmethod
    def padding(
        cls, query: Bool[Array, "*B T"] | None = None, key_value: Bool[Array, "*B S"] | None = None
    ) -> "Mask":
        """Any pattern of positions that are there (True), `(B, T)` and `(B, S)`."""
        return cls(query_padding=query, key_value_padding=key_value)

    @classmethod
    def segments(cls, query_ids: Int[Array, "*B T"], key_value_ids: Int[Array, "*B S"]) -> "Mask":
        """Pairs of equal ids, `(B, T)` and `(B, S)`: packed sequences."""
        return cls(query_segments=query_ids, key_value_segments=key_value_ids)

    @classmethod
    def dense(cls, array: Bool[Array, "..."]) -> "Mask":
        """A Boolean array broadcastable to BNTS, True = attend."""
        if getattr(array, "dtype", None) is None:
            raise TypeError(
                f"mask must be a Boolean array or a Mask, got {type(array).__name__}: make it an "
                "array with np.asarray(mask, bool)"
            )
        if array.dtype != np.bool_:
            raise TypeError(
                f"mask must be Boolean (True = attend), got {array.dtype}: additive values belong "
                "in bias=, and a 0/1 array becomes a mask by `mask != 0`"
            )
        return cls(array=array)

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        # Two pairs of segment ids cannot be one pair: the second becomes an array.
        if self.query_segments is not None and other.query_segments is not None:
            ids = other.query_segments, other.key_value_segments
            same = _same_segment(*ids, _library(*ids))
            other = replace(other, query_segments=None, key_value_segments=None) & Mask(array=same)
        return Mask(
            *(
                b if a is None else a if b is None else _MEET[field.name](a, b)
                for field in fields(Mask)
                for a, b in [(getattr(self, field.name), getattr(other, field.name))]
            )
        )

    def __repr__(self) -> str:
        return picture.describe(self)

    def __str__(self) -> str:
        return picture.picture(self)

    @property
    def empty(self) -> bool:
        """Whether there is no condition at all."""
        return all(getattr(self, field.name) is None for field in fields(self))

    def to_array(self, T: int, S: int, xp: Any = jnp) -> Bool[Array, "#B #N T S"]:
        """Materialises the mask, broadcastable to BNTS, by `jax.numpy` or by `numpy`."""
        i, j = xp.arange(T).reshape(1, 1, T, 1), xp.arange(S).reshape(1, 1, 1, S)
        allowed: Array = xp.ones((1, 1, T, S), bool)
        if self.causal_offset is not None:
            allowed = allowed & (j <= i + _over_rows(near(self.causal_offset), i, xp))
        left, right = self.window_size or (None, None)
        if left is not None:
            allowed = allowed & (j >= i - left)
        if right is not None:
            allowed = allowed & (j <= i + right)
        for lengths, position in ((self.query_lengths, i), (self.key_value_lengths, j)):
            if lengths is not None:
                allowed = allowed & (position < _over_rows(lengths, i, xp))
        if self.query_padding is not None:
            allowed = allowed & xp.asarray(self.query_padding)[..., None, :, None]
        if self.key_value_padding is not None:
            allowed = allowed & xp.asarray(self.key_value_padding)[..., None, None, :]
        if self.query_segments is not None:
            allowed = allowed & _same_segment(self.query_segments, self.key_value_segments, xp)
        if self.array is not None:
            array = xp.asarray(self.array)
            allowed = allowed & array.reshape((1,) * (4 - array.ndim) + array.shape)
        return allowed

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Python integers shape the program, so they are static; arrays are traced."""
        offset, window, *arrays = (getattr(self, name) for name in _FIELDS)
        static = type(offset) is int
        return (None if static else offset, *arrays), (offset if static else None, window)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], traced: tuple[Any, ...]) -> "Mask":
        (static_offset, window), (offset, *arrays) = static, traced
        return cls(offset if static_offset is None else static_offset, window, *arrays)


# Further than any position; its sum with one is a number of 32 bits.
FAR = 2**30


def near(bound: Any) -> Any:
    """A bound, or an array of them, no further than any position is; its dtype stays."""
    if isinstance(bound, int):
        return max(-FAR, min(bound, FAR))
    limits = np.iinfo(bound.dtype)
    if limits.max <= FAR:
        return bound
    return _library(bound).clip(bound, max(-FAR, int(limits.min)), FAR)


_FIELDS = tuple(field.name for field in fields(Mask))  # the static ones first


def _over_rows(per_batch: Any, like: Any, xp: Any) -> Any:
    return xp.reshape(xp.asarray(per_batch).astype(like.dtype), (-1, 1, 1, 1))


def _same_segment(query_ids: Any, key_value_ids: Any, xp: Any) -> Any:
    return (
        xp.asarray(query_ids)[..., None, :, None] == xp.asarray(key_value_ids)[..., None, None, :]
    )


def _smaller(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    xp = _library(a, b)
    return xp.minimum(xp.asarray(a), xp.asarray(b))


def _narrower(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    left, right = (
        y if x is None else x if y is None else min(x, y) for x, y in zip(a, b, strict=True)
    )
    return left, right


def _both(a: Any, b: Any) -> Any:
    rank, xp = max(a.ndim, b.ndim), _library(a, b)
    a, b = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (a, b))
    return xp.logical_and(a, b)


def _library(*arrays: Any) -> Any:
    """NumPy stays NumPy, so that converters need no device."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


# How two conditions of one kind become one that holds where both do.
_MEET: dict[str, Any] = {
    "causal_offset": _smaller,
    "window_size": _narrower,
    "query_lengths": _smaller,
    "key_value_lengths": _smaller,
    "query_padding": _both,
    "key_value_padding": _both,
    "array": _both,
}
