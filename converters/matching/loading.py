"""Computes the arrays of a target model from a source by a plan, one at a time."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange

from jaxmha.checkpoint import Lazy, TensorInfo, hub
from jaxmha.checkpoint.errors import listed
from jaxmha.converters.discovery import adapters
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.matching import functions, head_counts, head_orders, lines, recurrent, stored
from jaxmha.converters.matching.layers import is_buffer
from jaxmha.converters.matching.patterns import expand
from jaxmha.converters.matching.plan import UNKNOWN, Line, MatchPlan, Packing, Question
from jaxmha.converters.matching.stated import Side
from jaxmha.converters.matching.trees import Array, Tree
from jaxmha.dims import bind, parse

POLICIES = ("refuse", "keep")


@contextmanager
def prepared(
    model: Any,
    source: Any,
    plan: MatchPlan | None,
    *,
    dtype: str | None = None,
    unused: str = "refuse",
    missing: str = "refuse",
    packing: Packing = "ask",
) -> Iterator[Lazy]:
    """Yields a mapping of the arrays to load into a model, in their final dtypes.

    Each array is computed from the source when it is looked up.

    Args:
      model, source: target and source, as in `match`.
      plan: None makes a plan with `match`. packing: as in `match`; used only without a plan.
      dtype: dtype of every floating array; None uses the model's dtypes, and raises if one cannot
        represent all values of the source's dtype.
      unused: "keep" leaves out source arrays that the plan does not use; "refuse" raises.
      missing: "keep" does not change model arrays without a line in the plan, also where the plan has a
        question without candidates; "refuse" raises.

    Raises:
      ValueError: a question is open, arrays are unused or missing, a shape, head count or dtype is
        wrong, or attention of the model states other settings than that of the source.
    """
    check_policy("unused", unused)
    check_policy("missing", missing)
    mine, theirs = stored.read(_pinned(source, plan), model, "model")
    try:
        own = lines.plan(mine, theirs, packing) if plan is None else plan
        refuse_questions(own, theirs, missing)
        todo, _ = checked_jobs(own, mine, theirs)
        _refuse_rest(own, mine, theirs, todo, unused, missing)
        arrays = theirs.arrays
        del theirs  # it keeps the model's own values, which will be replaced: frees their memory
        info = {}
        for name, (line, names) in todo.items():
            _bound(line, [mine.arrays[n].shape for n in names], arrays[name])
            kept = mine.arrays[names[0]].dtype if names else arrays[name].dtype
            info[name] = TensorInfo(arrays[name].shape, _dtype(kept, arrays[name], dtype))

        def load(name: str) -> NDArray:
            line, names = todo[name]
            return value(line, names, mine, arrays[name]).astype(info[name].dtype, copy=False)

        yield Lazy(info, load)
    finally:
        mine.close()


def with_unused(plan: MatchPlan, source: Any, model: Any) -> MatchPlan:
    """Returns a plan of the user's with the `unused`, `ignored` and `notes` of this source and model.

    Raises ValueError as `checked_jobs` does.
    """
    mine, theirs = stored.read(_pinned(source, plan), model)
    try:
        _, notes = checked_jobs(plan, mine, theirs)
        notes = (*lines.notes_of(mine, theirs), *notes)
        return replace(lines.with_unused(plan, mine), notes=notes)
    finally:
        mine.close()


def check_policy(name: str, policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"{name} must be {' or '.join(POLICIES)}, got {policy!r}")


def _pinned(source: Any, plan: MatchPlan | None) -> Any:
    """Returns the plan's address, which names a commit, if `source` is this model without revision.

    Returns any other source unchanged.
    """
    if (
        plan is not None
        and hub.is_address(source)
        and str(source).endswith(hub.model_of(plan.source).removeprefix(hub.SCHEME) or " ")
    ):
        return plan.source
    return source


def refuse_questions(plan: MatchPlan, target: Tree, missing: str, hint: str = "") -> None:
    """Raises ValueError if the plan has questions on arrays of the target that no line fills.

    `missing`: "keep" passes questions without a candidate, whose arrays the source lacks. `hint` is
    appended to the message.
    """
    open_ = [q for q in plan.questions if q.candidates or missing == "refuse"]
    names = target.arrays if open_ else ()
    filled = {name for line in plan.lines for name in expand(line.target, names)}
    asked = [q for q in open_ if not _targets(q, names) <= filled]
    if asked:
        first = asked[0]
        more = f" (and {len(asked) - 1} more)" * (len(asked) > 1)
        raise ValueError(
            f"the plan has an open question{more}: {first.target}: {first.reason}; candidates: "
            f"{', '.join(first.candidates) or 'none'}. {first.advice()}{hint}"
        )


def _targets(question: Question, names: Collection[str]) -> set[str]:
    """Returns the names of the target arrays that a question asks about."""
    return {name for one in question.arrays for name in expand(one, names) or [one]}


def checked_jobs(
    plan: MatchPlan, source: Tree, target: Tree
) -> tuple[dict[str, tuple[Line, list[str]]], tuple[str, ...]]:
    """Returns the `jobs` as a dict, and notes on settings that cannot be compared.

    Raises ValueError as `jobs` does, or if head counts or settings of attention layers differ.
    """
    todo = dict(jobs(plan, source, target))
    mine, theirs = _side(source), _side(target)
    head_counts.refuse(todo, mine, theirs)
    sources = {name: names for name, (_, names) in todo.items()}
    orders = head_orders.of_heads(todo, source, target, value)
    found = functions.compare(sources, mine.stated, theirs.stated, orders)
    return todo, (*found, *recurrent.notes({n for x in sources.values() for n in x}, source))


def _side(tree: Tree) -> Side:
    return Side(tree.stated(), {name: a.shape for name, a in tree.arrays.items()})


def jobs(
    plan: MatchPlan, source: Tree, target: Tree
) -> Iterator[tuple[str, tuple[Line, list[str]]]]:
    """Yields (target name, (line, source names in the order of stacking)) for each target array.

    Raises ValueError if a name or pattern of a line matches no array, or if source and target have
    different numbers of the layers that a letter of its patterns counts.
    """
    for line in plan.lines:
        if UNKNOWN in line.arrow:
            raise ValueError(
                f"the arrow of {line.target}, {line.arrow}, is to be completed: expected the axes of "
                f"the target in the place of {UNKNOWN}"
            )
        targets = expand(line.target, target.arrays)
        if not targets:
            raise ValueError(f"the plan fills {line.target}, and the model has no such array")
        found = [_sources(one, source) for one in line.sources]
        for one, several in zip(line.sources, found, strict=True):
            if not several:
                raise ValueError(f"the plan reads {one}, and the source has no such array")
        places = _ranks(targets)
        for name, place in places.items():
            names = []
            for several in found:
                ranks = _ranks(several)
                names += [
                    n for n, r in ranks.items() if all(r.get(x, v) == v for x, v in place.items())
                ]
                if {r[x] for r in ranks.values() for x in place if x in r} != {
                    r[x]
                    for r in places.values()
                    for x in place
                    if any(x in o for o in ranks.values())
                }:
                    raise ValueError(
                        f"{line.target} stands for {len(places)} arrays, and {line.sources[0]} for "
                        f"{len(ranks)}: the source has another number of layers"
                    )
            take = line.take
            for letter, rank in place.items():
                take = take.replace(f"{{{letter}}}", str(rank))
            yield name, (replace(line, take=take), names)


def _sources(name: str, source: Tree) -> Mapping[str, Mapping[str, int]]:
    """Maps each source array that `name`, a name or pattern, matches to the number of each letter.

    If none matches, `name` is matched with the names that the arrays have in a Keras file.
    """
    found = expand(_real(name, source), source.arrays)
    in_file = {} if found else expand(name, source.saved)
    return found or {source.saved[one]: numbers for one, numbers in in_file.items()}


def _real(name: str, source: Tree) -> str:
    """Returns the name under which the source lists an array, of which `name` may be another name."""
    return source.aliases.get(name, name)


def _ranks(found: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Replaces each number of a letter by its rank among all of that letter, in each found name.

    So layers 0, 1, 2 of one tree are those numbered 1, 2, 3 in the other.
    """
    letters = {x for numbers in found.values() for x in numbers}
    order = {x: sorted({numbers[x] for numbers in found.values()}) for x in letters}
    return {
        name: {x: order[x].index(n) for x, n in numbers.items()} for name, numbers in found.items()
    }


def _refuse_rest(
    plan: MatchPlan, source: Tree, target: Tree, jobs: Mapping[str, Any], unused: str, missing: str
) -> None:
    """Raises RestError if an array is in no line, unless `unused` or `missing`, its policy, is "keep"."""
    used = {_real(name, source) for _, names in jobs.values() for name in names}
    rest = [n for n, a in source.arrays.items() if _real(n, source) not in used]
    left = [n for n in rest if not is_buffer(source.arrays[n]) and not _is_tied(n, source, target)]
    lacking = [n for n, a in target.arrays.items() if n not in jobs and not is_buffer(a)]
    if left and unused == "refuse":
        fact = f"the model has no place for {listed(left)}"
        out = "leaves them out"
        if adapted := adapters.describe(left):
            fact, out = f"{fact}; {adapted}", "fills the model with the base alone"
        fact = "; ".join((fact, *recurrent.notes(used, source)))
        raise RestError(fact, f"unused='keep' {out}", f"--keep-unused {out}")
    if lacking and missing == "refuse":
        fact = f"the plan has nothing for {listed(lacking)}"
        kept = "leaves them as they are"
        raise RestError(fact, f"missing='keep' {kept}", f"--keep-missing {kept}")


def _is_tied(name: str, source: Tree, target: Tree) -> bool:
    """True if the model shares this array with another, and the source has equal values for both.

    Then nothing is lost if no line reads it.
    """
    first = target.aliases.get(name)
    return (
        first is not None
        and first in source.arrays
        and source.arrays[name].shape == source.arrays[first].shape
        and np.array_equal(source.load(name), source.load(first))
    )


class RestError(ValueError):
    """Arrays are in no line of the plan. `for_command`: the message with the command's options."""

    def __init__(self, fact: str, advice: str, option: str) -> None:
        super().__init__(f"{fact}; {advice}")
        self.for_command = f"{fact}: add lines to the plan (jaxmha match --save); {option}"


_NUMBER = re.compile(r"\b(?!1\b)\d+\b")


class _Bound(NamedTuple):
    """A checked `Line.arrow`: size of each letter, sizes of stacked axes, indices of the part to take."""

    sizes: dict[str, int]
    stacked: tuple[int, ...]
    part: tuple[int, ...]


def _bound(line: Line, shapes: Sequence[tuple[int, ...]], target: Array) -> _Bound:
    """Returns the sizes by which the arrow of a line fits these shapes; ValueError if it does not."""
    if line.fill:
        return _Bound({}, (), ())
    shown = f"{target.name} <- {', '.join(line.sources)}"
    try:
        return _letters(line, shapes, target.shape)
    except ValueError as error:
        raise ValueError(f"{shown} by {line.arrow or 'a copy'}: {error}") from error


def _letters(line: Line, shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> _Bound:
    if len(set(shapes)) > 1:
        raise ValueError(f"the stacked arrays have shapes {', '.join(map(str, set(shapes)))}")
    if not line.arrow:
        if list(shapes) != [shape]:
            raise ValueError(
                f"expected one array of shape {shape}, got {', '.join(map(str, shapes))}"
            )
        return _Bound({}, (), ())
    taken, arrow, filled = (x.strip() for x in _numbered(line.arrow).partition("->"))
    if not arrow:
        raise ValueError("expected axes before and after ->")
    index, parts = _take(line)
    whole = (*parts, *shape)
    lead = len(parse(taken)) - len(shapes[0]) if len(shapes) > 1 else 0
    letters = [
        {x for group in parse(axes) for x in group if not x.isdigit()} for axes in (taken, filled)
    ]
    if letters[0] != letters[1]:
        only = ", ".join(sorted(letters[0] ^ letters[1]))
        raise ValueError(f"{only} is on one end of the arrow alone")
    sizes = {group[0]: n for group, n in zip(parse(filled), parts, strict=False)}
    sizes |= {x: int(x[4:]) for x in letters[0] if re.fullmatch(r"axis\d+", x)}
    for axes, known in ((parse(taken)[lead:], shapes[0]), (parse(filled), whole)):
        if len(axes) == len(known):
            alone = {g[0]: n for g, n in zip(axes, known, strict=True) if len(g) == 1}
            sizes |= {x: n for x, n in alone.items() if not x.isdigit()}
    bind("the target", whole, filled, sizes)
    if lead < 0 or (len(shapes) > 1 and not lead):
        raise ValueError(f"{len(shapes)} arrays need an axis before the axes of one array")
    left = len(shapes) // math.prod(sizes.get(g[0], 1) for g in parse(taken)[:lead])
    stacked = tuple(sizes.get(group[0], left) for group in parse(taken)[:lead])
    if len(shapes) > 1 and math.prod(stacked) != len(shapes):
        raise ValueError(f"{len(shapes)} arrays do not fill axes of {stacked}")
    bind("the source", (*stacked, *shapes[0]), taken, sizes)
    return _Bound(sizes, stacked, index)


def _numbered(arrow: str) -> str:
    """Returns an arrow with `axis8` for the size 8, and so on: einops allows no number but 1."""
    return _NUMBER.sub(r"axis\g<0>", arrow)


def _take(line: Line) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the indices and the numbers of the parts to take; () and () for the whole array."""
    found = [re.fullmatch(r"(\d+)/(\d+)", one) for one in line.take.split()]
    pairs = [(int(x[1]), int(x[2])) for x in found if x]
    if len(pairs) < len(found) or any(index >= parts for index, parts in pairs):
        raise ValueError(f"take must be like 0/3, or 0/3 1/2 for two axes, got {line.take!r}")
    return tuple(index for index, _ in pairs), tuple(parts for _, parts in pairs)


def value(line: Line, names: Sequence[str], source: Tree, target: Array) -> NDArray:
    """Computes one array of the target from the source arrays of its line."""
    if line.fill:
        return np.zeros(target.shape, np.float32)
    arrays = [source.load(name) for name in names]
    found = _bound(line, [array.shape for array in arrays], target)
    if not line.arrow:
        return arrays[0]
    array = (
        np.stack(arrays).reshape(*found.stacked, *arrays[0].shape) if found.stacked else arrays[0]
    )
    made: NDArray = rearrange(array, _numbered(line.arrow), **found.sizes)[found.part]
    return made


def _dtype(source: str, target: Array, dtype: str | None) -> np.dtype[Any]:
    """Returns the dtype to fill a target with: `dtype` for floating arrays, else that of the target.

    Raises ValueError if the latter cannot represent all values of the dtype `source`.
    """
    floating = "float" in source and "float" in target.dtype
    wanted = dtype if dtype and floating else target.dtype
    kind = np.dtype(wanted)
    if (dtype is None or not floating) and not np.can_cast(np.dtype(source), kind):
        raise ValueError(
            f"{target.name}: {wanted}, the dtype of the model, does not hold all values of {source}: "
            f"pass dtype={wanted!r} (--dtype {wanted}) to round them"
        )
    return kind
