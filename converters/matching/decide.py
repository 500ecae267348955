"""Decides which source layer fills each target layer, or gives the reason why it cannot."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmha.converters.matching import tied
from jaxmha.converters.matching.arrows import Fit, fit
from jaxmha.converters.matching.layers import MAIN, ONLY, Layer
from jaxmha.converters.matching.plan import SEVERAL
from jaxmha.converters.matching.templates import Template, by_number
from jaxmha.converters.matching.terms import APART, contradict

_STRONG = frozenset(word for group in APART for word in group)
_ORDER, _TERMS = "the order of their numbers", "terms that only these have in common"
_SAME = "names that are in both models"
_PARENTS = "the layers next to them"
_NUMBERED = "only these are in numbered blocks"
_HALVES = (
    "the halves of its output may be a gate and what the gate multiplies, and no name shows that "
    "the gate is first in both"
)
_CONTRADICTED = "layers of these shapes contradict its name"
ALONE = "no layer of the source has its arrays and shapes"
# With more pairs in all, or more pairs whose shapes fit, deciding would take minutes.
_MOST_PAIRS, _MOST_FITS = 10**6, 30_000
_NUMBER = re.compile(r"\d+")
_List = tuple[tuple[str, ...], str]
Edge = tuple[int, int]  # index of a source template, index of a target template
_NAMES = {"shape": "certain", "name": "by name"}


@dataclass
class Decision:
    """The result of `decide`; source and target are indices of templates.

    Attributes:
      taken: target -> (source, reason, confidence); both texts as in `Line`.
      open: undecided target -> (candidate sources, reason).
      fits: (source, target) -> how the arrays fit.
    """

    taken: dict[int, tuple[int, str, str]]
    open: dict[int, tuple[tuple[int, ...], str]]
    fits: dict[Edge, Fit]


def decide(sources: Sequence[Template], targets: Sequence[Template]) -> Decision:
    """Pairs templates; a pair is decided only if names or structure exclude all alternatives.

    Raises ValueError if there are so many pairs that deciding would take minutes.
    """
    fits: dict[Edge, Fit] = {}
    why: dict[int, tuple[list[int], str]] = {}
    _demand(len(sources) * len(targets) <= _MOST_PAIRS)
    for t, target in enumerate(targets):
        for s, source in enumerate(sources):
            found = fit(source, target)
            if isinstance(found, Fit):
                fits[s, t] = found
                _demand(len(fits) <= _MOST_FITS)
            elif found is not None:
                why.setdefault(t, ([], found))[0].append(s)
    state = _State(sources, targets, set(fits), dict.fromkeys(range(len(targets)), ""))
    state.irregular()
    state.contradictions()
    changed = True
    while changed:
        before = len(state.edges)
        for strong in (True, False):
            for group in state.groups():
                state.by_words(*group, strong)
        for group in state.groups():
            state.by_names(*group)
        for group in state.groups():
            state.by_blocks(*group)
        for group in state.groups():
            state.by_order(*group)
        state.by_parents()
        changed = len(state.edges) < before
    return _settled(state, fits, why)


def _demand(fine: bool) -> None:
    if not fine:
        raise ValueError(
            "too many layers of the source have the shapes of too many layers of the model, and no "
            "repeated block explains them: write a plan yourself, and pass it as plan= (--plan)"
        )


class _State:
    """The pairs of source and target templates that are still possible."""

    def __init__(
        self,
        sources: Sequence[Template],
        targets: Sequence[Template],
        edges: set[Edge],
        reasons: dict[int, str],
    ) -> None:
        self.sources, self.targets, self.edges, self.reasons = sources, targets, edges, reasons
        self.shapes = set(edges)  # pairs that shapes alone allow
        lists = _lists(sources), _lists(targets)
        self.same = {
            (s, t)
            for s, t in edges
            if _named_alike(sources[s], targets[t]) and _counted_alike(sources[s], *lists)
        }

    def irregular(self) -> None:
        """Removes pairs with a template whose block numbers give no order (`Template.irregular`)."""
        self.edges = {
            (s, t)
            for s, t in self.edges
            if not (self.sources[s].irregular or self.targets[t].irregular)
        }

    def contradictions(self) -> None:
        """Removes pairs whose terms exclude each other (`terms.contradict`)."""
        self.edges = {
            (s, t)
            for s, t in self.edges
            if contradict(self.sources[s].terms, self.targets[t].terms) is None
        }

    def groups(self) -> list[tuple[set[int], set[int]]]:
        """Returns the connected components of the possible pairs, as (sources, targets)."""
        adjacent: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
        for s, t in self.edges:
            adjacent["s", s].add(("t", t))
            adjacent["t", t].add(("s", s))
        found, seen = [], set[tuple[str, int]]()
        for node in sorted(adjacent):
            if node in seen:
                continue
            group, todo = set[tuple[str, int]](), [node]
            while todo:
                if (one := todo.pop()) not in group:
                    group.add(one)
                    todo += adjacent[one]
            seen |= group
            found.append(({n for k, n in group if k == "s"}, {n for k, n in group if k == "t"}))
        return found

    def by_words(self, sources: set[int], targets: set[int], strong: bool) -> None:
        """Splits a group by each term that equally many of its sources and targets have.

        Sources with the term then pair only with targets with the term. `strong`: True uses only
        mutually exclusive terms, such as query and key (`APART`).
        """
        if len(sources) == len(targets) == 1:
            return
        terms = frozenset[str]().union(*(self.sources[s].terms for s in sources))
        terms = terms & _STRONG if strong else terms
        allowed = self._within(sources, targets)
        kept = set(allowed)
        for word in terms:
            mine = {s for s in sources if word in self.sources[s].terms}
            theirs = {t for t in targets if word in self.targets[t].terms}
            if len(mine) == len(theirs) and len(mine) > 0:
                kept &= {(s, t) for s, t in allowed if (s in mine) == (t in theirs)}
        self._take(kept, sources, targets, _TERMS)

    def by_names(self, sources: set[int], targets: set[int]) -> None:
        """Pairs sources and targets with equal paths, if both trees count their lists alike."""
        allowed = self._within(sources, targets)
        same = allowed & self.same
        mine, theirs = {s for s, _ in same}, {t for _, t in same}
        if len(mine) == len(theirs) == len(same) > 0:
            rest = {(s, t) for s, t in allowed if s not in mine and t not in theirs}
            self._take(same | rest, sources, targets, _SAME)

    def by_blocks(self, sources: set[int], targets: set[int]) -> None:
        """Pairs layers in numbered blocks only with each other, and all other layers likewise.

        Does nothing unless source and target have equally many numbered layers. Repeated blocks
        already pair by rank; a single block has no rank, so only its number marks its layers.
        """
        mine = {s for s in sources if _numbered(self.sources[s])}
        theirs = {t for t in targets if _numbered(self.targets[t])}
        if 0 < len(mine) == len(theirs):
            allowed = self._within(sources, targets)
            kept = {(s, t) for s, t in allowed if (s in mine) == (t in theirs)}
            self._take(kept, sources, targets, _NUMBERED)

    def by_order(self, sources: set[int], targets: set[int]) -> None:
        """Pairs the n-th source with the n-th target, if the names of either differ in one number alone."""
        if len(sources) != len(targets) or len(sources) < 2:
            return
        mine = _ranked(sources, self.sources)
        theirs = _ranked(targets, self.targets)
        if mine is None or theirs is None:
            return
        kept = set(zip(mine, theirs, strict=True)) & self.edges
        self._take(kept, sources, targets, _ORDER)

    def by_parents(self) -> None:
        """Removes pairs whose parent modules are already paired with other modules."""
        of_sources = Counter(s for s, _ in self.edges)
        of_targets = Counter(t for _, t in self.edges)
        pairs = [(s, t) for s, t in self.edges if of_sources[s] == of_targets[t] == 1]
        mine: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
        theirs: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
        for s, t in pairs:
            a, b = self.sources[s].path[:-1], self.targets[t].path[:-1]
            mine[a].add(b)
            theirs[b].add(a)
        known = {
            a: next(iter(b)) for a, b in mine.items()
            if len(b) == 1 and theirs[next(iter(b))] == {a} and a and next(iter(b))
        }  # fmt: skip
        back = {b: a for a, b in known.items()}
        for group in self.groups():
            if len(group[0]) == len(group[1]) == 1:
                continue
            kept = set()
            for s, t in self._within(*group):
                a, b = self.sources[s].path[:-1], self.targets[t].path[:-1]
                if known.get(a, b) == b and back.get(b, a) == a:
                    kept.add((s, t))
            self._take(kept, *group, _PARENTS)

    def _within(self, sources: set[int], targets: set[int]) -> set[Edge]:
        return {(s, t) for s, t in self.edges if s in sources and t in targets}

    def _take(self, kept: set[Edge], sources: set[int], targets: set[int], why: str) -> None:
        """Reduces a group to the pairs `kept`, if all targets can then still have sources of their own.

        Where sources are too few anyway, it always does. `why`: the reason for targets that lose pairs.
        """
        here = self._within(sources, targets)
        full = len(sources) >= len(targets)
        if (
            kept == here
            or (full and {t for _, t in kept} != targets)
            or not _covers(kept, targets, full)
        ):
            return
        self.edges = self.edges - here | kept
        for t in {t for s, t in here - kept}:
            self.reasons[t] = why


def _numbered(template: Template) -> bool:
    """True if a path has the number of a block: a part such as `0`, or a "#" (see `Template`)."""
    return any(part.isdigit() or "#" in part for part in template.path)


def _lists(templates: Sequence[Template]) -> Mapping[_List, set[str]]:
    """The numbered parts of all paths, by the path before each and its name with "#" for numbers."""
    found: dict[_List, set[str]] = defaultdict(set)
    for path in {layer.path for template in templates for layer in template.layers.values()}:
        for n, part in enumerate(path):
            found[path[:n], _NUMBER.sub("#", part)].add(part)
    return found


def _counted_alike(
    template: Template, mine: Mapping[_List, set[str]], theirs: Mapping[_List, set[str]]
) -> bool:
    """True if the lists of a template have the same numbers in both trees.

    Others may begin at 0 in one tree and at 1 in the other: an equal number then says nothing.
    """
    paths = [layer.path for layer in template.layers.values()]
    places = {(path[:n], _NUMBER.sub("#", x)) for path in paths for n, x in enumerate(path)}
    return all(mine.get(one) == theirs.get(one) for one in places if "#" in one[1])


def _covers(edges: set[Edge], targets: set[int], full: bool) -> bool:
    """True if each target can have its own source, or if sources are too few anyway (not `full`)."""
    return not full or _matching(edges, targets) is not None


def _matching(edges: set[Edge], targets: set[int]) -> dict[int, int] | None:
    """Maps every target to a source of its own; None if that is impossible or there are no pairs."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    if not edges:
        return None
    rows, columns = sorted(targets), sorted({s for s, _ in edges})
    cost = np.ones((len(rows), len(columns)))
    for s, t in edges:
        if t in targets:
            cost[rows.index(t), columns.index(s)] = 0
    if len(columns) < len(rows):
        return None
    chosen = linear_sum_assignment(cost)
    if cost[chosen].sum() > 0:
        return None
    return {rows[i]: columns[j] for i, j in zip(*map(list, chosen), strict=True)}


def _ranked(numbers: set[int], templates: Sequence[Template]) -> list[int] | None:
    """Sorts indices of templates by the one number that differs in their names; None if more does."""
    several = sorted(numbers)
    order = by_number([templates[n] for n in several])
    return None if order is None else [several[n] for n in order]


def _settled(
    state: _State, fits: dict[Edge, Fit], why: Mapping[int, tuple[list[int], str]]
) -> Decision:
    taken: dict[int, tuple[int, str, str]] = {}
    groups = state.groups()
    for sources, targets in groups:
        edges = {(s, t) for s, t in state.edges if t in targets}
        if (found := _matching(edges, targets)) is None:
            continue
        if len(sources) == len(targets) and all(
            _matching(edges - {(s, t)}, targets) is None for t, s in found.items()
        ):
            taken |= {t: (s, *_reason(state, s, t)) for t, s in found.items()}
    paired = {t for _, t in state.edges}
    everything = {
        t for t, x in enumerate(state.targets) if t in paired or not tied.is_head(x, state.sources)
    }
    if _matching(state.edges, everything) is None:
        # Some target has no source: the trees differ, so shapes alone prove no pair.
        taken = {t: x for t, x in taken.items() if _agree(state, x[0], t)}
    taken = {t: (s, reason, _NAMES[kind]) for t, (s, reason, kind) in taken.items()}
    opened = {}
    for t in range(len(state.targets)):
        if t not in taken:
            opened[t] = _open(state, t, why)
    return Decision(taken, opened, fits)


def _agree(state: _State, s: int, t: int) -> bool:
    """True if more than shapes supports a pair: a common term, equal names, order, or parents."""
    source, target = state.sources[s], state.targets[t]
    named = _named_alike(source, target) or source.terms & target.terms
    return bool(named) or state.reasons[t] in (_ORDER, _PARENTS)


def _named_alike(source: Template, target: Template) -> bool:
    """True if the paths are equal and a user chose them: a library's counts (`dense_1`) prove nothing."""
    counted = source.automatic or target.automatic or source.unordered or target.unordered
    return source.path == target.path and any(source.path) and not counted


def _reason(state: _State, s: int, t: int) -> tuple[str, str]:
    rivals = [e for e in state.shapes if (e[0] == s) != (e[1] == t)]
    source, target = state.sources[s], state.targets[t]
    placed = source.placed or target.placed
    if source.halves and target.halves and source.path[-1] != target.path[-1]:
        placed = _HALVES
    named = source.first.form.startswith(ONLY) or _by_path(source.first, target.first)
    if not rivals and not placed and not named:
        return "the only layers of these shapes", "shape"
    common = sorted(source.terms & target.terms)
    shown = f"both are {', '.join(common)}" if common else ""
    reason = "; ".join(x for x in (shown, placed or state.reasons[t]) if x)
    other = _SAME if named else "every other pair contradicts a name"
    return reason or other, "name"


def _by_path(source: Layer, target: Layer) -> bool:
    """True if only their paths and torch show that layers of other axes in other libraries are one."""
    mine, theirs = source.slots[MAIN], target.slots[MAIN]
    return "no" in (source.form, target.form) and not (mine.owner and theirs.owner)


def _open(
    state: _State, t: int, why: Mapping[int, tuple[list[int], str]]
) -> tuple[tuple[int, ...], str]:
    left = tuple(sorted(s for s, other in state.edges if other == t))
    fitting = sorted(s for s, other in state.shapes if other == t)
    by_shape = tuple(s for s in fitting if _contradiction(state, s, t) is None)
    near = [state.targets[t], *(state.sources[s] for s in by_shape)]
    if irregular := next((one.irregular for one in near if one.irregular), ""):
        return by_shape, irregular
    if len(left) > 1:
        near = [state.targets[t], *(state.sources[s] for s in left)]
        return left, next((one.unordered for one in near if one.unordered), SEVERAL)
    if left:
        return left, "no name shows that these belong together"
    if named := tuple(s for s in why.get(t, ([], ""))[0] if _contradiction(state, s, t) is None):
        return named, why[t][1]
    if by_shape:
        return by_shape, "another target takes the layers of these shapes, by names"
    if fitting and (pair := _contradiction(state, fitting[0], t)):
        return (), f"{_CONTRADICTED}: {pair[0]} is not {pair[1]}"
    return (), ALONE


def _contradiction(state: _State, s: int, t: int) -> tuple[str, str] | None:
    return contradict(state.sources[s].terms, state.targets[t].terms)
