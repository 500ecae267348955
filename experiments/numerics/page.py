"""Functions for page.md: errors and outcomes of every implementation."""

import math
from typing import Any

from experiments.pages import Rows

DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"not run": "–", "not finite": "∞"}
# Within this many rounding floors of half precision, all that rounds is the output.
FINE = 1.5


def largest(rows: dict[str, Any], kind: str) -> dict[str, float]:
    """Implementation -> its largest error in float32; `kind` is `lengths` or `scales`."""
    return {name: max(finite(row[kind]["float32"])) for name, row in rows.items()}


def ours(errors: dict[str, float]) -> float:
    """The largest error of jaxmha's implementations; NaN if none was measured."""
    own = (error for name, error in errors.items() if name.startswith("jaxmha"))
    return max(own, default=math.nan)


def near(rows: dict[str, Any]) -> int:
    """The number of implementations that round little more than their output in half precision."""
    return sum(worst(row) <= FINE for row in rows.values())


def furthest(rows: dict[str, Any]) -> str:
    """The implementation with the largest error in half precision."""
    return max(rows, key=lambda name: worst(rows[name]))


def half_a_unit(x: float, bits: int) -> float:
    """In the last place: the largest error of x rounded to a significand of so many bits.

    >>> half_a_unit(1000, 11), half_a_unit(1000, 8), half_a_unit(1024, 11)
    (0.25, 2.0, 0.5)
    """
    return math.ldexp(1, math.frexp(x)[1] - bits - 1)


def finite(errors: list[Any]) -> list[float]:
    """The errors that are numbers; others are text, such as `not run`."""
    return [error for error in errors if not isinstance(error, str)]


def apart(rows: dict[str, Any]) -> float:
    """Largest error over the smallest at one length in float32."""
    lengths = zip(*(row["lengths"]["float32"] for row in rows.values()), strict=True)
    ratios = [max(found) / min(found) for each in lengths if (found := finite([*each]))]
    return max(ratios)


def worst(row: dict[str, Any]) -> float:
    """Largest error over length in half precision."""
    return max(max(finite(row["lengths"][dtype])) for dtype in ("bfloat16", "float16"))


def outcomes(rows: dict[str, Any], kind: str, dtype: str) -> list[str]:
    """Different outcomes, the most frequent first."""
    given = [row[kind][dtype] for row in rows.values()]
    return sorted(set(given), key=lambda one: (-given.count(one), one))


def spoken(names: list[str]) -> str:
    """a, b or c, for readers.

    >>> spoken(["zero", "mean", "NaN"])
    'zero, the mean of all values or NaN'
    """
    named = [{"mean": "the mean of all values"}.get(word, word) for word in names]
    return " or ".join([", ".join(named[:-1]), named[-1]]) if len(named) > 1 else named[0]


def number(error: Any) -> str:
    """Two digits, or a sign for what is not a number."""
    return SHORT.get(error, error) if isinstance(error, str) else f"{error:.2g}"


def each(by_dtype: dict[str, str]) -> str:
    """The most frequent outcome, and dtypes that have another.

    >>> each({"float32": "a", "bfloat16": "a", "float16": "b"})
    'a (float16: b)'
    """
    given = list(by_dtype.values())
    most = max(given, key=given.count)
    others = [f"{dtype}: {one}" for dtype, one in by_dtype.items() if one != most]
    return f"{most} ({', '.join(others)})" if others else most


def constants(rows: dict[str, Any]) -> Rows:
    """One line per implementation and dtype that takes additive masks."""
    taken = {name: row["constants"] for name, row in rows.items() if row["constants"]["float32"]}
    if not taken:
        return [["dtype", "implementation"]]
    kinds = list(next(iter(taken.values()))["float32"])
    same: dict[tuple[str, ...], list[str]] = {}
    for name, by_dtype in taken.items():
        for dtype in by_dtype:
            same.setdefault((dtype, *(by_dtype[dtype][kind] for kind in kinds)), []).append(name)
    order = list(next(iter(taken.values())))
    lines = [[*key[:1], ", ".join(names), *key[1:]] for key, names in same.items()]
    lines.sort(key=lambda line: order.index(line[0]))
    return [["dtype", "implementation", *kinds], *lines]
