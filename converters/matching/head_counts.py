"""Refuses to fill attention of one head count from attention of another.

A kernel of `(heads features)` fits axes of any heads, so shapes cannot tell. Layers and files state
their counts (`stated`), an array shows one in an axis of its own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxmha.converters.matching.stated import Side, Stated, shown
from jaxmha.dims import parse

if TYPE_CHECKING:
    from jaxmha.converters.matching.plan import Line

_SPLIT = (("o0", "o1"), ("i0", "i1"))  # heads and features, of outputs and inputs, in arrows
_OTHER = ("s", "l", "m")  # axes of packed parts and of stacked layers


@dataclass
class _Pair:
    """Head counts of a source and a target layer: as each states them, and as axes show them."""

    source: Stated | None
    target: Stated | None
    source_axes: set[int] = field(default_factory=set)
    target_axes: set[int] = field(default_factory=set)


def refuse(jobs: Mapping[str, tuple["Line", Sequence[str]]], source: Side, target: Side) -> None:
    """Raises ValueError if a layer of the source and the one that it fills differ in head count."""
    for pair in _pairs(jobs, source, target):
        a, b = pair.source, pair.target
        mine = {a.heads} if a and a.heads else pair.source_axes
        theirs = {b.heads} if b and b.heads else pair.target_axes
        # Axes may also show fewer key heads, so it is enough that one axis has the stated count.
        if any(one and one.heads for one in (a, b)) and mine and theirs and not mine & theirs:
            raise ValueError(
                f"{shown('the source', a)} has {max(mine)} heads, and {shown('the model', b)} has "
                f"{max(theirs)}: build the model with num_heads={max(mine)}, because the shapes fit, "
                "but its outputs would differ"
            )


def _pairs(
    jobs: Mapping[str, tuple["Line", Sequence[str]]], source: Side, target: Side
) -> Iterable[_Pair]:
    mine, theirs = source.stated, target.stated
    found: dict[tuple[str | None, ...], _Pair] = {}
    for name, (line, names) in jobs.items():
        axes = [_axes(end) for end in line.arrow.split("->")]
        if len(axes) != 2:
            continue
        for one in names:
            a, b = mine.get(one), theirs.get(name)
            pair = found.setdefault((a and a.layer, b and b.layer), _Pair(a, b))
            pair.source_axes |= set(_counts(axes[1], axes[0], source.shapes[one]))
            pair.target_axes |= set(_counts(axes[0], axes[1], target.shapes[name]))
    return found.values()


def _axes(end: str) -> list[tuple[str, ...]]:
    return [tuple(group) for group in parse(end.strip())]


def _counts(
    joint: Sequence[tuple[str, ...]], apart: Sequence[tuple[str, ...]], shape: Sequence[int]
) -> Iterator[int]:
    """Yields the head counts that an array of this shape shows in axes of their own.

    `apart`: its axes in the arrow. `joint`: the axes of the array on the arrow's other side, which
    has heads and features in one axis.
    """
    for heads, features in _SPLIT:
        if any(tuple(x for x in group if x != "s") == (heads, features) for group in joint):
            yield shape[apart.index((heads,)) - len(apart)]
    whole, own = (
        [x for group in axes for x in group if x not in _OTHER] for axes in (joint, apart)
    )
    if len(whole) == 2 and own == ["i0", "1", "o1"]:
        yield 1
