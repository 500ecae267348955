"""Finds prefixes that have most arrays of a layout but form no readable attention block."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxmha.checkpoint import optimizer_state
from jaxmha.converters.discovery import attention_blocks, places
from jaxmha.converters.discovery.attention_blocks import (
    Block,
    name_ends,
    prefixes_with,
    unknown_under,
)
from jaxmha.converters.layout import by_hand, meaning, parametrized, uneven
from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.registry import LAYOUTS
from jaxmha.dims import parse

# Layouts that `find` skips, besides packings with fewer key than query heads: other layers often have
# arrays of these names.
_ELSEWHERE = {
    *(layout.name for layout in by_hand.BY_HAND),
    *meaning.OPEN,
    *places.OF_FAMILIES,
}


Shapes = Mapping[str, Sequence[int]]


def describe(
    shapes: Mapping[str, Sequence[int]], found: Sequence[Block], layouts: Iterable[Layout] = LAYOUTS
) -> list[str]:
    """The reasons that `find` gives for prefixes whose arrays form no readable block."""
    return list(find(shapes, found, layouts).values())


def find(
    shapes: Mapping[str, Sequence[int]], found: Sequence[Block], layouts: Iterable[Layout] = LAYOUTS
) -> dict[str, str]:
    """Maps prefixes that have most arrays of a layout but form no readable block to the reason.

    Prefixes in the state of an optimizer are left out.
    """
    whole = {block.prefix for block in found}
    taken = {name for block in found for name in block.keys.values()}
    left = dict.fromkeys(name for name in shapes if name not in taken)
    layouts = list(layouts)
    ends, names = name_ends(left, layouts), sorted(shapes)
    reasons = {block.prefix: block.refused for block in found if block.refused}
    reasons |= {prefix: why for prefix, why in _computed(shapes, layouts) if prefix not in whole}
    for candidate in layouts:
        if candidate.name in _ELSEWHERE or any(map(uneven.letter, candidate.entries)):
            continue
        usual = [entry for entry in candidate.entries if entry.group in ("", "bias")]
        required = [entry for entry in usual if not entry.group]
        prefixes = {p: None for entry in usual for p in prefixes_with(candidate, ends, entry.key)}
        for prefix in prefixes:
            present = [e for e in usual if candidate.path(prefix, e.key) in left]
            first = required[0] in present and 2 * sum(not e.group for e in present) >= len(
                required
            )
            most_kernels = 2 * sum(not e.group for e in present) > len(required)
            if prefix in whole or not (first or most_kernels or 2 * len(present) > len(usual)):
                continue
            if any(attention_blocks.excluded(one, prefix, shapes) for one in layouts):
                continue
            missing = [e.key for e in required if e not in present]
            roles = {leaf.partition(".")[0] for e in present for leaf in e.leaves}
            if not roles & {"value", "out"}:
                continue  # only queries and keys: the layer computes scores, not attention
            if any(_is_convolution(e, candidate, prefix, shapes) for e in present):
                continue
            keys = {e.key: candidate.path(prefix, e.key) for e in present}
            more = unknown_under(candidate, prefix, keys, names) if missing else ()
            if any(len(shapes[name]) >= 2 for name in more):
                continue  # other kernels are in place of the missing ones: another kind of layer
            what = f"lacks {', '.join(missing)}" if missing else _misfit(candidate, prefix, shapes)
            if roles == {"query", "key", "out"} and f"{prefix}.q_norm.weight" in shapes:
                reasons.setdefault(prefix, f"{prefix} has no values: its keys may serve as both")
                continue
            reasons.setdefault(
                prefix, f"{prefix or '(top)'} looks like layout {candidate.name} but {what}"
            )
    return _of_weights(reasons, shapes)


def _of_weights(reasons: dict[str, str], shapes: Shapes) -> dict[str, str]:
    """Leaves out prefixes in the state of an optimizer, whose shapes may differ from the weights'."""
    states = optimizer_state.find(shapes) if reasons else []
    inside = {name[: end.start()] for name in states for end in re.finditer("[./]", name)}
    return {prefix: why for prefix, why in reasons.items() if prefix not in inside}


def _computed(shapes: Shapes, layouts: Sequence[Layout]) -> Iterator[tuple[str, str]]:
    """Yields (prefix, reason) for blocks that lack only arrays that torch computes from others."""
    if not (computed := parametrized.computed(shapes)):
        return
    ends = name_ends(computed, layouts)
    for candidate in layouts:
        required = [entry.key for entry in candidate.entries if not entry.group]
        for key in required:
            for prefix in prefixes_with(candidate, ends, key):
                paths = [candidate.path(prefix, one) for one in required]
                if all(path in shapes or path in computed for path in paths):
                    why = "; ".join(computed[path] for path in paths if path in computed)
                    looks = f"{prefix or '(top)'} looks like layout {candidate.name}"
                    yield prefix, f"{looks}, but {why}"


def _is_convolution(entry: Entry, layout: Layout, prefix: str, shapes: Shapes) -> bool:
    """True if an array has the rank of a convolution, and the layout is of linear layers."""
    return len(shapes[layout.path(prefix, entry.key)]) == 4 and len(parse(entry.axes)) < 4


def _misfit(candidate: Layout, prefix: str, shapes: Mapping[str, Sequence[int]]) -> str:
    """Describes the first array whose shape contradicts an earlier array of the layout."""
    sizes: dict[str, tuple[int, str]] = {}
    for entry in candidate.entries:
        if (shape := shapes.get(candidate.path(prefix, entry.key))) is None:
            continue
        groups, shown = parse(entry.axes), f"{entry.key} of shape {tuple(shape)}"
        if len(shape) < len(groups):
            return (
                f"has arrays of another rank: {entry.key} expected axes ({entry.axes}), got shape "
                f"{tuple(shape)}"
            )
        for group, n in zip(groups, shape[len(shape) - len(groups) :], strict=True):
            if len(group) > 1:
                continue
            letter = group[0]
            other = sizes.setdefault(letter, (n, shown))
            if other[0] != n:
                return f"{shown} has {letter}={n}, while {other[1]} has {letter}={other[0]}"
    return "its sizes contradict each other: " + ", ".join(
        f"{letter}={n} ({shown})" for letter, (n, shown) in sizes.items()
    )
