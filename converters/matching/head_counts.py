"""Refuses to fill attention of one head count from attention of another.

A kernel of `(heads features)` fits axes of any heads, so shapes cannot tell. A layer states its
count in an attribute, a file in its metadata or its config.json, an array in an axis of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxmha.converters.discovery import attention_blocks, head_count, live_model
from jaxmha.dims import parse

if TYPE_CHECKING:
    from jaxmha.checkpoint import Checkpoint
    from jaxmha.converters.matching.plan import Line

Path = tuple[str, ...]
_SPLIT = (("o0", "o1"), ("i0", "i1"))  # heads and their features in generated arrows
_OTHER = ("s", "l", "m")  # axes of packed parts and of stacked layers


class Stated(NamedTuple):
    """The head count that an attention layer states, and the layer's name."""

    layer: str
    heads: int


class Side(NamedTuple):
    """The stated counts and the shapes of the arrays of a source or target."""

    heads: Mapping[str, Stated]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass
class _Pair:
    """The counts of a source layer and of the target layer that it fills: stated, and of axes."""

    source: Stated | None
    target: Stated | None
    source_axes: set[int] = field(default_factory=set)
    target_axes: set[int] = field(default_factory=set)


def of_layers(
    paths: Mapping[str, Path], layer_at: Callable[[Path], object]
) -> Mapping[str, Stated]:
    """The counts in attributes of the layers that hold arrays, or of the parents of these layers.

    An outer module is not asked: its count may be that of other attention inside it.
    """
    found = {}
    for name, parts in paths.items():
        for end in (-1, -2):
            path = parts[:end]
            heads = _attribute(layer_at(path)) if len(parts) + end >= 0 else None
            if heads is not None:
                found[name] = Stated(".".join(path), heads)
                break
    return found


def _attribute(layer: Any) -> int | None:
    return (
        None if layer is None else live_model.head_count(live_model.LiveModel({}, {"": layer}), "")
    )


def of_file(file: "Checkpoint") -> Mapping[str, Stated]:
    """The counts of the attention blocks of a file, by its shapes, metadata or config.json."""
    shapes = {name: info.shape for name, info in file.info.items()}
    configured = head_count.in_config(file.path)
    found = dict[str, Stated]()
    try:
        blocks = attention_blocks.find(shapes)
    except ValueError:  # two layouts fit
        return {}
    configured = configured and configured.over([block.prefix for block in blocks])
    for block in blocks:
        try:
            heads, _ = head_count.find(block, shapes, None, file.metadata, configured)
        except ValueError:  # the config.json gives no count for this block
            continue
        if heads is not None:
            found |= dict.fromkeys(block.keys.values(), Stated(block.prefix, heads))
    return found


def refuse(jobs: Mapping[str, tuple["Line", Sequence[str]]], source: Side, target: Side) -> None:
    """Raises ValueError if a layer of the source and the one that it fills differ in head count."""
    for pair in _pairs(jobs, source, target):
        a, b = pair.source, pair.target
        mine = {a.heads} if a else pair.source_axes
        theirs = {b.heads} if b else pair.target_axes
        # Axes may also be those of fewer key heads: one of them must be the stated count.
        if (a or b) and mine and theirs and not mine & theirs:
            raise ValueError(
                f"{_shown('the source', a)} has {max(mine)} heads, and {_shown('the model', b)} has "
                f"{max(theirs)}: build the model with num_heads={max(mine)}, because the shapes fit, "
                "but its outputs would differ"
            )


def _shown(side: str, stated: Stated | None) -> str:
    return f"{stated.layer} of {side}" if stated and stated.layer else side


def _pairs(
    jobs: Mapping[str, tuple["Line", Sequence[str]]], source: Side, target: Side
) -> Iterable[_Pair]:
    mine, theirs = source.heads, target.heads
    found: dict[tuple[Any, ...], _Pair] = {}
    for name, (line, names) in jobs.items():
        axes = [_axes(end) for end in line.arrow.split("->")]
        if len(axes) != 2:
            continue
        for one in names:
            a, b = mine.get(one), theirs.get(name)
            pair = found.setdefault((a, b), _Pair(a, b))
            pair.source_axes |= set(_counts(axes[1], axes[0], source.shapes[one]))
            pair.target_axes |= set(_counts(axes[0], axes[1], target.shapes[name]))
    return found.values()


def _axes(end: str) -> list[tuple[str, ...]]:
    return [tuple(group) for group in parse(end.strip())]


def _counts(
    joint: Sequence[tuple[str, ...]], apart: Sequence[tuple[str, ...]], shape: Sequence[int]
) -> Iterator[int]:
    """Yields sizes of axes of heads, which `joint` has in one axis with the features.

    `apart`: the axes of the array with this shape.
    """
    for heads, features in _SPLIT:
        if any(tuple(x for x in group if x != "s") == (heads, features) for group in joint):
            yield shape[apart.index((heads,)) - len(apart)]
    whole, own = (
        [x for group in axes for x in group if x not in _OTHER] for axes in (joint, apart)
    )
    if len(whole) == 2 and own == ["i0", "1", "o1"]:
        yield 1
