"""Makes questions, with the example lines that would fill a target from each candidate."""

import os
from collections.abc import Sequence

from jaxmha.converters.matching import nearest
from jaxmha.converters.matching.arrows import Fit, fit
from jaxmha.converters.matching.layers import ONLY
from jaxmha.converters.matching.patterns import LETTERS, pattern
from jaxmha.converters.matching.plan import UNKNOWN, Line, Question
from jaxmha.converters.matching.templates import Template


def question(
    target: Template, candidates: Sequence[tuple[Template, Template]], reason: str
) -> Question:
    """Makes the question for a target; zeros are its example if it has no candidate.

    `candidates`: each source with the target, as they fit: packed arrays as a whole, for example.
    """
    chosen: list[tuple[Template | None, Template]] = [*candidates]
    rows = tuple(
        tuple(_line(one, other, slot) for slot in target.first.slots)
        for one, other in chosen or [(None, target)]
    )
    names = tuple(layer_name(one) for one, _ in candidates)
    return Question(layer_name(target), names, reason, rows)


def pattern_of(template: Template, slot: str, letters: str = LETTERS) -> str:
    """Returns the pattern of the names in a slot of all layers; the first name if none matches all."""
    names = {r: template.layers[r].slots[slot].name for r in sorted(template.layers)}
    return pattern(names, letters) or next(iter(names.values()))


def layer_name(template: Template) -> str:
    """Returns the name of a layer: the common prefix of the names or patterns of its arrays."""
    names = [pattern_of(template, slot) for slot in template.first.slots]
    if len(names) == 1:
        return names[0]
    shared = os.path.commonprefix(names)  # noqa: RUF071 (names are no paths of files)
    return shared.rstrip("./_") or names[0]


def _line(source: Template | None, target: Template, slot: str) -> Line:
    """Returns a line that fills a slot from `source`, or with zeros if `source` lacks the slot.

    Its arrow ends in `?`, for the user to replace, where nothing shows the axes of the target.
    """
    name = pattern_of(target, slot)
    if source is None or slot not in source.first.slots:
        return Line(name, fill="zeros")
    part = source.first.part_of(slot)
    take = f"{part[0]}/{part[1]}" if part and target.first.part_of(slot) is None else ""
    arrow, split = _arrow(source, target, slot)
    if arrow.endswith(UNKNOWN):
        apart = len(target.counts) == 1 and not source.counts
        take = f"{{i}}/{target.counts[0]}" if apart else take
    if split < 0:
        return Line(name, (pattern_of(source, slot),), arrow, take)
    letters = LETTERS[:split] + LETTERS[split + 1 :]
    take = f"{{{LETTERS[split]}}}/{target.counts[split]} {take}".strip()
    return Line(name, (pattern_of(source, slot, letters),), arrow, take)


def _arrow(source: Template, target: Template, slot: str) -> tuple[str, int]:
    """Returns an arrow, and the "#" of the target whose layers the source stacks (`Fit.split`)."""
    both = source.first.slots.keys() & target.first.slots.keys()
    found = fit(nearest.only(source, both), nearest.only(target, both))
    gates = any(one.first.form.startswith(ONLY) for one in (source, target))
    if found is None and not gates:
        found = fit(nearest.only(source, {slot}), nearest.only(target, {slot}))
    if isinstance(found, Fit):
        return str(found.arrows[slot]), found.split
    before, after = (one.first.slots[slot].shape for one in (source, target))
    if found is not None and before == after and source.counts == target.counts:
        return "", -1  # the axes may be read in several ways: show the simplest, a copy
    stacked = "lm"[: max(0, len(source.counts) - len(target.counts))]
    return " ".join([*stacked, *(f"a{n}" for n in range(len(before))), "->", UNKNOWN]), -1
