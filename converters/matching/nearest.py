"""Finds the layers of a source that are nearest to a target layer which none of them fits."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxmha.converters.matching.arrows import Fit, fit
from jaxmha.converters.matching.decide import Decision
from jaxmha.converters.matching.layers import MAIN, Layer
from jaxmha.converters.matching.templates import Template
from jaxmha.converters.matching.terms import contradict
from jaxmha.converters.matching.trees import Array

_PACKED = "one of them packs projections, and nothing shows that the other is packed alike"


def near(
    mine: Sequence[Template], target: Template, decision: Decision, reason: str
) -> tuple[list[tuple[Template, Template]], str]:
    """Finds unused sources that fit without the slots of only one layer, such as a bias.

    Also those that fit if a packed array is taken whole. Returns the pairs of source and target
    that fit, and the reason; or [] and `reason`.
    """
    used = {s for s, _, _ in decision.taken.values()}
    free = [
        x for s, x in enumerate(mine) if s not in used and not contradict(x.terms, target.terms)
    ]
    near = []
    for source in free:
        both = source.first.slots.keys() & target.first.slots.keys()
        other = source.first.slots.keys() != target.first.slots.keys()
        if both and other and isinstance(fit(only(source, both), only(target, both)), Fit):
            near.append((source, target))
    if near:
        return near, "the layers of these shapes have other arrays, such as a bias"
    whole = [
        (_whole(source), _whole(target))
        for source in free
        if (source.first.part is None) != (target.first.part is None)
        and not (source.first.part or (0,))[0]  # once for all parts
    ]
    near = [pair for pair in whole if isinstance(fit(*pair), Fit)]
    return near, _PACKED if near else reason


def _whole(template: Template) -> Template:
    """The template whose array is not taken apart."""
    return replace(template, layers={r: x._replace(part=None) for r, x in template.layers.items()})


def shown(mine: Sequence[Template], target: Template, decision: Decision) -> str:
    """Returns text for a reason: the shape expected, and that of the nearest unused source array.

    An array with more of the target's terms is nearer, then one of more similar sizes.
    """
    used = {s for s, _, _ in decision.taken.values()}
    wanted = target.first.slots[MAIN]
    found = []
    for s, source in enumerate(mine):
        array = source.first.slots[MAIN]
        if s not in used:
            common = len(source.terms & target.terms)
            found.append((-common, _apart(array.shape, wanted.shape), array.name, array.shape))
    if not found:
        return f"; {wanted.name} is {wanted.shape}"
    *_, name, shape = min(found)
    return f"; the nearest is {name} {shape}, which does not fit {wanted.name} {wanted.shape}"


def _apart(a: Sequence[int], b: Sequence[int]) -> float:
    """How much the sizes of two shapes differ; of the products, if they have other axes."""
    sizes = (
        zip(sorted(a), sorted(b), strict=True)
        if len(a) == len(b)
        else [(math.prod(a), math.prod(b))]
    )
    return sum(abs(math.log((x + 1) / (y + 1))) for x, y in sizes)


def only(template: Template, slots: Iterable[str]) -> Template:
    def cut(layer: Layer) -> Layer:
        kept: Mapping[str, Array] = {slot: layer.slots[slot] for slot in slots}
        return layer._replace(slots=kept)

    return replace(template, layers={r: cut(x) for r, x in template.layers.items()})
