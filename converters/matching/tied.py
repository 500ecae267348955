"""Offers the embedding of a source for a head that it lacks, because many models tie both."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from jaxmha.converters.matching.arrows import Fit, fit
from jaxmha.converters.matching.layers import MAIN
from jaxmha.converters.matching.plan import Line, Question
from jaxmha.converters.matching.templates import Template
from jaxmha.converters.matching.terms import contradict, meaning
from jaxmha.converters.matching.trees import Tree, split

REASON = (
    "the source has no such head, and its embedding has the shape: many models tie them "
    "(tie_word_embeddings of config.json)"
)
_APART = (
    "the source has no such head, and its configuration says that none is tied to the embedding "
    "(tie_word_embeddings): take a checkpoint that has the head"
)
_OTHER_TABLES = {"position", "type", "time", "relative", "head"}


def question(
    name: str,
    target: Template,
    mine: Sequence[Template],
    used: Collection[int],
    ties: bool | None,
) -> Question | None:
    """Returns the question for a target without a source; None if no embedding fits it as its head.

    `used`: indices in `mine` of the sources that fill other layers. `ties`: as `Tree.ties`.
    """
    found = {s: how for s, source in enumerate(mine) if (how := _fit(source, target))}
    if not found:
        return None
    if ties is False:
        zeros = tuple(Line(array.name, fill="zeros") for array in target.first.slots.values())
        return Question(name, (), _APART, (zeros,))
    rest = [_line(slot, target, mine, used) for slot in target.first.slots if slot != MAIN]
    tables = {s: mine[s].first.slots[MAIN].name for s in found}
    examples = tuple(
        (Line(target.first.slots[MAIN].name, (tables[s],), str(how.arrows[MAIN])), *rest)
        for s, how in found.items()
    )
    return Question(name, tuple(tables.values()), REASON, examples)


def is_head(target: Template, mine: Sequence[Template]) -> bool:
    """True if a layer without a source fits as a head tied to an embedding."""
    return any(_fit(source, target) for source in mine)


def _fit(source: Template, target: Template) -> Fit | None:
    """Returns how an embedding fits a kernel whose outputs are its rows; None if it does not."""
    table = source.first.form == "vd" or "embed" in source.terms
    kernel = "head" in target.terms or "embed" not in target.terms
    apart = contradict(source.terms - {"embed"}, target.terms - {"head"})
    if not (table and kernel) or apart or source.terms & _OTHER_TABLES:
        return None
    if source.counts or target.counts or len(source.first.slots[MAIN].shape) != 2:
        return None
    how = fit(_alone(source, "oi"), _alone(target, target.first.form))
    return how if isinstance(how, Fit) else None


def _alone(template: Template, form: str) -> Template:
    """Returns the template of one layer, with only its main array, whose axis order is `form`."""
    slots = {MAIN: template.first.slots[MAIN]}
    return replace(template, layers={(): template.first._replace(slots=slots, form=form)})


def _line(slot: str, target: Template, mine: Sequence[Template], used: Collection[int]) -> Line:
    """Returns the line that fills another slot of a head, such as its bias.

    It reads the only unused array of a head in the source with this shape; otherwise it fills zeros.
    """
    array = target.first.slots[slot]
    found = [
        one.first.slots[MAIN].name
        for s, one in enumerate(mine)
        if s not in used and "head" in one.terms and one.first.slots[MAIN].shape == array.shape
    ]
    return Line(array.name, (found[0],), "") if len(found) == 1 else Line(array.name, fill="zeros")


def settled(questions: Sequence[Question], source: Tree) -> tuple[list[Line], list[Question]]:
    """Answers the questions on heads that the source itself or its configuration shows to be tied."""
    heads = {first: name for name, first in source.aliases.items() if _is_head(name)}
    lines, left = list[Line](), list[Question]()
    several = sum(one.reason == REASON for one in questions) > 1  # which is tied is unknown
    for one in questions:
        known = [n for n in one.candidates if n in heads] if one.reason == REASON else []
        why = "".join(f"the source ties {heads[name]} to it" for name in known[:1])
        if one.reason == REASON and not known and source.ties:
            known, why = (
                [*one.candidates],
                "tie_word_embeddings of its configuration ties heads to it",
            )
        rows = one.examples[0] if len(one.candidates) == len(known) == 1 else ()
        if several or not rows or any(row.fill for row in rows):
            left.append(one)
            continue
        lines += [replace(row, reason=why, confidence="certain") for row in rows]
    return lines, left


def _is_head(name: str) -> bool:
    return "head" in meaning(split(name))
