"""Finds the einops patterns that turn arrays of a source layer into arrays of a target layer."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxmha.converters.matching.layers import MAIN, ONLY, Layer
from jaxmha.converters.matching.readings import Arrow, Reading, match, readings
from jaxmha.converters.matching.templates import Template
from jaxmha.converters.matching.terms import packed


@dataclass(frozen=True)
class Fit:
    """How the arrays of a source template fill the arrays of a target template.

    Attributes:
      arrows: slot, such as "main" or "bias" -> arrow.
      stacked: indices of each "#" in the source's path whose layers the target's arrays stack.
      split: index of the "#" in the target's path whose layers the source's arrays stack, or -1.
    """

    arrows: dict[str, Arrow]
    stacked: tuple[int, ...] = ()
    split: int = -1


LISTS = "two repeated lists have the same length, and nothing shows which is which"
UNDECIDED = "its kernel is square, and nothing shows which axis is the output"


def fit(source: Template, target: Template) -> Fit | str | None:
    """Returns how `source` fills `target`; None if no way fits; text on why if several do."""
    if source.first.slots.keys() != target.first.slots.keys():
        return None
    found = [x for stacked in _stackings(source, target) if (x := _fit(source, target, stacked))]
    found += [
        x for column in _splits(source, target) if (x := _taken_apart(source, target, column))
    ]
    if len(found) > 1:
        return LISTS
    return found[0] if found else None


def _splits(source: Template, target: Template) -> Iterator[int]:
    """Yields the index of each "#" of the target whose layers the source's arrays may stack."""
    if len(target.counts) != len(source.counts) + 1:
        return
    if len(target.layers) == math.prod(target.counts):
        for n in range(len(target.counts)):
            if target.counts[:n] + target.counts[n + 1 :] == source.counts:
                yield n


def _taken_apart(source: Template, target: Template, column: int) -> Fit | str | None:
    """Fits a source with stacked layers to a target with separate layers; returns as `fit` does.

    `column`: the index of the target's "#" that counts the stacked layers.
    """
    kept = {r[:column] + r[column + 1 :]: x for r, x in target.layers.items() if r[column] == 0}
    if not kept:  # no layer has rank 0, so ranks are not indices of an axis of stacked layers
        return None
    one = replace(target, layers=kept)
    arrows = {}
    for slot, array in source.first.slots.items():
        found = []
        for axes, rest in _without(array.shape, [target.counts[column]]):
            cut = source.first._replace(
                slots={**source.first.slots, slot: array._replace(shape=rest)}
            )
            for arrow in _arrows(slot, cut, one.first, one.first.slots[slot].shape):
                here = _split(arrow.source)
                # An `s` that counts separate source arrays leads; `axes` index one of them, without it.
                apart = source.first.part_of(slot) is None and here[:1] == ["s"]
                here.insert(axes[0] + apart, "l")
                found.append(Arrow(" ".join(here), f"l {arrow.target}".strip()))
        if not found:
            return None
        if len({_meaning(arrow) for arrow in found}) > 1:
            return UNDECIDED
        arrows[slot] = found[0]
    return Fit(arrows, (), column)


def _stackings(source: Template, target: Template) -> Iterator[tuple[int, ...]]:
    """Yields each choice of "#" of the source, as indices, whose layers the target may stack."""
    mine, theirs = source.counts, target.counts
    extra = len(mine) - len(theirs)
    full = len(source.layers) == math.prod(mine)
    if extra < 0 or (extra and not full):
        return
    for columns in itertools.combinations(range(len(mine)), extra):
        kept = [n for n in range(len(mine)) if n not in columns]
        if tuple(mine[n] for n in kept) != theirs or not (extra or _same_ranks(source, target)):
            continue
        if not _crossed([source.lists[n] for n in kept], target.lists):
            yield columns


def _crossed(mine: Sequence[frozenset[str]], theirs: Sequence[frozenset[str]]) -> bool:
    """True if source and target nest the same lists in different orders: ranks cannot pair them."""
    pairs = [(a, b) for a, x in enumerate(mine) for b, y in enumerate(theirs) if x & y]
    return any(a != b and (a, a) not in pairs and (b, b) not in pairs for a, b in pairs)


def _same_ranks(source: Template, target: Template) -> bool:
    full = len(source.layers) == math.prod(source.counts) == len(target.layers)
    return source.ranks == target.ranks or full


def _fit(source: Template, target: Template, stacked: tuple[int, ...]) -> Fit | str | None:
    sizes = [source.counts[c] for c in stacked]
    arrows: dict[str, Arrow] = {}
    for slot in source.first.slots:
        found: list[Arrow] = []
        for axes, rest in _without(target.first.slots[slot].shape, sizes):
            for arrow in _arrows(slot, source.first, target.first, rest):
                found.append(_stack(arrow, axes, slot, source.first, target.first))
        if not found:
            return None
        if len({_meaning(arrow) for arrow in found}) > 1:
            return UNDECIDED
        arrows[slot] = found[0]
    return Fit(arrows, stacked)


def _without(
    shape: tuple[int, ...], sizes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields each choice of axes of `shape` that may stack layers, and the shape without them.

    `sizes`: numbers of layers. A single one may match any axis; several must match the first axes.
    """
    if not sizes:
        yield (), shape
    elif len(sizes) == 1:
        for axis, n in enumerate(shape):
            if n == sizes[0]:
                yield (axis,), shape[:axis] + shape[axis + 1 :]
    elif list(shape[: len(sizes)]) == list(sizes):
        yield tuple(range(len(sizes))), shape[len(sizes) :]


def _stack(arrow: Arrow, axes: Sequence[int], slot: str, source: Layer, target: Layer) -> Arrow:
    """Adds `axes` of the target, which stack layers, to an arrow; `s` stays first in the source."""
    if not axes:
        return arrow
    letters = list("lm"[: len(axes)])
    before, after = _split(arrow.source), _split(arrow.target)
    mine, theirs = source.part_of(slot), target.part_of(slot)
    taken = mine is not None and theirs is None  # `s` leads the target until `take` picks a part
    for axis, letter in zip(axes, letters, strict=True):
        after.insert(axis + taken, letter)
    parts = before[:1] if mine is None and before[:1] == ["s"] else []
    return Arrow(" ".join([*parts, *letters, *before[len(parts) :]]), " ".join(after))


def _meaning(arrow: Arrow) -> tuple[tuple[int, ...], ...]:
    """Returns the axes as numbers, so that arrows that differ only in letters compare equal."""
    mine, theirs = (
        [x for x in axes.replace("(", " ").replace(")", " ").split() if x != "1"] for axes in arrow
    )
    return tuple(tuple(mine.index(x) for x in axes) for axes in (mine, theirs))


def _split(axes: str) -> list[str]:
    """Splits the source or target of an arrow into axes; a group is one axis: `(s o) i` has two."""
    found, inside = list[str](), ""
    for word in axes.split():
        inside = f"{inside} {word}".strip()
        if inside.count("(") == inside.count(")"):
            found.append(inside)
            inside = ""
    return found


def _arrows(slot: str, source: Layer, target: Layer, shape: tuple[int, ...]) -> Iterator[Arrow]:
    apart = "no" in (source.form, target.form)
    if slot == MAIN and (apart or any(x.form.startswith(ONLY) for x in (source, target))):
        same = _same_layer(source, target) if apart else source.form == target.form
        if same and source.slots[slot].shape == shape:
            axes = " ".join(f"a{n}" for n in range(len(shape)))
            yield Arrow(axes, axes)
        return
    if slot == MAIN and _may_be_table(source, target, shape):
        yield Arrow("a0 a1", "a0 a1")
    if _copied_whole(source, target) and source.slots[slot].shape == shape:
        axes = " ".join(f"a{n}" for n in range(len(shape)))
        yield Arrow(axes, axes)
    for a in readings(slot, source, source.slots[slot].shape):
        for b in readings(slot, target, shape):
            if arrow := match(a.axes, b.axes):
                yield _packed(arrow, a, b)


def _same_layer(source: Layer, target: Layer) -> bool:
    """True if layers whose axes differ between libraries are of one class, or of one name in torch."""
    mine, theirs = source.slots[MAIN], target.slots[MAIN]
    named = mine.torch and theirs.torch and source.path == target.path
    known = bool(mine.owner and theirs.owner)
    return (named or (known and mine.owner == theirs.owner)) and (
        not known or source.form == target.form
    )


def _copied_whole(source: Layer, target: Layer) -> bool:
    """True for the same part of equally named packed arrays of unknown axes: a copy may be right."""
    mine, theirs = source.slots.get(MAIN), target.slots.get(MAIN)
    if mine is None or theirs is None or {mine.alternates, theirs.alternates} == {True, False}:
        return False
    alike = source.part == target.part is not None and _packer(source) == _packer(target)
    return alike and {source.form, target.form} <= {"raw", ""} and len(mine.shape) > 2


def _may_be_table(source: Layer, target: Layer, shape: tuple[int, ...]) -> bool:
    """True if one has a square `weight` named like an embedding, the other a kernel of form "io".

    Both may be the same table, which a kernel applies to one-hot vectors: a copy may be right.
    """
    ends = {source.form: source, target.form: target}
    table = ends.get("weight")
    square = len(shape) == 2 and shape[0] == shape[1]
    return square and table is not None and "io" in ends and "emb" in table.path[-1].lower()


def _packed(arrow: Arrow, a: Reading, b: Reading) -> Arrow:
    """Adds the axis of packed parts (query, key, value) to the einops pattern `arrow`.

    It is the letter `s`, or the number of parts if both arrays pack them in an output axis in opposite
    orders: `(3 o) i -> (o 3) i`. If both do and the orders agree or one is unknown, the pattern stays.
    """
    both_packed = a.place >= 0 and b.place >= 0 and not a.own and not b.own
    if both_packed and {a.alternates, b.alternates} != {True, False}:
        return arrow
    s = str(a.parts) if both_packed else "s"
    both = []
    for axes, one, other in ((arrow.source, a, b), (arrow.target, b, a)):
        parts = _split(axes)
        if one.place < 0 and other.place >= 0:
            parts.insert(0, "s")
        elif one.own:
            parts.insert(one.place, "s")
        elif one.place >= 0:
            rows = parts[one.place].strip("()")
            parts[one.place] = f"({rows} {s})" if one.alternates else f"({s} {rows})"
        both.append(" ".join(parts))
    return Arrow(*both)


def guesses(source: Template, target: Template, arrow: Arrow) -> bool:
    """True if `arrow` assumes packed parts in sequence, but they may alternate head by head."""
    ends = [(source.first, _split(arrow.source)), (target.first, _split(arrow.target))]
    both = [one.first for one in (source, target) if one.first.part]
    if len(both) > 1 and arrow.source.count("s") == 0 and _packer(both[0]) != _packer(both[1]):
        return any(layer.guessed for layer in both)  # each name may order its parts in its own way
    return any(_may_alternate(*one, *other) for one, other in (ends, ends[::-1]))


def _packer(layer: Layer) -> str:
    """Returns the last component of the path that names a packed layer, such as `c_attn`, or ""."""
    return next((part for part in reversed(layer.slots[MAIN].path) if packed(part)), "")


def _may_alternate(layer: Layer, axes: Sequence[str], other: Layer, others: Sequence[str]) -> bool:
    """True if names and shapes allow that the packed parts of `layer` alternate head by head.

    `axes`: those of `layer` in the arrow. `other`, `others`: the layer paired with it, its axes.
    """
    if not layer.guessed or layer.part is None:
        return False
    if any(axis.startswith("(s ") for axis in axes):
        return True
    own = [axis for axis in axes if axis not in ("l", "m")]
    outs = [n for n, axis in enumerate(own) if axis.strip("(").startswith("o")]
    parts, shape = layer.part[1], layer.slots[MAIN].shape
    if "s" not in own or len(outs) != 1 or len(own) != len(shape) or shape[outs[0]] % parts:
        return False
    # `s` may count heads instead of parts, unless the other layer shows another number of heads.
    plain = [axis for axis in others if axis not in ("s", "l", "m")]
    heads = [n for n, axis in enumerate(plain) if axis.startswith("o")]
    sizes = other.slots[MAIN].shape[-len(plain) :]
    return len(heads) < 2 or sizes[heads[0]] == parts
