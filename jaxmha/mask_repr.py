"""Masks as small pictures for a terminal."""

from dataclasses import fields, replace
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from jaxmha.arrays import Array, brief_array
from jaxmha.integers import has_values

SIDE = 8  # positions shown where no array of the mask fixes T or S
LARGEST = 32  # rows and columns shown
PANELS = 4  # (batch row, head) pairs shown
_POSITIONS = ("query_padding", "key_value_padding", "query_segments", "key_value_segments")
ATTENDS, EXCLUDED = "■", "·"


class Conditions(Protocol):
    """Interface of `Mask` for pictures: a dataclass whose fields are the conditions."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def array(self) -> Array | None: ...
    def to_array(self, T: int, S: int, xp: ModuleType) -> Array: ...


M = TypeVar("M", bound=Conditions)


def describe(mask: Conditions) -> str:
    """One line with the conditions of a mask; arrays are shown by dtype and shape.

    >>> from jaxmha import Mask
    >>> describe(Mask.causal(2) & Mask.window(3, None))
    'Mask(causal_offset=2, window_size=(3, None))'
    """
    values = {field.name: getattr(mask, field.name) for field in fields(mask)}
    shown = ", ".join(f"{k}={brief_array(v)}" for k, v in values.items() if v is not None)
    return f"Mask({shown})"


def picture(mask: Conditions, T: int | None = None, S: int | None = None) -> str:
    """A picture of a mask: rows are queries, columns keys. If the mask has axes of batch or heads,
    each pair of a batch row and a head has a panel.

    T and S default to the sizes in the arrays of the mask, or to 8.

    >>> from jaxmha import Mask
    >>> print(picture(Mask.causal(), 3, 4))
    Mask(causal_offset=0)
    ■ · · ·
    ■ ■ · ·
    ■ ■ ■ ·
    """
    shown = corner(mask, T, S)
    if shown is None:
        return describe(mask)
    panels = []
    for name, allowed in shown.panels:
        rows = [_row(row, shown.S) for row in allowed]
        more = _more(shown.T, "rows")
        panels.append("\n".join([*([f"{name}:"] if name else []), *rows, *more]))
    return "\n".join([describe(mask), *panels, *([shown.left_out] if shown.left_out else [])])


class Corner(NamedTuple):
    """The positions of a mask that a picture shows.

    Attributes:
      T, S: numbers of queries and keys of the whole mask.
      panels: for each pair of a batch row and a head, at most `PANELS`: its name, "" if it is the
        only one, and the Boolean array of the positions shown.
      left_out: a text with the number of further panels; "" if there are none.
    """

    T: int
    S: int
    panels: list[tuple[str, np.ndarray[Any, np.dtype[np.bool_]]]]
    left_out: str


def corner(mask: Conditions, T: int | None = None, S: int | None = None) -> Corner | None:
    """The first positions of a mask; None if the host cannot read its arrays, or if they do not fit
    each other: printing a mask must not raise, for example in a debugger."""
    if not all(map(has_values, jax.tree.leaves(mask))):
        return None
    try:
        T = _length(mask, "query", -2) if T is None else T
        S = _length(mask, "key_value", -1) if S is None else S
        allowed = np.asarray(_corner(mask).to_array(min(T, LARGEST), min(S, LARGEST), np))
        B, N, _, _ = allowed.shape
    except (IndexError, TypeError, ValueError):
        return None
    panels = []
    for b, n in list(np.ndindex(B, N))[:PANELS]:
        name = ", ".join(f"{a} {i}" for a, i, size in (("B", b, B), ("N", n, N)) if size > 1)
        panels.append((name, allowed[b, n]))
    left = B * N - PANELS
    return Corner(T, S, panels, f"... {left} more of (B, N) = ({B}, {N})" if left > 0 else "")


def _corner(mask: M) -> M:
    """Slices the arrays of the mask to the positions to show: a long mask is never materialised."""
    shown = {}
    for name in _POSITIONS:
        if getattr(mask, name) is not None:
            shown[name] = getattr(mask, name)[..., :LARGEST]
    if mask.array is not None and mask.array.ndim:
        shown["array"] = mask.array[..., :LARGEST]
        if mask.array.ndim > 1:
            shown["array"] = shown["array"][..., :LARGEST, :]
    return replace(mask, **shown)


def _row(row: np.ndarray[Any, np.dtype[np.bool_]], S: int) -> str:
    cells = [ATTENDS if allowed else EXCLUDED for allowed in row]
    return " ".join([*cells, *_more(S, "columns")])


def _more(size: int, what: str) -> list[str]:
    return [f"... {size - LARGEST} more {what}"] if size > LARGEST else []


def _length(mask: Conditions, side: str, axis: int) -> int:
    for name in (f"{side}_padding", f"{side}_segments"):
        if getattr(mask, name) is not None:
            return int(getattr(mask, name).shape[-1])
    if mask.array is not None and mask.array.ndim >= -axis and mask.array.shape[axis] != 1:
        return int(mask.array.shape[axis])
    lengths = getattr(mask, f"{side}_lengths")
    return max(SIDE, 0 if lengths is None else int(np.max(lengths, initial=0)))
