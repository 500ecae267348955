"""Splits lists into layers, or rolls numbered layers up to lists, as the other tree has them."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxmha.converters.matching.arrows import fit
from jaxmha.converters.matching.layers import MAIN, Layer, signature
from jaxmha.converters.matching.repeats import COUNTER, Path, class_and_number
from jaxmha.converters.matching.templates import Template
from jaxmha.converters.matching.terms import AUTOMATIC, meaning, snake, terms
from jaxmha.converters.matching.trees import DependsOn

_Sizes = tuple[frozenset[str], tuple[int, ...]]


def unrolled(template: Template) -> list[Template]:
    """Splits a template into one template per value of its last "#"."""
    place = max(n for n, part in enumerate(template.path) if "#" in part)
    made = []
    for value in sorted({ranks[-1] for ranks in template.layers}):
        members = {r[:-1]: x for r, x in template.layers.items() if r[-1] == value}
        path = (
            *template.path[:place],
            template.path[place].replace("#", str(value)),
            *template.path[place + 1 :],
        )
        made.append(replace(template, path=path, layers=members))
    return made


class _Family(NamedTuple):
    """Numbered siblings of one class and size, and templates of the other tree that they may fill.

    Attributes:
      indices: indices of the siblings' templates, in the order of their numbers.
      lists, singles: templates of the other tree that have their sizes, in blocks and outside.
    """

    parent: Path
    stem: str
    indices: Sequence[int]
    lists: Sequence[Template]
    singles: Sequence[Template]

    @property
    def length(self) -> int:
        """The number of blocks of the other tree; 0 without lists."""
        return self.lists[0].counts[0] if self.lists else 0

    @property
    def fits(self) -> bool:
        """True if all `lists` are in the same blocks, and they and `singles` have as many layers."""
        blocks = {(t.path[: _place(t) + 1], t.counts) for t in self.lists}
        expected = self.length * len(self.lists) + len(self.singles)
        return len(blocks) == 1 and len(self.indices) == expected


def rolled(
    flat: Sequence[Template],
    other: Sequence[Template],
    depends_on: DependsOn,
) -> tuple[list[Template], list[Template]]:
    """Rolls siblings with automatic names up to lists, as the blocks of another tree have them.

    A functional Keras model of 3 blocks has `dense`, ..., `dense_5`. If the other tree has a list
    of 3 layers with the sizes of `dense`, `dense_2` and `dense_4`, these become a list.

    Several layers with the same sizes in each block, or one before or after all blocks, are told
    apart by their numbers if each depends on the one before it (`depends_on`, as in `Tree`).

    Returns the templates, and the lists of the other tree that siblings would fill in an order that
    is unknown: split them into layers, so that the user can decide for each.
    """
    made: dict[int, list[Template]] = {}
    unordered: list[Template] = []
    lengths: dict[Path, int] = {}
    places: Counter[tuple[Path, str]] = Counter()
    for family in _families(flat, other, depends_on):
        ordered = [flat[i] for i in family.indices]
        ends = _ends(family.singles)
        if (
            ends is None
            or not _in_series(ordered, family, depends_on)
            or lengths.setdefault(family.parent, family.length) != family.length
        ):
            unordered += family.lists
            continue
        lists = _lists(ordered[ends[0] : len(ordered) - ends[1]], family, places)
        made |= {i: [] for i in family.indices}
        made[min(family.indices)] = [*_outside(ordered, ends, family), *lists]
    every = [x for i, t in enumerate(flat) for x in made.get(i, [_in_block(t, lengths)])]
    return every, unordered


def _families(
    flat: Sequence[Template], other: Sequence[Template], depends_on: DependsOn
) -> Iterator[_Family]:
    """Yields siblings with automatic names that may fill lists of `other`, by their first number."""
    found: dict[tuple[Path, str, object], list[tuple[int, int]]] = defaultdict(list)
    for i, template in enumerate(flat):
        stem, number = class_and_number(template.path[-1])
        # A name without a number is the first of a class only if a framework gave it: a user may
        # have given it to the last layer.
        sure = template.path[-1] != stem or template.first.path in depends_on
        if sure and not template.counts and snake(stem) in AUTOMATIC:
            key = (template.path[:-1], stem, signature(template.first))
            found[key].append((number, i))
    for (parent, stem, _), members in sorted(found.items(), key=lambda x: min(x[1])):
        near = [t for t in other if len(t.counts) < 2 and _fits(t, flat[members[0][1]])]
        lists, singles = [t for t in near if t.counts], [t for t in near if not t.counts]
        family = _Family(parent, stem, [i for _, i in sorted(members)], lists, singles)
        if family.fits:
            yield family


def _in_series(ordered: Sequence[Template], family: _Family, depends_on: DependsOn) -> bool:
    """True if the numbers of siblings tell which of them belongs to which layer."""
    known = all(depends_on.get(t.first.path) is not None for t in ordered)
    alone = len(family.lists) + len(family.singles) == 1
    return not any(t.unordered for t in ordered) and (known or alone)


def _outside(
    ordered: Sequence[Template], ends: tuple[int, int], family: _Family
) -> Iterator[Template]:
    """Yields the siblings before all blocks, with the term "embed", and those after them ("final")."""
    why, (first, last) = _placed(family.singles), ends
    for t in ordered[:first]:
        yield replace(t, terms=t.terms | {"embed"}, placed=why)
    for t in ordered[len(ordered) - last :]:
        yield replace(t, terms=t.terms | {"final"}, placed=why)


def _lists(
    inside: Sequence[Template], family: _Family, places: Counter[tuple[Path, str]]
) -> Iterator[Template]:
    """Yields the siblings in the blocks as lists, one per layer of a block.

    `places` counts the lists of each parent and class, for their names.
    """
    why, each = _placed(family.singles), len(family.lists)
    for n in range(each):
        places[family.parent, family.stem] += 1
        name = f"{family.stem}{COUNTER}{places[family.parent, family.stem]}"
        path = (*family.parent, "#", name)
        layers: Mapping[tuple[int, ...], Layer] = {
            (rank,): t.first for rank, t in enumerate(inside[n::each])
        }
        yield Template(path, layers, meaning(path), placed=why)


def _in_block(template: Template, lengths: Mapping[Path, int]) -> Template:
    """Returns a list such as `attention_#` as `#/attention`, if siblings were rolled up to such blocks.

    `lengths`: parent path -> number of blocks. Any other template is returned unchanged.
    """
    if len(template.counts) != 1:
        return template
    place = _place(template)
    parent, part = template.path[:place], template.path[place]
    if lengths.get(parent) != template.counts[0] or part == "#":
        return template
    name = part.replace("#", "").removesuffix(COUNTER)
    return replace(template, path=(*parent, "#", name, *template.path[place + 1 :]))


def _place(template: Template) -> int:
    """Index of the first "#" in the path."""
    return next(n for n, part in enumerate(template.path) if "#" in part)


def _ends(singles: Sequence[Template]) -> tuple[int, int] | None:
    """Returns how many of `singles` are before all blocks and after them; None if names do not tell."""
    first = [t for t in singles if "embed" in t.terms]
    last = [t for t in singles if "embed" not in t.terms and _is_last(t)]
    known = len(first) < 2 and len(last) < 2 and len(first) + len(last) == len(singles)
    return (len(first), len(last)) if known else None


def _placed(singles: Sequence[Template]) -> str:
    """Returns text for `Template.placed`: how siblings were paired with lists and `singles`."""
    ends = [
        f"`{'/'.join(t.path)}` is taken as the {'first' if 'embed' in t.terms else 'last'}"
        for t in singles
    ]
    return "; ".join(["the order of their numbers", *ends])


def _is_last(template: Template) -> bool:
    """True if a name such as `norm`, `ln_f` or `final_norm` tells that a layer is the last.

    The name of a class, such as `layer_norm`, does not: the first layer of the class has it.
    """
    last = template.path[-1]
    named = set(terms(last)) - {"f"}
    return snake(class_and_number(last)[0]) not in AUTOMATIC and (
        "final" in template.terms or meaning([*named]) == {"norm"}
    )


def _fits(one: Template, other: Template) -> bool:
    """True if the first layer of one template may fill that of the other, perhaps transposed."""
    if _sizes(one) != _sizes(other):
        return False
    first, second = (replace(t, layers={(): t.first}) for t in (one, other))
    return fit(first, second) is not None


def _sizes(template: Template) -> _Sizes:
    """Returns the slots, and the sorted sizes above 1 of the main array."""
    slots = template.first.slots
    return frozenset(slots), tuple(sorted(n for n in slots[MAIN].shape if n > 1))
