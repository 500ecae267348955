"""`Mask`: the pairs of query and key that may attend, stored as structured conditions."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from types import ModuleType
from typing import Any, ClassVar, Concatenate, NoReturn, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Integer

from jaxmha import mask_repr, notebook, segment_runs
from jaxmha.arrays import Array, lacks_values, mask_hint, reject_foreign, shapes_too
from jaxmha.integers import comparable, library, narrow, near, require_integers, require_sizes
from jaxmha.mask_checks import require_axes, require_booleans, require_lengths, side
from jaxmha.mask_intersection import INTERSECTION

P = ParamSpec("P")


def _by_keyword(
    make: Callable[Concatenate[type["Mask"], P], "Mask"],
) -> Callable[Concatenate[type["Mask"], P], "Mask"]:
    """Wraps a constructor to reject positional arguments with a message that names the keywords."""
    query, key_value = list(make.__annotations__)[:2]

    @wraps(make)
    def made(cls: type["Mask"], /, *by_position: P.args, **named: P.kwargs) -> "Mask":
        if by_position:
            raise TypeError(
                f"Mask.{make.__name__} takes no positional argument: the first would mean the "
                f"queries, and leave the padding of keys visible. By name, give {key_value}= "
                f"(keys and values), {query}=, or both"
            )
        return make(cls, **named)  # type: ignore[call-arg]

    return made


_LENGTHS = ("query_lengths", "key_value_lengths")
_BOOLEANS = ("query_padding", "key_value_padding", "array")
# Fields that together are one condition: a query attends keys of its own segment.
_SEGMENTS = ("query_segments", "key_value_segments", "packed_ends")


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class Mask:
    """Pairs (query i, key j) that may attend: a record of conditions, all of which must hold.

    Build masks with the constructors below and join them with `&`, also with a Boolean array.
    Conditions are not materialised, so that an implementation can skip work; `to_array`
    materialises them, and `print` shows them as a picture.

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
    packed_ends: Array | None = None
    array: Array | None = None

    # True if a pytree operation has put a Python integer in the place of an array of offsets: it
    # stays a leaf, as the structure of the tree says.
    _offset_is_leaf: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Checks types; clips offsets and lengths to int32, since JAX would truncate int64."""
        offset, window = self.causal_offset, self.window_size
        if isinstance(offset, bool) or not isinstance(offset, int):
            kind = "an integer or an integer array"
            require_integers(kind, optional=True, causal_offset=offset)
        # Only given fields are checked, to save time: an eager call makes several masks.
        given = {name: x for name in FIELDS[2:] if (x := getattr(self, name)) is not None}
        for name, x in given.items():
            if name in _BOOLEANS:
                require_booleans(**{name: x})
            else:
                require_integers("an integer array", **{name: x})
        changed: dict[str, Any] = {
            "causal_offset": near(offset) if isinstance(offset, int) else narrow(offset)
        }
        changed |= {name: narrow(given[name]) for name in _LENGTHS if name in given}
        if window is not None:
            if not isinstance(window, tuple) or len(window) != 2:
                raise TypeError(f"window_size must be a pair (left, right), got {window!r}")
            left, right = (near(side(x, window)) for x in window)
            changed["window_size"] = left, right
        if "query_segments" in given:
            ids = comparable(self.query_segments, self.key_value_segments)
            changed["query_segments"], changed["key_value_segments"] = ids
        for name, value in changed.items():
            object.__setattr__(self, name, value)

    @classmethod
    def causal(cls, offset: int | np.integer[Any] | Integer[Array, "*B"] = 0) -> "Mask":
        """`j <= i + offset`: 0 is top-left, S - T bottom-right; an array has `(B,)` offsets."""
        if isinstance(offset, bool) or not isinstance(offset, int):
            require_integers("an integer or an integer array", offset=offset)
        return cls(causal_offset=offset)

    @classmethod
    def window(cls, left: int | None, right: int | None) -> "Mask":
        """`i - left <= j <= i + right`; None: no such bound."""
        return cls(window_size=(left, right))

    @classmethod
    @_by_keyword
    def lengths(
        cls,
        *,
        query: Integer[Array, "*B"] | None = None,
        key_value: Integer[Array, "*B"] | None = None,
    ) -> "Mask":
        """Valid positions of each batch row: the first `query` queries and `key_value` keys.

        Lengths below 0 mean 0, and lengths beyond the axis mean all of it: they are clipped to
        `[0, T]` and `[0, S]`. `jaxmha.converters.lint_masks` reports them.

        Args:
          query: `(B,)`, number of valid queries; outputs beyond are 0.
          key_value: `(B,)`, number of valid keys and values, as of a padded batch.

        >>> Mask.lengths(key_value=np.array([3, 1])).to_array(1, 4, np).astype(int).tolist()
        [[[[1, 1, 1, 0]]], [[[1, 0, 0, 0]]]]
        """
        require_lengths(query=query, key_value=key_value)
        return cls(query_lengths=query, key_value_lengths=key_value)

    @classmethod
    @_by_keyword
    def padding(
        cls,
        *,
        query: Bool[Array, "*B T"] | None = None,
        key_value: Bool[Array, "*B S"] | None = None,
    ) -> "Mask":
        """Valid positions (True) in any pattern.

        Args:
          query: `(B, T)`, valid queries.
          key_value: `(B, S)`, valid keys and values; from a tokenizer's `attention_mask`, give
            `attention_mask != 0`. A cache does not keep it: `prefill` of prompts that are padded on
            the right takes `Mask.lengths`.

        >>> attention_mask = np.array([[1, 1, 0]])
        >>> Mask.padding(key_value=attention_mask != 0).to_array(1, 3, np).astype(int).tolist()
        [[[[1, 1, 0]]]]
        """
        require_booleans(query=query, key_value=key_value)
        require_axes("(*B, T)", query=query)
        require_axes("(*B, S)", key_value=key_value)
        return cls(query_padding=query, key_value_padding=key_value)

    @classmethod
    @_by_keyword
    def segments(
        cls,
        *,
        query_ids: Integer[Array, "*B T"],
        key_value_ids: Integer[Array, "*B S"],
        max_segments: int | None = None,
    ) -> "Mask":
        """Packed sequences: only pairs with equal ids attend.

        Kernels for packed sequences need each id in one run of positions. This is checked for NumPy
        arrays; for JAX arrays, `max_segments` promises it.

        Args:
          query_ids: `(B, T)`, the sequence of each query. Without x64, `jax.jit` truncates 64-bit
            ids among its arguments to 32 bits, before this function receives them.
          key_value_ids: `(B, S)`, the sequence of each key; the same array where T is S.
          max_segments: promises that both arrays are the same, that each id fills one run, and that
            a row has at most `max_segments` runs. A broken promise gives wrong results.

        >>> ids = np.array([[0, 0, 1]])
        >>> Mask.segments(query_ids=ids, key_value_ids=ids).to_array(3, 3, np).astype(int).tolist()
        [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]
        """
        require_integers("an integer array", query_ids=query_ids, key_value_ids=key_value_ids)
        require_axes("(*B, T)", query_ids=query_ids)
        require_axes("(*B, S)", key_value_ids=key_value_ids)
        ends = segment_runs.ends_of_runs(query_ids, key_value_ids, max_segments)
        return cls(query_segments=query_ids, key_value_segments=key_value_ids, packed_ends=ends)

    @classmethod
    def packed(cls, lengths: Integer[Array, "*B M"], *, size: int) -> "Mask":
        """Packed sequences, given by their lengths in order; each attends only itself.

        Allows the same pairs as `segments`; kernels for packed sequences need no `max_segments`.

        Args:
          lengths: `(*B, M)`, the length of each sequence; 0 in rows with fewer than M. Positions
            after the last sequence form one more sequence.
          size: T, which must be S.

        >>> Mask.packed(np.array([[2, 1]]), size=4).query_segments.tolist()
        [[0, 0, 1, 2]]
        """
        require_integers("an integer array", lengths=lengths)
        require_sizes(least=0, size=size)
        require_axes("(*B, M)", lengths=lengths)
        ids, ends = shapes_too(partial(_packed, size=size))(lengths)
        return cls(query_segments=ids, key_value_segments=ids, packed_ends=ends)

    @classmethod
    def dense(cls, array: Bool[Array, "..."]) -> "Mask":
        """A Boolean array broadcastable to BNTS, True = attend."""
        reject_foreign("mask", array)
        if getattr(array, "dtype", None) is None:
            raise TypeError(
                f"mask must be a Boolean array or a Mask, got {type(array).__name__}"
                f"{mask_hint(array)}"
            )
        if array.dtype != np.bool_:
            raise TypeError(
                f"mask must be Boolean (True = attend), got {array.dtype}: additive values belong "
                "in bias=, and a 0/1 array becomes a mask by `mask != 0`"
            )
        return cls(array=array)

    def __and__(self, other: "Mask | Array") -> "Mask":
        if not isinstance(other, Mask):
            if not hasattr(other, "dtype"):
                return NotImplemented
            other = Mask.dense(other)
        # A mask holds one pair of segment ids: the second pair becomes a dense array.
        if self.query_segments is not None and other.query_segments is not None:
            same = _equal_ids(other.query_segments, other.key_value_segments)
            other = replace(other, **dict.fromkeys(_SEGMENTS)) & Mask(array=same)
        return Mask(
            *(
                b if a is None else a if b is None else INTERSECTION[field.name](a, b)
                for field in fields(Mask)
                for a, b in [(getattr(self, field.name), getattr(other, field.name))]
            )
        )

    __rand__ = __and__
    __array_ufunc__ = None  # else NumPy applies `array & mask` entry by entry

    def _no_structure(self, *_: object) -> NoReturn:
        raise TypeError(
            "a Mask is a conjunction of conditions: it supports `&`, and not `|`, `^` or `~`. "
            "Convert it to an array first: Mask.dense(a.to_array(T, S) | b.to_array(T, S)), "
            "Mask.dense(~a.to_array(T, S))"
        )

    __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _no_structure

    def __repr__(self) -> str:
        return mask_repr.describe(self)

    def __str__(self) -> str:
        return mask_repr.picture(self)

    def _repr_html_(self) -> str:
        return notebook.of_mask(self)

    @property
    def empty(self) -> bool:
        """True if there is no condition at all."""
        return all(getattr(self, field.name) is None for field in fields(self))

    def to_array(self, T: int, S: int, xp: ModuleType = jnp) -> Bool[Array, "#B #N T S"]:
        """Materialises the mask, broadcastable to BNTS, by `jax.numpy` or by `numpy`."""
        require_sizes(least=0, T=T, S=S)
        if lacks_values(self):
            raise TypeError("to_array needs a mask of arrays, got jax.ShapeDtypeStruct in it")
        i, j = (xp.arange(size, dtype=np.int32) for size in (T, S))
        i, j = i.reshape(1, 1, T, 1), j.reshape(1, 1, 1, S)
        allowed: Array = xp.ones((1, 1, T, S), bool)
        if self.causal_offset is not None:
            allowed = allowed & (j <= i + _over_rows(near(self.causal_offset), xp))
        left, right = self.window_size or (None, None)
        if left is not None:
            allowed = allowed & (j >= i - left)
        if right is not None:
            allowed = allowed & (j <= i + right)
        for lengths, position in ((self.query_lengths, i), (self.key_value_lengths, j)):
            if lengths is not None:
                allowed = allowed & (position < _over_rows(lengths, xp))
        if self.query_padding is not None:
            allowed = allowed & xp.asarray(self.query_padding)[..., None, :, None]
        if self.key_value_padding is not None:
            allowed = allowed & xp.asarray(self.key_value_padding)[..., None, None, :]
        if self.query_segments is not None:
            allowed = allowed & _same_segment(xp, self.query_segments, self.key_value_segments)
        if self.array is not None:
            array = xp.asarray(self.array)
            allowed = allowed & array.reshape((1,) * (4 - array.ndim) + array.shape)
        return allowed

    def __eq__(self, other: object) -> bool:
        """Compares integers by value and arrays by identity, so that masks can be static."""
        return isinstance(other, Mask) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        traced, static = self.tree_flatten()
        return static, tuple(map(id, traced))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Python integers determine the program, so they are static; arrays are traced."""
        offset, window, *arrays = (getattr(self, name) for name in FIELDS)
        if type(offset) is int and not self._offset_is_leaf:
            return tuple(arrays), (offset, window)
        return (offset, *arrays), (None, window)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        """`tree_flatten` with the name of each field, as paths of leaves show it."""
        traced, static = self.tree_flatten()
        keys = map(jax.tree_util.GetAttrKey, traced_fields(static))
        return tuple(zip(keys, traced, strict=True)), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], traced: tuple[Any, ...]) -> "Mask":
        """Skips the checks of the constructor: leaves need not be arrays."""
        mask = object.__new__(cls)
        values = {"causal_offset": static[0], "window_size": static[1]}
        values |= zip(traced_fields(static), traced, strict=True)
        for name, value in values.items():
            object.__setattr__(mask, name, value)
        if static[0] is None and type(mask.causal_offset) is int:
            object.__setattr__(mask, "_offset_is_leaf", True)
        return mask


FIELDS = tuple(field.name for field in fields(Mask))  # first offset and window, which may be static


def traced_fields(static: tuple[Any, ...]) -> tuple[str, ...]:
    """The fields that are children of the pytree node: all but the window and a static offset."""
    return FIELDS[2:] if static[0] is not None else (FIELDS[0], *FIELDS[2:])


def _over_rows(per_batch: int | np.integer[Any] | Array, xp: ModuleType) -> Array:
    column: Array = xp.reshape(xp.asarray(per_batch, np.int32), (-1, 1, 1, 1))
    return column


def _same_segment(xp: ModuleType, query_ids: Array | None, key_value_ids: Array | None) -> Array:
    rows = xp.asarray(query_ids)[..., None, :, None]
    same: Array = rows == xp.asarray(key_value_ids)[..., None, None, :]
    return same


@shapes_too
def _equal_ids(query_ids: Array | None, key_value_ids: Array | None) -> Array:
    return _same_segment(library(query_ids, key_value_ids), query_ids, key_value_ids)


def _packed(lengths: Array, size: int) -> tuple[Array, Array]:
    """Returns the segment id of each of `size` positions, and the position after each sequence."""
    xp = library(lengths)
    lengths = xp.clip(narrow(lengths), 0, size)
    ends = xp.minimum(xp.cumsum(lengths, axis=-1, dtype=np.int32), np.int32(size))
    positions = xp.arange(size, dtype=np.int32).reshape(*(1,) * (lengths.ndim - 1), size, 1)
    after = positions >= ends[..., None, :]
    return after.sum(-1, dtype=np.int32), ends
