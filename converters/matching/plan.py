"""Plans that give the source arrays of each target array, as data, TOML and a report."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxmha import notebook
from jaxmha.checkpoint import toml_text
from jaxmha.checkpoint.errors import printable
from jaxmha.converters.matching import patterns

VERSION = 1
Packing = Literal["ask", "concatenated"]


@dataclass(frozen=True)
class Line:
    """How one target array is filled, or one array per value of `{i}` and `{j}` in a pattern.

    Attributes:
      target: name of the target array, or a pattern. sources: names or patterns of the source
        arrays, which are stacked if there are several.
      arrow: einops pattern from source to target; "" copies. take: `0/3` takes the first of three
        packed parts; `0/3 1/2` takes the second of two parts of it.
      fill: "zeros" fills the target with zeros; `sources` is then empty.
      reason: why this source was chosen. confidence: "certain" or "by name"; "" in an edited plan.
    """

    target: str
    sources: tuple[str, ...] = ()
    arrow: str = ""
    take: str = ""
    fill: str = ""
    reason: str = ""
    confidence: str = ""


UNKNOWN = "?"  # stands for the target's axes in an arrow that the user has to complete
SEVERAL = "several layers have these shapes, and no name decides"
_TAKEN = (
    "every layer of these shapes fills another: correct a line, let two layers share a source, or, if "
    "the source lacks it, fill it with zeros (fill='zeros')"
)
_LAST = "one layer of these shapes is left, and no name shows that these belong together"


@dataclass(frozen=True)
class Question:
    """A target layer whose source is undecided.

    Attributes:
      target: name or pattern of a layer. candidates: source layers with matching shapes.
      reason: why no source was chosen.
      examples: lines that would answer it: a tuple per candidate; or a single tuple, if all candidates
        are read together or there are none.
    """

    target: str
    candidates: tuple[str, ...]
    reason: str
    examples: tuple[tuple[Line, ...], ...]

    @property
    def line(self) -> str:
        """The lines that answer the question if its source is the first candidate, as TOML."""
        return "\n".join(map(shown, self.examples[0]))

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names or patterns of the layer's arrays."""
        return tuple(line.target for line in self.examples[0])

    def after(self, lines: Sequence[Line], unused: Collection[str]) -> "Question | None":
        """Returns the question without all that `lines` answer; None if they fill all its arrays.

        `unused`: source arrays that no earlier line reads. A candidate is dropped if lines for other
        layers read its arrays. Examples keep only the lines for arrays that `lines` do not fill.
        """
        own = [x for x in lines if any(_meet(x.target, name) for name in self.arrays)]
        filled = [line.target for line in own]
        if all(patterns.covers(filled, name) for name in self.arrays):
            return None
        used = patterns.used([x for x in lines if x not in own], unused)
        examples = tuple(
            tuple(x for x in several if not patterns.covers(filled, x.target))
            for several in self.examples
        )
        return replace(self, examples=examples)._without(used)

    def _without(self, names: Collection[str]) -> "Question":
        """Returns the question without the candidates whose arrays are in `names`.

        If none would be left, all are kept, and the reason says that all fill other layers.
        """
        if len(self.candidates) != len(self.examples):
            return self
        left = [
            (candidate, lines)
            for candidate, lines in zip(self.candidates, self.examples, strict=True)
            if not any(patterns.expand(x, names) for line in lines for x in line.sources)
        ]
        if not left:
            return replace(self, reason=_TAKEN)
        reason = self.reason.replace(SEVERAL, _LAST) if len(left) == 1 else self.reason
        candidates, examples = zip(*left, strict=True)
        return replace(self, reason=reason, candidates=candidates, examples=examples)

    def case(self) -> str:
        """Returns a phrase for the case in which the lines of the first example are right."""
        several = len(self.candidates) == len(self.examples)
        if not self.candidates and all(line.fill for line in self.examples[0]):
            return "if the source lacks it, to fill it with zeros"
        return "for example" + (f", if it is {self.candidates[0]}" if several else "")

    def advice(self) -> str:
        """Returns text that tells how to answer by the first example, in Python and in TOML."""
        rows = "".join(f"    {_call(line)},\n" for line in self.examples[0])
        return (
            f"Add lines; {self.case()}:\nplan = plan.with_lines(\n{rows})\n"
            f"or in the TOML file of the plan:\n{self.line}"
        )


@dataclass(frozen=True)
class MatchPlan:
    """How the arrays of a source fill a target.

    Attributes:
      lines: one line per target array, or per pattern of repeated arrays.
      questions: targets that are not decided; `load_into` raises until lines fill them.
      unused: source arrays that no line reads. ignored: unread buffers, which models recompute.
      source: for a model from a hub, its address with the commit. The plan loads this commit if the
        same model is named without a revision.
      notes: remarks, such as on tensors that were dequantised; TOML does not store them.
    """

    lines: tuple[Line, ...]
    questions: tuple[Question, ...] = ()
    unused: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        rows = [
            (
                one.target,
                ", ".join(one.sources) or one.fill,
                one.arrow,
                *_why(one).partition(": ")[::2],
            )
            for one in self.lines
        ]
        asked = [
            (one.target, ", ".join(one.candidates), "", "?", one.reason) for one in self.questions
        ]
        caption = f"{len(rows)} arrays filled, {len(asked)} questions, {len(self.unused)} unused"
        columns = ("target", "sources", "arrow", "confidence", "reason")
        return notebook.table(caption, columns, [*asked, *rows])

    def to_toml(self) -> str:
        """Returns the plan as TOML that people can edit; `Plan.from_toml` parses it."""
        text = ["# Edit, then pass it as plan= or --plan.", f"version = {VERSION}"]
        text += [f"source = {toml_text.quoted(self.source)}"] * bool(self.source) + [""]
        for question in self.questions:
            text += [f"# ? {printable(question.target)}: {printable(question.reason)}"]
            text += [f"#   candidates: {', '.join(map(printable, question.candidates))}"]
            text += [f"#   {printable(question.case())}:"]
            text += [f"# {line}" for line in question.line.splitlines()] + [""]
        for name in self.unused:
            text += [f"# unused: {printable(name)}"]
        for line in self.lines:
            text += ["", *_toml(line)]
        return "\n".join(text) + "\n"

    def to_python(self) -> str:
        """Returns Python code that defines `PLAN` with the lines of the plan, for use in a program.

        >>> print(MatchPlan((Line("a/kernel", ("a.weight",), "o i -> i o"),)).to_python())
        from jaxmha.converters.matching import Line, Plan
        <BLANKLINE>
        PLAN = Plan(
            (
                Line('a/kernel', ('a.weight',), arrow='o i -> i o'),
            )
        )
        """
        rows = [f"        {_call(line)}," for line in self.lines]
        close = ["    ),", f"    source={self.source!r},", ")"] if self.source else ["    )", ")"]
        head = "from jaxmha.converters.matching import Line, Plan"
        return "\n".join([head, "", "PLAN = Plan(", "    (", *rows, *close])

    @staticmethod
    def from_toml(text: str) -> "MatchPlan":
        """Parses the TOML of a plan; `checkpoint.toml_text.read` reads its text from a file.

        Raises ValueError if the text is not TOML, or has keys or types that no plan has.

        >>> plan = MatchPlan((Line("a/kernel", ("a.weight",), "o i -> i o"),))
        >>> MatchPlan.from_toml(plan.to_toml()) == plan
        True
        """
        content = toml_text.loads(text, ("[[array]]",))
        if content.get("version") != VERSION or content.keys() - {"version", "source", "array"}:
            raise ValueError(f"the plan must have version = {VERSION} and tables [[array]]")
        source = content.get("source", "")
        if not isinstance(source, str):
            raise ValueError("the source of the plan must be a string")  # noqa: TRY004
        tables = content.get("array", [])
        if not isinstance(tables, list):
            raise ValueError("arrays are written as [[array]]")  # noqa: TRY004
        found = (_line(n, table) for n, table in enumerate(tables, 1))
        return MatchPlan(tuple(found), source=source)

    def with_lines(self, *lines: Line) -> "MatchPlan":
        """Returns a plan in which these lines replace questions and lines for the same targets."""
        given = [line.target for line in lines]
        every = (*(x for x in self.lines if not patterns.covers(given, x.target)), *lines)
        used = patterns.used(every, self.unused)
        left = (q.after(every, self.unused) for q in self.questions)
        return replace(
            self,
            lines=every,
            questions=tuple(filter(None, left)),
            unused=tuple(name for name in self.unused if name not in used),
        )

    def __str__(self) -> str:
        """The report: every line with its reason, then questions, notes and arrays left out."""
        rows = [
            f"{x.target} <- {' + '.join(x.sources) or x.fill}  [{x.arrow}{' take ' + x.take if x.take else ''}]"
            f"  {_why(x)}"
            for x in self.lines
        ]
        rows += [
            f"? {q.target}: {q.reason}; candidates: {', '.join(q.candidates) or 'none'}"
            for q in self.questions
        ]
        rows += [f"note: {note}" for note in self.notes]
        rows += [f"unused: {name}" for name in self.unused]
        rows += [f"buffer, not carried over: {name}" for name in self.ignored]
        return "\n".join(map(printable, rows))


def _meet(a: str, b: str) -> bool:
    """True if one of two names or patterns matches all that the other does."""
    return patterns.covers([a], b) or patterns.covers([b], a)


def _why(line: Line) -> str:
    """Returns confidence and reason of a line; "by you" without confidence, as if a user wrote it."""
    return ": ".join(filter(None, (line.confidence or "by you", line.reason)))


def _call(line: Line) -> str:
    """Returns Python code that makes this line, without reason and confidence."""
    more = "".join(
        f", {key}={x!r}" for key in ("arrow", "take", "fill") if (x := getattr(line, key))
    )
    return f"Line({line.target!r}, {line.sources!r}{more})"


def shown(line: Line) -> str:
    """Formats a line as a TOML table."""
    return "\n".join(_toml(line))


def _toml(line: Line) -> list[str]:
    text = ["[[array]]", f"to = {toml_text.quoted(line.target)}"]
    if len(line.sources) == 1:
        text.append(f"from = {toml_text.quoted(line.sources[0])}")
    elif line.sources:
        text.append(f"from = [{', '.join(map(toml_text.quoted, line.sources))}]")
    for key in ("arrow", "take", "fill", "reason", "confidence"):
        if value := getattr(line, key):
            text.append(f"{key} = {toml_text.quoted(value)}")
    return text


def _line(number: int, table: Mapping[str, Any]) -> Line:
    known = {"to", "from", "arrow", "take", "fill", "reason", "confidence"}
    if not isinstance(table, dict) or table.keys() - known or "to" not in table:
        raise ValueError(f"array {number}: expected the keys {', '.join(sorted(known))}, with `to`")
    sources = table.get("from", [])
    sources = [sources] if isinstance(sources, str) else sources
    rest = {key: table[key] for key in known - {"to", "from"} if key in table}
    texts = [table["to"], *sources, *rest.values()] if isinstance(sources, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"array {number}: every value must be a string, `from` also a list of them"
        )
    if not sources and rest.get("fill") != "zeros":
        raise ValueError(f'array {number}: expected `from`, or fill = "zeros"')
    return Line(table["to"], tuple(sources), **rest)
