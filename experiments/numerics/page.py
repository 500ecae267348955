"""What was found, in words; every number from results.json."""

import math
from typing import Any

from experiments.pages import Rows, Tables, fill

QUESTION = "How far from float64 are attention layers, and where do they break?"
COMMAND = "python -m experiments.numerics --write"
SHORT = {"not run": "–", "not finite": "∞"}
# Within this many rounding floors of half precision, all that rounds is the output.
FINE = 1.5


def conclusion(found: dict[str, Any]) -> str:
    """Two or three sentences."""
    rows = found["implementations"]
    single = [e for row in rows.values() for e in finite(row["lengths"]["float32"])]
    large = {name: max(finite(row["scales"]["float32"])) for name, row in rows.items()}
    ours = max(error for name, error in large.items() if name.startswith("jaxmha"))
    rounds = [name for name in rows if worst(rows[name]) <= FINE]
    most = max(rows, key=lambda name: worst(rows[name]))
    overflow = [name for name, row in rows.items() if not isinstance(row["largest"], str)]
    return (
        f"With logits of standard deviation 1, float32 is within {max(single):.0f} rounding floors "
        f"at any length, with larger ones up to {max(large.values()):.0f} (jaxmha {ours:.0f}). In half "
        f"precision {len(rounds)} of {len(rows)} ways round little but the output, the others are up "
        f"to {worst(rows[most]):.0f} floors away ({most}), further with larger logits; "
        f"{len(overflow)} overflow in float16, and a row without keys is "
        f"{spoken(outcomes(rows, 'blocked', 'float32'))}."
    )


def tables(found: dict[str, Any]) -> Tables:
    """By title."""
    rows, settings = found["implementations"], found["settings"]
    return {
        "Lengths": errors(rows, "lengths", settings["lengths"], "S"),
        "Larger logits": errors(rows, "scales", settings["scales"], "x"),
        "Where they break": breaks(rows),
        "Additive masks": constants(rows),
    }


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    return fill(globals(), found=found)


def half_a_unit(x: float, bits: int) -> float:
    """In the last place: the largest error of x rounded to a significand of so many bits.

    >>> half_a_unit(1000, 11), half_a_unit(1000, 8), half_a_unit(1024, 11)
    (0.25, 2.0, 0.5)
    """
    return math.ldexp(1, math.frexp(x)[1] - bits - 1)


def finite(errors: list[Any]) -> list[float]:
    """Those that are numbers."""
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


def spoken(words: list[str]) -> str:
    """a, b or c, for readers.

    >>> spoken(["zero", "mean", "NaN"])
    'zero, the mean of all values or NaN'
    """
    named = [{"mean": "the mean of all values"}.get(word, word) for word in words]
    return " or ".join([", ".join(named[:-1]), named[-1]]) if len(named) > 1 else named[0]


def number(error: Any) -> str:
    """Two digits, or a sign for what is not a number."""
    return SHORT.get(error, error) if isinstance(error, str) else f"{error:.2g}"


def errors(rows: dict[str, Any], kind: str, xs: list[int], letter: str) -> Rows:
    """Errors of each dtype at both ends and in between."""
    dtypes = list(next(iter(rows.values()))[kind])
    ends = [0, len(xs) // 2, len(xs) - 1]
    head = ["implementation", *(f"{dtype} {letter}{xs[i]}" for dtype in dtypes for i in ends)]
    body = [
        [name, *(number(row[kind][dtype][i]) for dtype in dtypes for i in ends)]
        for name, row in rows.items()
    ]
    return [head, *body]


def breaks(rows: dict[str, Any]) -> Rows:
    """One line per implementation."""
    head = [
        "implementation", "float64", "largest float16 logit", "row without keys",
        "logits below the mask", "NaN in padding becomes", "not under jit",
    ]  # fmt: skip
    body = []
    for name, row in rows.items():
        precise, largest = row["float64"], row["largest"]
        body.append(
            [
                name,
                precise if isinstance(precise, str) else f"{precise:.0e}",
                largest if isinstance(largest, str) else f"{largest:.0f}",
                each(row["blocked"]),
                each(row["below"]),
                row["padding"],
                ", ".join(row["uncompiled"]),
            ]
        )
    return [head, *body]


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
