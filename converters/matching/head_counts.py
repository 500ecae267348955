"""Refuses to fill attention of one head count from attention of another.

An axis that joins heads and features has the same size for many head counts, so shapes alone do not
show a wrong one. Layers and files state the count (`stated`), or an array has an axis of heads.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxmha.converters.matching.stated import Side, Stated, shown
from jaxmha.dims import parse

if TYPE_CHECKING:
    from jaxmha.converters.matching.plan import Line

# Letters of arrows: (heads, features) of outputs and of inputs; packed parts and stacked layers.
_SPLIT = (("o0", "o1"), ("i0", "i1"))
_OTHER = ("s", "l", "m")


@dataclass
class _Pair:
    """A source and a target layer: what each states, and the head counts that axes of arrays show."""

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
        # Axes of keys and values may show fewer heads, so one count in common is enough.
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
    """Yields the sizes of the axes of heads in an array of this shape.

    `apart`: its axes in the arrow. `joint`: those of the array paired with it, one of which joins
    heads and features.
    """
    for heads, features in _SPLIT:
        if any(tuple(x for x in group if x != "s") == (heads, features) for group in joint):
            yield shape[apart.index((heads,)) - len(apart)]
    whole, own = (
        [x for group in axes for x in group if x not in _OTHER] for axes in (joint, apart)
    )
    if len(whole) == 2 and own == ["i0", "1", "o1"]:
        yield 1
