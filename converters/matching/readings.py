"""Reads the axes of an array as letters, and finds the einops patterns between two readings."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxmha.converters.matching.layers import MAIN, Layer

_WINDOW = "yxz"


class Arrow(NamedTuple):
    """An einops pattern: the axes of a source array, and of the target array that it fills.

    `s` is the axis of parts packed in one array (query, key, value), `l` and `m` of stacked layers.
    """

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


class Reading(NamedTuple):
    """One way to read an array: the (letter, size) of each axis, without that of packed parts."""

    # o: output, i: input, v: rows and d: features of a table, yxz: window, r: not known
    axes: tuple[tuple[str, int], ...]
    place: int = -1  # axis that holds the parts; -1: not packed
    own: bool = False  # True: the parts have an axis of their own
    alternates: bool | None = None  # True: the rows of the parts alternate; None: not known
    parts: int = 1


def readings(slot: str, layer: Layer, shape: tuple[int, ...]) -> Iterator[Reading]:
    """Yields each way to read an array of a layer, of which `shape` is the shape."""
    options = _options(layer.form, shape) if slot == MAIN else _vector(shape)
    for axes in options:
        if (part := layer.part_of(slot)) is None:
            yield Reading(axes)
            continue
        outs = [n for n, (letter, _) in enumerate(axes) if letter == "o"]
        if not outs:
            continue
        place, parts = outs[0], part[1]
        size = axes[place][1]
        if len(outs) > 1 and size == parts and axes[outs[1]][1] != parts:
            yield Reading((*axes[:place], *axes[place + 1 :]), place, True)
        elif len(outs) == 1 and size % parts == 0:
            rows = *axes[:place], ("o", size // parts), *axes[place + 1 :]
            known = None if layer.guessed else bool(layer.slots[slot].alternates)
            yield Reading(rows, place, False, known, parts)


def _options(form: str, shape: tuple[int, ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yields each way to read a main array with the axis order `form`, as `Reading.axes`."""
    if len([n for n in shape if n != 1]) <= 1 and form not in ("oi", "io", "vd", "weight"):
        yield from _vector(shape)
        return
    if len(shape) <= 1:
        yield from _vector(shape)
        return
    if form in ("oi", "weight", "") and (len(shape) == 2 or form == "oi"):
        yield tuple(zip(("o", "i", *_WINDOW), shape, strict=False))
    if form in ("vd", "weight", "raw", ""):
        letters = ("v", "d") if len(shape) == 2 else tuple(f"r{n}" for n in range(len(shape)))
        yield tuple(zip(letters, shape, strict=True))
    if form == "" and len(shape) == 2:
        yield ("i", shape[0]), ("o", shape[1])
    if form == "io":
        for n in range(1, len(shape)):
            yield (*(("i", x) for x in shape[:n]), *(("o", x) for x in shape[n:]))
        if len(shape) > 2:
            window = tuple(zip(_WINDOW, shape[:-2], strict=False))
            yield (*window, ("i", shape[-2]), ("o", shape[-1]))


def _vector(shape: tuple[int, ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    yield tuple(("o", n) for n in shape)


def match(a: Sequence[tuple[str, int]], b: Sequence[tuple[str, int]]) -> Arrow | None:
    """Returns the arrow between two readings; None if a letter's axes differ by more than grouping."""
    rows = {x for x, _ in (*a, *b) if x[0] in "rvd"}
    if rows:
        return _rows(a, b)
    mine, theirs = _by_letter(a), _by_letter(b)
    names: dict[str, list[str]] = {}
    for letter in {**mine, **theirs}:
        left, right = mine.get(letter, []), theirs.get(letter, [])
        if math.prod(left) != math.prod(right):
            return None
        finer = left if len(left) > len(right) else right
        if left != right and len(left) > 1 and len(right) > 1 and letter in _WINDOW:
            return None
        if left != right and min(len(left), len(right)) > 1:
            left, right = [n for n in left if n != 1], [n for n in right if n != 1]
            if left != right:
                return None
            finer = left
        names[letter] = [f"{letter}{n}" * (size != 1) for n, size in enumerate(finer)]
    return Arrow(_written(a, mine, names), _written(b, theirs, names))


def _by_letter(axes: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for letter, size in axes:
        found.setdefault(letter, []).append(size)
    return found


def _written(
    axes: Sequence[tuple[str, int]], sizes: dict[str, list[int]], names: dict[str, list[str]]
) -> str:
    """Writes axes in einops notation; axes of size one are `1`."""
    places = {letter: iter([n for n in names[letter] if n]) for letter in names}
    written = []
    for letter, size in axes:
        real = [n for n in names[letter] if n]
        if size == 1:
            written.append("1")
        elif len([n for n in sizes[letter] if n != 1]) == 1 and len(real) > 1:
            written.append(f"({' '.join(real)})")
        else:
            written.append(next(places[letter]))
    return " ".join(written)


def _rows(a: Sequence[tuple[str, int]], b: Sequence[tuple[str, int]]) -> Arrow | None:
    """Returns the arrow that maps axes in order, ignoring axes of size 1.

    None if the other sizes differ, if an array has an input axis, or if one is a table (with rows
    `v`) and the other has an output axis.
    """
    for x, y in ((a, b), (b, a)):
        if {letter for letter, _ in x} & {"o", "i"} and {letter for letter, _ in y} & {"v"}:
            return None
        if {letter for letter, _ in x} & {"i"}:
            return None
    mine, theirs = [n for _, n in a if n != 1], [n for _, n in b if n != 1]
    if mine != theirs:
        return None
    first, second = (iter(f"a{n}" for n in range(len(mine))) for _ in range(2))
    return Arrow(
        " ".join("1" if n == 1 else next(first) for _, n in a),
        " ".join("1" if n == 1 else next(second) for _, n in b),
    )
