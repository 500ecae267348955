"""Makes a plan: lines for the pairs of layers that `decide` settles, questions for other targets."""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from jaxmha.converters.matching import examples, flattened, nearest, roles, stored, tied
from jaxmha.converters.matching.arrows import Fit, guesses
from jaxmha.converters.matching.decide import ALONE, Decision, decide
from jaxmha.converters.matching.keras_names import named_alike
from jaxmha.converters.matching.layers import MAIN, is_buffer
from jaxmha.converters.matching.patterns import LETTERS, expand, pattern, used
from jaxmha.converters.matching.plan import Line, MatchPlan, Packing, Question
from jaxmha.converters.matching.readings import Arrow
from jaxmha.converters.matching.rolling import rolled, unrolled
from jaxmha.converters.matching.templates import Template, templates
from jaxmha.converters.matching.trees import Tree

_MOST = 64  # most repetitions to unroll into separate templates
_CONCATENATED = (
    "if they follow one another, add these lines or pass packing='concatenated' (--concatenated); "
)
_ONE_PACKED = (
    "nothing shows whether the packed projections follow one another or alternate head by head; "
    f"{_CONCATENATED}"
    "if they alternate in 8 heads, edit the arrows: (s o0) becomes (8 s o0), and o0 (8 o0)"
)
_BOTH_PACKED = (
    "projections are packed under two names, and nothing shows whether they follow one another in "
    f"both or alternate head by head in one; {_CONCATENATED}"
    "if 3 projections alternate in 8 heads of the target alone, edit the arrows: o0 becomes "
    "(3 8 o0) in the source and (8 3 o0) in the target"
)


def plan(source: Tree, target: Tree, packing: Packing = "ask") -> MatchPlan:
    """Makes the plan that fills the target tree from the source tree; `packing` as in `match`."""
    if packing not in ("ask", "concatenated"):
        raise ValueError(f"packing must be ask or concatenated, got {packing!r}")
    mine, theirs, decision = _decided(named_alike(source, target), target)
    packed = _guessed_pairs(mine, theirs, decision) if packing == "ask" else {}
    flats = flattened.find(mine, theirs, decision, source, target)
    pairs = {t: flats.between(mine[s], theirs[t]) for t, (s, *_) in decision.taken.items()}
    flat = {t: order for t, order in pairs.items() if order is not None}
    open_ = {t for several in packed.values() for t in several} | flat.keys()
    found = _pieces(mine, theirs, decision, decision.taken.keys() - open_)
    lines, refused = _lines(found, source, target)
    questions = [*_questions(mine, theirs, decision, source, flats), *refused]
    for several in packed.values():
        rows, refused = _lines(_pieces(mine, theirs, decision, several), source, target)
        questions += [*_of_packing(rows), *refused]
    for t, order in flat.items():
        rows, refused = _lines(_pieces(mine, theirs, decision, [t]), source, target)
        slots = {examples.pattern_of(theirs[t], slot): slot for slot in theirs[t].first.slots}
        questions += [*([flattened.question(rows, slots, order)] if rows else ()), *refused]
    tied_lines, questions = tied.settled(questions, source)
    questions = stored.asked(_merged(questions), source, target)
    rest = (source.origin, notes_of(source, target))
    made = MatchPlan((*lines, *tied_lines), tuple(questions), (), (), *rest)
    return with_unused(made, source)


def notes_of(source: Tree, target: Tree) -> tuple[str, ...]:
    """Returns the remarks made on reading both trees; those on the target say so."""
    return (*source.notes, *(f"target: {note}" for note in target.notes))


_Decided = tuple[list[Template], list[Template], Decision]


def _decided(source: Tree, target: Tree) -> _Decided:
    """Pairs the templates of both trees, as read or with the same lists in both (`rolling`).

    Returns the result that leaves fewer layers of the target undecided.
    """
    plain = templates(source), templates(target)
    found = _decided_apart(*map(roles.assigned, plain))
    if not found[2].open:
        return found
    mine, of_theirs = rolled(plain[0], plain[1], source.depends_on)
    theirs, of_mine = rolled(plain[1], plain[0], target.depends_on)
    mine, theirs = _cut(mine, of_mine), _cut(theirs, of_theirs)
    again = _decided_apart(roles.assigned(mine), roles.assigned(theirs))
    return min(found, again, key=_undecided)


def _cut(all_: Sequence[Template], lists: Sequence[Template]) -> list[Template]:
    """Returns the templates `all_`, of which those that are also in `lists` are split into layers."""
    chosen = {id(one.layers) for one in lists}
    return [x for t in all_ for x in (unrolled(t) if id(t.layers) in chosen else [t])]


def _decided_apart(mine: list[Template], theirs: list[Template]) -> _Decided:
    decision = decide(mine, theirs)
    found = mine, theirs, decision
    if decision.open and (again := _taken_apart(mine, theirs, decision)):
        return min(found, (*again, decide(*again)), key=_undecided)
    return found


def _undecided(decided: _Decided) -> int:
    """The number of target layers without a source."""
    _, theirs, decision = decided
    return sum(len(theirs[t].layers) for t in decision.open)


def with_unused(plan: MatchPlan, source: Tree) -> MatchPlan:
    """Returns the plan with `unused` and `ignored`, the weights and buffers that no line reads."""
    taken = used(plan.lines, source.arrays, source.aliases)
    taken = {source.aliases.get(name, name) for name in taken}
    rest = [a for n, a in source.arrays.items() if source.aliases.get(n, n) not in taken]
    ignored = tuple(a.name for a in rest if is_buffer(a))
    return replace(plan, unused=tuple(a.name for a in rest if not is_buffer(a)), ignored=ignored)


def _taken_apart(
    mine: Sequence[Template], theirs: Sequence[Template], decision: Decision
) -> tuple[list[Template], list[Template]] | None:
    """Splits unpaired templates by their last "#", if source and target nest lists to other depths.

    Returns all templates of source and target, to be paired again; None if there is nothing to split.
    """
    fitting = {s for s, _ in decision.fits}
    loose = [s for s in range(len(mine)) if s not in fitting]
    alone = [t for t, (candidates, _) in decision.open.items() if not candidates]
    depths = {len(mine[s].counts) for s in loose}, {len(theirs[t].counts) for t in alone}
    if not all(depths) or depths[0] == depths[1]:
        return None
    low = min(min(depths[0]), min(depths[1]))

    def apart(all_: Sequence[Template], some: Iterable[int]) -> list[Template]:
        chosen, made = set(some), []
        for n, template in enumerate(all_):
            deep = n in chosen and len(template.counts) > low
            made += unrolled(template) if deep and template.counts[-1] <= _MOST else [template]
        return made

    return apart(mine, loose), apart(theirs, alone)


@dataclass(frozen=True)
class _Piece:
    """One slot of a target template, and the slot of a source template that fills it.

    `target` and `source` are patterns of the names of their arrays, "" if no pattern fits; `targets`
    and `names` are these names.
    """

    target: str
    source: str
    arrow: Arrow
    source_part: tuple[int, int] | None
    target_part: tuple[int, int] | None
    reason: str
    confidence: str
    names: tuple[tuple[str, ...], ...]  # the source names for each target name
    targets: tuple[str, ...]
    take: str = ""


def _guessed_pairs(
    mine: Sequence[Template], theirs: Sequence[Template], decision: Decision
) -> dict[object, list[int]]:
    """Returns the targets of which only the order of packed parts is undecided.

    They are grouped by their parent modules, because one question decides for query, key and value.
    """
    found: dict[object, list[int]] = {}
    for t, (s, *_) in sorted(decision.taken.items()):
        if guesses(mine[s], theirs[t], decision.fits[s, t].arrows[MAIN]):
            found.setdefault((mine[s].path[:-1], theirs[t].path[:-1]), []).append(t)
    return found


def _of_packing(rows: Sequence[Line]) -> list[Question]:
    """Makes the question whether packed parts follow one another, as the lines `rows` assume."""
    if not rows:
        return []
    reason = _ONE_PACKED if "s" in rows[0].arrow else _BOTH_PACKED
    sources = dict.fromkeys(name for row in rows for name in row.sources)
    return [Question(rows[0].target, tuple(sources), reason, (tuple(rows),))]


def _pieces(
    mine: Sequence[Template],
    theirs: Sequence[Template],
    decision: Decision,
    chosen: Iterable[int],
) -> list[_Piece]:
    found = []
    for t in sorted(chosen):
        s, reason, confidence = decision.taken[t]
        source, target, how = mine[s], theirs[t], decision.fits[s, t]
        groups, letters, take = _grouped(source, target, how)
        for slot, arrow in how.arrows.items():
            names = {r: source.layers[r].slots[slot].name for r in sorted(source.layers)}
            targets = {r: target.layers[r].slots[slot].name for r in sorted(target.layers)}
            found.append(
                _Piece(
                    pattern(targets), pattern(names, letters), arrow, source.first.part_of(slot),
                    target.first.part_of(slot), reason, confidence,
                    tuple(tuple(names[r] for r in several) for several in groups),
                    tuple(targets.values()), take,
                )
            )  # fmt: skip
    return found


def _grouped(
    source: Template, target: Template, how: Fit
) -> tuple[list[list[tuple[int, ...]]], str, str]:
    """Returns the source ranks of each target layer, the letter of each source "#", and `Line.take`."""
    if how.split >= 0:
        order = sorted(target.layers)
        ranks = [[r[: how.split] + r[how.split + 1 :]] for r in order]
        letters = LETTERS[: how.split] + LETTERS[how.split + 1 :]
        return ranks, letters, f"{{{LETTERS[how.split]}}}/{target.counts[how.split]}"
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for one in sorted(source.layers):
        rest = tuple(r for n, r in enumerate(one) if n not in how.stacked)
        groups.setdefault(rest, []).append(one)
    free = iter(LETTERS)
    kept = {n: next(free) for n in range(len(source.counts)) if n not in how.stacked}
    letters = "".join(kept.get(n) or next(free) for n in range(len(source.counts)))
    return [groups[rest] for rest in sorted(groups)], letters, ""


def _lines(
    pieces: Sequence[_Piece], source: Tree, target: Tree
) -> tuple[list[Line], list[Question]]:
    by_target: dict[tuple[str, ...], list[_Piece]] = {}
    for piece in pieces:
        by_target.setdefault(piece.targets, []).append(piece)
    lines, questions = [], []
    for several in by_target.values():
        first = several[0]
        parts = first.target_part
        if parts is not None and len(several) < parts[1]:
            name = first.target or first.targets[0]
            line = Line(name, tuple(p.source for p in several), str(first.arrow))
            questions.append(
                Question(name, line.sources, "only some of its packed parts are known", ((line,),))
            )
            continue
        lines += _line(sorted(several, key=lambda p: p.target_part or (0, 0)), source, target)
    return lines, questions


def _line(several: Sequence[_Piece], source: Tree, target: Tree) -> list[Line]:
    """Makes one line with patterns, or one line per repetition if no pattern fits the names.

    `several`: the pieces of one target array, in the order of its packed parts.
    """
    first = several[0]
    whole = all(p.names == first.names for p in several)  # one source array packs them all
    take = ""
    if first.source_part and not (whole and first.target_part):
        take = f"{first.source_part[0]}/{first.source_part[1]}"
    pieces = [first] if whole else list(several)
    takes = f"{first.take} {take}".strip()
    base = Line("", (), str(first.arrow), takes, "", first.reason, first.confidence)
    patterns = (first.target, *(p.source for p in pieces))
    if all(patterns) and _exact(pieces, source, target):
        return [replace(base, target=first.target, sources=tuple(p.source for p in pieces))]
    count = first.take.partition("/")[2]
    return [
        replace(
            base,
            target=name,
            sources=tuple(n for p in pieces for n in p.names[i]),
            take=f"{i % int(count)}/{count} {take}".strip() if count else take,
        )
        for i, name in enumerate(first.targets)
    ]


def _exact(pieces: Sequence[_Piece], source: Tree, target: Tree) -> bool:
    """True if the patterns expand to exactly the names of these pieces, the targets in order."""
    first = pieces[0]
    if tuple(expand(first.target, target.arrays)) != first.targets:
        return False
    return all(
        set(expand(p.source, source.arrays)) == {n for x in p.names for n in x} for p in pieces
    )


def _questions(
    mine: Sequence[Template],
    theirs: Sequence[Template],
    decision: Decision,
    source: Tree,
    flats: flattened.Flats,
) -> list[Question]:
    found: dict[int, Question] = {}
    alone, taken = set[int](), {s for s, *_ in decision.taken.values()}
    for t, (candidates, reason) in sorted(decision.open.items()):
        target = theirs[t]
        left = [s for s in candidates if s not in taken]
        near = [(mine[s], target) for s in left]
        if not candidates:
            near, reason = nearest.near(mine, target, decision, reason)
        name = examples.layer_name(target)
        if not (near or candidates) and (
            head := tied.question(name, target, mine, taken, source.ties)
        ):
            found[t] = head
            continue
        rivals = sum(not {*left}.isdisjoint(some) for some, _ in decision.open.values())
        if not near or rivals > len(left) > 0:
            more, why = nearest.of_equal_sizes(mine, theirs, target, decision)
            near += more
            reason = f"{reason}; {why}" if more else reason
        near = near or [(mine[s], target) for s in candidates]
        if not near and reason == ALONE:
            alone.add(t)
            reason += nearest.shown(mine, target, decision)
        asked = examples.question(target, near, reason)
        slots = {examples.pattern_of(target, slot): slot for slot in target.first.slots}
        orders = [flats.between(*pair) for pair in near]
        found[t] = flattened.with_orders(asked, slots, orders)
    for several in _without_source(theirs, alone):
        found[several[0]] = _of_module([found.pop(t) for t in several])
    return [found[t] for t in sorted(found)]


def _without_source(theirs: Sequence[Template], alone: Collection[int]) -> list[list[int]]:
    """Groups targets without candidates, `alone`, by the outermost module that has no other layers.

    Returns groups of at least two, each of which becomes one question.
    """
    mixed = {t.path[:n] for i, t in enumerate(theirs) if i not in alone for n in range(len(t.path))}
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in sorted(alone):
        path = theirs[i].path
        module = next((path[:n] for n in range(1, len(path)) if path[:n] not in mixed), path)
        groups.setdefault(module, []).append(i)
    return [several for several in groups.values() if len(several) > 1]


def _of_module(several: Sequence[Question]) -> Question:
    """Merges questions into one for a target module in which no layer has a source."""
    mark = "/" if "/" in several[0].target else "."
    shared = os.path.commonprefix([q.target.split(mark) for q in several])  # noqa: RUF071
    return replace(
        several[0],
        target=mark.join(shared) or several[0].target,
        reason="no layer of the source has the arrays and shapes of any of its layers"
        + several[0].reason.removeprefix(ALONE),
        examples=(tuple(dict.fromkeys(line for q in several for line in q.examples[0])),),
    )


def _merged(questions: Sequence[Question]) -> list[Question]:
    """Removes duplicate questions."""
    return list(dict.fromkeys(questions))
