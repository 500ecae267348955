"""Patterns: array names in which letters in braces stand for the numbers of repeated layers."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

LETTERS = "ijkl"
# `{i}` stands for a number. `{_i}` stands for `_` and a number, or for nothing: Keras calls the
# layers of a class `dense`, `dense_1`, `dense_2`.
_LETTER = re.compile(rf"(\{{_?[{LETTERS}]\}})")


class Reads(Protocol):
    """The fields of a line that name the arrays it reads."""

    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def take(self) -> str: ...


def pattern(names: Mapping[tuple[int, ...], str], letters: str = LETTERS) -> str:
    """Returns one pattern for all names, with a letter for each number that varies with one rank.

    `names`: ranks of a layer in its lists -> name. `{_i}` stands for nothing or `_` and a number.
    Returns "" if names differ otherwise, or contain a letter in braces themselves.

    >>> pattern({(0,): "h.0.w", (1,): "h.1.w"}), pattern({(): "h.0.w"}), pattern({(0,): "a", (1,): "b"})
    ('h.{i}.w', 'h.0.w', '')
    >>> pattern({(0,): "h/w", (1,): "h_1/w"})
    'h{_i}/w'
    """
    if len(names) == 1:
        return next(iter(names.values()))
    if any(map(_LETTER.search, names.values())):
        return ""
    parts = [re.split(r"([./])", name) for name in names.values()]
    if len({len(one) for one in parts}) > 1:
        return ""
    made = [_joined(column, list(names), letters) for column in zip(*parts, strict=True)]
    return "" if None in made else "".join(filter(None, made))


def _joined(column: Sequence[str], ranks: Sequence[tuple[int, ...]], letters: str) -> str | None:
    """Returns the pattern of `column`, one part of each name between separators; None without one."""
    bare = min(column, key=len)
    if len(set(column)) > 1 and all(re.fullmatch(rf"{re.escape(bare)}(_\d+)?", x) for x in column):
        letter = _letter([x[len(bare) :] for x in column], ranks, letters)
        return f"{bare}{{_{letter}}}" if letter else None
    parts = [re.split(r"(\d+)", part) for part in column]
    if len({len(one) for one in parts}) > 1:
        return None
    made = []
    for texts in zip(*parts, strict=True):
        if len(set(texts)) == 1:
            made.append(texts[0])
            continue
        letter = _letter(texts, ranks, letters) if all(x.isdigit() for x in texts) else ""
        if not letter:
            return None
        made.append(f"{{{letter}}}")
    return "".join(made)


def _letter(texts: Sequence[str], ranks: Sequence[tuple[int, ...]], letters: str) -> str:
    """Returns the letter of the first rank that varies exactly with the texts; "" if none does."""
    for n, letter in zip(range(len(ranks[0])), letters, strict=False):
        pairs = set(zip(texts, (r[n] for r in ranks), strict=True))
        if len(pairs) == len(set(texts)) == len({r[n] for r in ranks}):
            return letter
    return ""


def expand(name: str, names: Collection[str]) -> dict[str, dict[str, int]]:
    """Maps each name that a pattern matches to the number of each letter, in numeric order.

    A name that equals the pattern is the only match, even if it contains braces.

    >>> expand("h.{i}.w", ["h.1.w", "h.0.w", "h.0.b"]), expand("h.{i}.w", ["h.{i}.w"])
    ({'h.0.w': {'i': 0}, 'h.1.w': {'i': 1}}, {'h.{i}.w': {}})
    >>> expand("h{_i}.w", ["h_1.w", "h.w"])
    {'h.w': {'i': 0}, 'h_1.w': {'i': 1}}
    """
    if name in names:
        return {name: {}}
    if not _LETTER.search(name):
        return {}
    parts = _LETTER.split(name)
    regex = re.compile("".join(map(_regex, parts)))
    seen = [part.strip("{_}") for part in parts if _LETTER.fullmatch(part)]
    found = []
    for one in names:
        if match := regex.fullmatch(one):
            numbers = set(zip(seen, (int(x or 0) for x in match.groups()), strict=True))
            if len(numbers) == len(set(seen)):
                found.append((one, dict(sorted(numbers))))
    return dict(sorted(found, key=lambda row: tuple(row[1].values())))


def covers(names: Iterable[str], name: str) -> bool:
    """True if one of `names` matches every name that `name` does; all may be patterns.

    >>> covers(["h.{j}.w"], "h.3.w"), covers(["h.{j}.w"], "h.{i}.w"), covers(["h.3.w"], "h.{i}.w")
    (True, True, False)
    """
    bare = _LETTER.sub(lambda x: "" if "_" in x[0] else "0", name)
    numbered = _LETTER.sub(lambda x: "_" * ("_" in x[0]) + str(1 + LETTERS.index(x[0][-2])), name)
    made = {bare, numbered}
    return any(one == name or expand(one, made).keys() == made for one in names)


def _regex(part: str) -> str:
    if not _LETTER.fullmatch(part):
        return re.escape(part)
    return r"(?:_(\d+))?" if part.startswith("{_") else r"(\d+)"


def used(
    lines: Iterable[Reads], names: Collection[str], aliases: Mapping[str, str] | None = None
) -> set[str]:
    """Returns which of `names` the lines read; a packed array only if lines take all its parts.

    `aliases`: another name of an array -> its name in `names`.
    """
    whole: set[str] = set()
    parts: dict[str, set[str]] = {}
    for line in lines:
        for one in line.sources:
            for name in expand((aliases or {}).get(one, one), names):
                if take := " ".join(x for x in line.take.split() if not x.startswith("{")):
                    parts.setdefault(name, set()).add(take)
                else:
                    whole.add(name)
    return whole | {n for n, takes in parts.items() if len(takes) == _count(takes)}


def _count(takes: Collection[str]) -> int:
    """Returns the number of parts that `takes` such as `0/3` name, here 3; 0 if it is not a number."""
    counts = [one.partition("/")[2] for one in next(iter(takes)).split()]
    return math.prod(int(count) if count.isdigit() else 0 for count in counts)
