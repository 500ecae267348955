"""The arrays that a compiled program moves between devices, counted from its text."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4,
         "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\(")
_CALLED = re.compile(
    r"(?:to_apply|calls|body|true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One collective operation of a program, as often as it runs.

    Attributes:
      kind: one of KINDS.
      shapes: of what every device gets, as `f32[2,3]`.
      times: how often, through all loops.
    """

    kind: str
    shapes: tuple[str, ...]
    times: int

    @property
    def bytes(self) -> int:
        """That every device gets, all times together."""
        return self.times * sum(size_of(shape) for shape in self.shapes)


def size_of(shape: str) -> int:
    """Bytes of an array.

    >>> size_of("f32[2,3]")
    24
    """
    kind, sizes = _ARRAY.fullmatch(shape).groups()  # type: ignore[union-attr]
    count = 1
    for size in sizes.split(","):
        count *= int(size or 1)
    return count * BYTES[kind]


def collectives(compiled: Any) -> list[Collective]:
    """Of a compiled program. Loops must have a known number of turns."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    found: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    called: dict[str, Counter[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            name = start["name"]
            entry = name if start["entry"] else entry
            found[name], called[name] = [], Counter()
            continue
        instruction = _INSTRUCTION.match(line)
        if not instruction:
            continue
        kind = instruction["op"].removesuffix("-start")
        if kind in KINDS:
            shapes = tuple(m.group(0) for m in _ARRAY.finditer(instruction["type"]))
            found[name].append((kind, shapes))
        trips = _TRIPS.search(line)
        for one, several in _CALLED.findall(line):
            for other in [one, *re.findall(r"[\w.\-]+", several)]:
                if other:
                    called[name][other] += int(trips[1]) if trips and kind == "while" else 1

    def walk(name: str, times: int) -> Iterator[Collective]:
        yield from (Collective(kind, shapes, times) for kind, shapes in found[name])
        for other, count in called[name].items():
            if other in found:
                yield from walk(other, times * count)

    return list(walk(entry, 1))
