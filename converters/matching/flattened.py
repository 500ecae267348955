"""Finds dense layers that read or make a flattened image, whose features the target orders otherwise.

torch flattens channels first, Keras and Flax channels last; no shape shows it, so the plan asks.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxmha.converters.discovery.attention_blocks import natural
from jaxmha.converters.discovery.flattening import Item, Order, next_to_convolutions
from jaxmha.converters.matching.decide import Decision
from jaxmha.converters.matching.layers import MAIN, Layer
from jaxmha.converters.matching.plan import UNKNOWN, Line, Question
from jaxmha.converters.matching.templates import Template
from jaxmha.converters.matching.terms import meaning
from jaxmha.converters.matching.trees import Tree

_ATTENTION = {"query", "key", "attn", "position"}


class Flat(NamedTuple):
    """A flattened image that a layer reads, or makes (`output`): `channels` of `places` pixels each.

    `convolution` makes or reads the image. `first`: True if the source flattens channels first and
    the target channels last, False if it is the other way round.
    """

    convolution: str
    channels: int
    places: int
    output: bool
    first: bool


class Flats(NamedTuple):
    """The flattened images that layers read or make, by the name of the layer's main array.

    `first`: as in `Flat`. If True, the names are those of the source, otherwise of the target.
    """

    orders: Mapping[str, Order]
    first: bool

    def between(self, source: Template, target: Template) -> Flat | None:
        """Returns the image whose features are reordered if `source` fills `target`; None if none are."""
        layer = (source if self.first else target).first
        order = self.orders.get(layer.slots[MAIN].name)
        return None if order is None else Flat(*order, self.first)


def find(
    mine: Sequence[Template],
    theirs: Sequence[Template],
    decision: Decision,
    source: Tree,
    target: Tree,
) -> Flats:
    """Finds the layers that read or make flattened images; none if both models order channels alike.

    None are found either if convolutions do not show the order, or show several.
    """
    ends = [(mine[s].first, theirs[t].first) for s, t in decision.fits]
    pairs = [(a, b) for a, b in ends if _is_image(a) and _is_image(b)]
    if not pairs:  # no convolutions fit each other, as transposed ones never do: compare all
        images = ([x.first for x in some if _is_image(x.first)] for some in (mine, theirs))
        pairs = list(itertools.product(next(images), next(images)))
    firsts = {(_has_first(a, source), _has_first(b, target)) for a, b in pairs}
    firsts &= {(True, False), (False, True)}
    if len(firsts) != 1:
        return Flats({}, True)
    first = (True, False) in firsts
    # Only the model with channels first is searched: `Flats.between` looks up its half of a pair.
    tree, templates = (source, mine) if first else (target, theirs)
    found, items = dict[int, Order](), _items(tree, templates)
    if not tree.order or tree.kind == "file":
        by_name = sorted(items, key=lambda item: [natural(part) for part in item.path])
        found = next_to_convolutions(by_name, _vector_sizes(templates))
    if tree.order:
        listed = dict.fromkeys((*tree.order, *tree.arrays))
        place = {name: n for n, name in enumerate(listed)}
        items.sort(key=lambda item: place[item.name])
        found |= next_to_convolutions(items, None)
        found |= dict(_norms_between(place, templates, found))
    orders = {
        templates[n].first.slots[MAIN].name: order
        for n, order in found.items()
        if not meaning(templates[n].path) & _ATTENTION
    }
    return Flats(orders, first)


def _norms_between(
    place: Mapping[str, int], templates: Sequence[Template], found: Mapping[int, Order]
) -> Iterator[tuple[int, Order]]:
    """Yields template index and `Order` of each norm of flattened features.

    Such a norm is between a convolution and the dense layer that reads its image, or between a dense
    layer and the convolution that reads the image which it makes.
    """
    at = [[place[x.slots[MAIN].name] for x in one.layers.values()] for one in templates]
    owner = {x.slots[MAIN].name: n for n, t in enumerate(templates) for x in t.layers.values()}
    for dense, (convolution, channels, places, output) in found.items():
        ends = at[owner[convolution]], at[dense]
        start, end = ends[::-1] if output else ends
        for n, template in enumerate(templates):
            between = any(min(start) < x < max(end) for x in at[n])
            if template.first.slots[MAIN].shape == (channels * places,) and between:
                yield n, (convolution, channels, places, True)


def _has_first(layer: Layer, tree: Tree) -> bool | None:
    """True if the features of a convolution have the channels first; None if that is unknown."""
    if layer.slots[MAIN].name in tree.channels_first:
        return True
    of_key = {"weight": True, "kernel": False}.get(layer.slots[MAIN].path[-1])
    return {"oi": True, "io": False, "no": of_key}.get(layer.form)


def _is_image(layer: Layer) -> bool:
    return len(layer.slots[MAIN].shape) > 2


def _vector_sizes(templates: Sequence[Template]) -> dict[int, int]:
    """Returns the sizes of main arrays with one axis, such as those of norms, by their template."""
    shapes = [t.first.slots[MAIN].shape for t in templates]
    return {n: shape[0] for n, shape in enumerate(shapes) if len(shape) == 1}


def _items(tree: Tree, templates: Sequence[Template]) -> list[Item]:
    """Returns every layer whose main array has at least two axes, each repetition by itself."""
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
    """Asks whether the features of a layer are flattened as `flat` says; its lines reorder them.

    `rows`: the lines that fill the layer without a new order. `names`: target array -> its slot.
    """
    made = tuple(reordered(row, names.get(row.target, MAIN), flat) for row in rows)
    main = next(row for row in rows if names.get(row.target, MAIN) == MAIN)
    sources = dict.fromkeys(name for row in rows for name in row.sources)
    return Question(main.target, tuple(sources), f"it {remark(flat, main.arrow)}", (made,))


def remark(flat: Flat, arrow: str) -> str:
    """Returns why lines reorder features, as text that follows the layer's name ("reads 512 ...").

    `arrow`: the einops pattern that keeps their order, which the text offers.
    """
    way, last = ("writes", "output") if flat.output else ("reads", "input")
    sides = ("first", "last") if flat.first else ("last", "first")
    return (
        f"{way} {flat.channels * flat.places} features, perhaps the {flat.channels} channels of "
        f"{flat.convolution} at {flat.places} places, flattened: the source has channels {sides[0]}, and "
        f"the model {sides[1]}; these lines reorder the {last}: keep its order ({arrow or 'a copy'}) "
        "if the features are others, or one model moves its channels where it flattens"
    )


def reordered(row: Line, slot: str, flat: Flat) -> Line:
    """Returns the line `row`, but with reordered features; as it is if its slot has none."""
    letter = "o0" if flat.output else "i0"
    if not row.arrow or (slot != MAIN and not flat.output):
        return replace(row, reason="", confidence="")
    ends = [f"({flat.channels} p0)", f"(p0 {flat.channels})"]
    before, after = (
        re.sub(rf"(?<![\w(]){letter}(?![\w)])", end, side)
        for side, end in zip(
            row.arrow.split(" -> "), ends if flat.first else ends[::-1], strict=True
        )
    )
    return replace(row, arrow=f"{before} -> {after}", reason="", confidence="")


def with_orders(
    question: Question, names: Mapping[str, str], flats: Sequence[Flat | None]
) -> Question:
    """Returns `question` with lines that reorder flattened features, and with the reason for it.

    `names`: as in `question`. `flats`: for each candidate, the result of `Flats.between`.
    """
    examples, readers = list(question.examples), dict[str, list[str]]()
    for n, flat in enumerate(flats):
        arrows = [row.arrow for row in examples[n] if names[row.target] == MAIN]
        if flat is not None and all(x and UNKNOWN not in x for x in arrows):
            examples[n] = tuple(reordered(row, names[row.target], flat) for row in examples[n])
            readers.setdefault(remark(flat, *arrows), []).append(question.candidates[n])
    every = len(question.candidates)
    more = [f"{'it' if len(x) == every else ' or '.join(x)} {why}" for why, x in readers.items()]
    reason = "; ".join([question.reason, *more])
    return replace(question, reason=reason, examples=tuple(examples))
