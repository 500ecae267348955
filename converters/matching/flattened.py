"""Finds dense layers next to a flattened convolution, whose features have another order in the target."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxmha.converters.discovery.attention_blocks import natural
from jaxmha.converters.discovery.flattening import Item, Order, next_to_convolutions
from jaxmha.converters.matching.decide import Decision
from jaxmha.converters.matching.layers import MAIN, Layer
from jaxmha.converters.matching.plan import Line, Question
from jaxmha.converters.matching.templates import Template
from jaxmha.converters.matching.terms import meaning
from jaxmha.converters.matching.trees import Tree

_ATTENTION = {"query", "key", "attn", "position"}


class Flat(NamedTuple):
    """A dense layer whose input (or output) is `channels` of `convolution` at `places`.

    `first`: True if the source has the channels first, and the target has them last.
    """

    convolution: str
    channels: int
    places: int
    output: bool
    first: bool


def find(
    mine: Sequence[Template],
    theirs: Sequence[Template],
    decision: Decision,
    source: Tree,
    target: Tree,
) -> dict[int, Flat]:
    """Maps the index of each such target to its order; {} if both models order channels alike."""
    pairs = [(mine[s].first, theirs[t].first) for s, t in decision.fits]
    firsts = {
        (_has_first(a, source), _has_first(b, target))
        for a, b in pairs
        if _is_image(a) and _is_image(b)
    }
    firsts &= {(True, False), (False, True)}
    if len(firsts) != 1:
        return {}
    first = (True, False) in firsts
    # Sizes are read where channels come first: there they are clearer.
    tree, templates = (source, mine) if first else (target, theirs)
    found, items = dict[int, Order](), _items(tree, templates)
    if not tree.order or tree.kind == "file":
        by_name = sorted(items, key=lambda item: [natural(part) for part in item.path])
        found = next_to_convolutions(by_name, False, _vectors(templates))
    if tree.order:
        listed = dict.fromkeys((*tree.order, *tree.arrays))
        place = {name: n for n, name in enumerate(listed)}
        items.sort(key=lambda item: place[item.name])
        found |= next_to_convolutions(items, True, set())
        found |= dict(_norms_between(place, templates, found))
    of_template = {t: s if first else t for t, (s, *_) in decision.taken.items()}
    return {
        t: Flat(*found[template], first)
        for t, template in of_template.items()
        if template in found and not meaning(templates[template].path) & _ATTENTION
    }


def _norms_between(
    place: Mapping[str, int], templates: Sequence[Template], found: Mapping[int, Order]
) -> Iterator[tuple[int, Order]]:
    """Yields the norms of flattened features, which are between a convolution and a dense layer."""
    for n, template in enumerate(templates):
        main = template.first.slots[MAIN]
        for dense, (convolution, channels, places, output) in found.items():
            end = place[templates[dense].first.slots[MAIN].name]
            between = place[convolution] < place[main.name] < end
            if main.shape == (channels * places,) and between and not output:
                yield n, (convolution, channels, places, True)


def _has_first(layer: Layer, tree: Tree) -> bool | None:
    """True if the features of a convolution have the channels first; None if that is unknown."""
    if layer.slots[MAIN].name in tree.channels_first:
        return True
    return {"oi": True, "io": False}.get(layer.form)


def _is_image(layer: Layer) -> bool:
    return len(layer.slots[MAIN].shape) > 2


def _vectors(templates: Sequence[Template]) -> set[int]:
    """The sizes of norms."""
    shapes = [t.first.slots[MAIN].shape for t in templates]
    return {shape[0] for shape in shapes if len(shape) == 1}


def _items(tree: Tree, templates: Sequence[Template]) -> list[Item]:
    """The layers with matrices."""
    return [
        _item(layer, n, tree)
        for n, template in enumerate(templates)
        for layer in template.layers.values()
        if len(layer.slots[MAIN].shape) > 1
    ]


def _item(layer: Layer, template: int, tree: Tree) -> Item:
    main = layer.slots[MAIN]
    by_keras = main.name in tree.channels_first
    a, b = main.shape[-2:] if by_keras else main.shape[:2]
    sizes = {"oi": (b, a), "weight": (b, a), "io": (a, b), "vd": (-1, b), "no": (a, b)}
    image = _is_image(layer)
    size_in, size_out = (
        sizes.get(layer.form, (-1, -1)) if image or len(main.shape) == 2 else (-1, -1)
    )
    return Item(
        main.name,
        layer.path,
        template,
        size_in,
        size_out,
        image and (by_keras or layer.form in ("oi", "no")),
    )


def question(rows: Sequence[Line], names: Mapping[str, str], flat: Flat) -> Question:
    """The question on the order of features, with lines that reorder them.

    `rows`: lines that keep the order. `names`: name of each target array -> its slot.
    """
    made = tuple(_reordered(row, names.get(row.target, MAIN), flat) for row in rows)
    main = next(row for row in rows if names.get(row.target, MAIN) == MAIN)
    way, last = ("writes", "output") if flat.output else ("reads", "input")
    sides = ("first", "last") if flat.first else ("last", "first")
    reason = (
        f"it {way} {flat.channels * flat.places} features, perhaps the {flat.channels} channels of "
        f"{flat.convolution} at {flat.places} places, flattened: the source has channels {sides[0]}, and "
        f"the model {sides[1]}; these lines reorder the {last}: keep its order ({main.arrow or 'a copy'}) "
        "if the features are others, or one model moves its channels where it flattens"
    )
    sources = dict.fromkeys(name for row in rows for name in row.sources)
    return Question(main.target, tuple(sources), reason, (made,))


def _reordered(row: Line, slot: str, flat: Flat) -> Line:
    letter = "o0" if flat.output else "i0"
    if slot != MAIN and not flat.output:
        return replace(row, reason="", confidence="")
    ends = [f"({flat.channels} p0)", f"(p0 {flat.channels})"]
    before, after = (
        re.sub(rf"(?<![\w(]){letter}(?![\w)])", end, side)
        for side, end in zip(
            row.arrow.split(" -> "), ends if flat.first else ends[::-1], strict=True
        )
    )
    return replace(row, arrow=f"{before} -> {after}", reason="", confidence="")
