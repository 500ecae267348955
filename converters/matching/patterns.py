"""Patterns: array names in which letters in braces stand for the numbers of repeated layers."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

LETTERS = "ijkl"
_LETTER = re.compile(rf"(\{{[{LETTERS}]\}})")


class Reads(Protocol):
    """The fields of a line that name the arrays it reads."""

    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def take(self) -> str: ...


def pattern(names: Mapping[tuple[int, ...], str], letters: str = LETTERS) -> str:
    """Returns the pattern of names by ranks: each number that varies with one rank is a letter.

    Returns "" if names differ otherwise, or contain a letter in braces themselves.

    >>> pattern({(0,): "h.0.w", (1,): "h.1.w"}), pattern({(): "h.0.w"}), pattern({(0,): "a", (1,): "b"})
    ('h.{i}.w', 'h.0.w', '')
    """
    if len(names) == 1:
        return next(iter(names.values()))
    if any(map(_LETTER.search, names.values())):
        return ""
    parts = [re.split(r"(\d+)", name) for name in names.values()]
    if len({len(one) for one in parts}) > 1:
        return ""
    made = []
    for column in zip(*parts, strict=True):
        if len(set(column)) == 1:
            made.append(column[0])
            continue
        follows = [
            letter
            for n, letter in zip(range(len(next(iter(names)))), letters, strict=False)
            if all(x.isdigit() for x in column)
            and len(set(zip(column, (r[n] for r in names), strict=True))) == len(set(column))
            and len({r[n] for r in names}) == len(set(column))
        ]
        if not follows:
            return ""
        made.append(f"{{{follows[0]}}}")
    return "".join(made)


def expand(name: str, names: Collection[str]) -> dict[str, dict[str, int]]:
    """Maps each name that a pattern matches to the number of each letter, in numeric order.

    A name that equals the pattern is the only match, even if it contains braces.

    >>> expand("h.{i}.w", ["h.1.w", "h.0.w", "h.0.b"]), expand("h.{i}.w", ["h.{i}.w"])
    ({'h.0.w': {'i': 0}, 'h.1.w': {'i': 1}}, {'h.{i}.w': {}})
    """
    if name in names:
        return {name: {}}
    if not _LETTER.search(name):
        return {}
    seen: list[str] = []
    made = ""
    for part in _LETTER.split(name):
        letter = part[1:2]
        if _LETTER.fullmatch(part):
            made += f"(?P={letter})" if letter in seen else rf"(?P<{letter}>\d+)"
            seen.append(letter)
        else:
            made += re.escape(part)
    regex = re.compile(made)
    found = [
        (one, {x: int(match[x]) for x in sorted(set(seen))})
        for one in names
        if (match := regex.fullmatch(one))
    ]
    return dict(sorted(found, key=lambda row: tuple(row[1].values())))


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
                if line.take and not line.take.startswith("{"):
                    parts.setdefault(name, set()).add(line.take)
                else:
                    whole.add(name)
    return whole | {n for n, takes in parts.items() if len(takes) == _count(takes)}


def _count(takes: Collection[str]) -> int:
    """Returns the number of parts in takes such as `0/3`; 0 if it is no number."""
    count = next(iter(takes)).partition("/")[2]
    return int(count) if count.isdigit() else 0
