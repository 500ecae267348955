"""Finds the layers of a source that are nearest to a target layer which none of them fits."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxmha.converters.discovery import adapters
from jaxmha.converters.matching.arrows import Fit, fit
from jaxmha.converters.matching.decide import Decision
from jaxmha.converters.matching.layers import MAIN, Layer
from jaxmha.converters.matching.plan import UNKNOWN
from jaxmha.converters.matching.templates import Template
from jaxmha.converters.matching.terms import contradict
from jaxmha.converters.matching.trees import Array

_PACKED = "one of them packs projections, and nothing shows that the other is packed alike"

_MOST = 4  # most parts in one array: the gates of an LSTM


def near(
    mine: Sequence[Template], target: Template, decision: Decision, reason: str
) -> tuple[list[tuple[Template, Template]], str]:
    """Finds unused sources that fit but for an array that only one of both has, such as a bias.

    If there are none, finds those that fit where the packed array of one is taken as a whole.
    Returns pairs of source and target to offer, and why they are undecided; or [] and `reason`.
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
        and not (source.first.part or (0,))[0]  # each packed array once, at its first part
    ]
    near = [pair for pair in whole if isinstance(fit(*pair), Fit)]
    return near, _PACKED if near else reason


def of_equal_sizes(
    mine: Sequence[Template], theirs: Sequence[Template], target: Template, decision: Decision
) -> tuple[list[tuple[Template, Template]], str]:
    """Finds sources that fit no target, and could fill this one if the user gives the axes.

    No layout shows them, as for gates of recurrent layers. A source has as many elements as the
    target, or k times as many if k targets of this shape lack a source, or 1/k if k sources have its
    shape. Returns pairs to offer and the reason, as `near` does, or [] and "".
    """
    fitting = {s for s, _ in decision.fits}
    loose = [x for s, x in enumerate(mine) if s not in fitting]
    loose = [x for x in loose if not contradict(x.terms, target.terms)]
    loose = [x for x in loose if not adapters.find([x.first.slots[MAIN].name])]
    if target.first.slots.keys() == {MAIN}:  # it may be what is a bias in a layer of the source
        loose += [_alone(x, slot) for x in loose for slot in x.first.slots if slot != MAIN]
    shapes = [
        Counter(map(_shape, several)) for several in (loose, [theirs[t] for t in decision.open])
    ]
    ratios = []
    for source in loose:
        wide = _elements(source) > _elements(target)
        several = shapes[1][_shape(target)] if wide else shapes[0][_shape(source)]
        if 0 < (ratio := _ratio(source, target)) <= max(1, several):
            ratios.append((ratio, source))
    if not ratios:
        return [], ""
    least = min(ratio for ratio, _ in ratios)
    near = [(source, target) for ratio, source in ratios if ratio == least]
    array, wanted = near[0][0].first.slots[MAIN], target.first.slots[MAIN]
    wide = _elements(near[0][0]) > _elements(target)
    of = "as many" if least == 1 else f"{least} times as many" if wide else f"1/{least} as many"
    return near, (
        f"{array.name} {array.shape} has {of} elements as {wanted.name} {wanted.shape}, and fits "
        f"no layer: if it is the source, put the axes of the target in the place of {UNKNOWN}"
    )


def _alone(template: Template, slot: str) -> Template:
    """Returns the template with the array of `slot` as its main array, and no other."""
    rows = {
        r: x._replace(slots={MAIN: x.slots[slot]}, part=x.part_of(slot), apart=frozenset())
        for r, x in template.layers.items()
    }
    return replace(template, layers=rows)


def _ratio(source: Template, target: Template) -> int:
    """Returns how many times as many elements the larger of both has.

    0 if this is not an integer or above `_MOST`, or if both have no size of an axis above 1 in common.
    """
    sizes = [{n for n in _shape(one) if n > 1} for one in (source, target)]
    few, many = sorted(map(_elements, (source, target)))
    fit = sizes[0] & sizes[1] and few and many % few == 0 and many // few <= _MOST
    return many // few if fit else 0


def _elements(template: Template) -> int:
    part = template.first.part_of(MAIN)
    return math.prod(_shape(template)) * len(template.layers) // (part or (0, 1))[1]


def _shape(template: Template) -> tuple[int, ...]:
    return template.first.slots[MAIN].shape


def _whole(template: Template) -> Template:
    """Returns the template of the whole packed array, of which `template` is one part."""
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
    """Returns how much the sorted sizes differ; the products, if there are other numbers of axes."""
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
