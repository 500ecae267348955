"""Parses JSON from a file; estimates its memory first, and refuses ambiguous texts.

Parsing a text of repeated `[],` takes 25 times its size in memory. The estimate only counts
punctuation, which is fast.

Format: https://www.rfc-editor.org/rfc/rfc8259
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxmha.checkpoint.errors import AmbiguousFile, CheckpointError, MalformedFile, shown
from jaxmha.checkpoint.limits import Budget

# Upper bounds of memory in CPython per punctuation mark, in bytes: comma: a list item with a small
# value; colon: an entry of a dict and of the table of keys; bracket: an empty container.
_SIGNS = ((b",", 64), (b":", 160), (b"[", 72), (b"{", 72))
_PART = 1 << 18


class Compact(NamedTuple):
    """JSON objects of a known form that are stored in less memory than a dict.

    Attributes:
      pattern: matches such an object with its key, in a text whose strings were emptied.
      size: upper bound of the bytes that its compact form takes.
      made: converts an object to its compact form.
    """

    pattern: re.Pattern[bytes]
    size: int
    made: Callable[[dict[str, Any]], Any]


def load(raw: bytes, budget: Budget, compact: Compact | None = None, **hooks: Any) -> Any:
    """Charges the memory of a JSON text to the budget, then parses it; `hooks` go to `json.loads`.

    The memory of `raw` is freed early if the caller keeps no reference to it.

    Raises:
        BudgetExceeded, and the ValueError or RecursionError of `json.loads`.
    """
    # Charge the text and its strings; an escape may become a character of four bytes.
    text_bytes = width(raw) * len(raw)
    budget.build(text_bytes + (4 * len(raw) if b"\\u" in raw else text_bytes), "its JSON")
    for part in _without_strings(raw):
        rest, known = compact.pattern.subn(b"", part) if compact else (part, 0)
        amount = sum(rest.count(sign) * size for sign, size in _SIGNS)
        budget.build(amount + known * (compact.size if compact else 0), "its JSON")
    text = raw.decode()
    del raw
    found = json.loads(text, **hooks)
    budget.give_back(text_bytes)
    return found


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict: a hook for `load`.

    Raises ValueError if a key occurs twice.
    """
    items = dict(pairs)
    if len(items) != len(pairs):
        raise ValueError(f"it has the key {shown(_twice(pairs))} twice")
    return items


def _twice(pairs: list[tuple[str, Any]]) -> str:
    return Counter(key for key, _ in pairs).most_common(1)[0][0]


def _without_strings(raw: bytes) -> Iterator[bytes]:
    """Yields parts of the text with all strings emptied.

    The text is split part by part: a list of all its pieces would take more memory than the text.
    """
    at, inside = 0, 0  # inside: 1 if the previous part ended within a string
    while at < len(raw):
        part = raw[at : at + _PART]
        # If the part ends within an escape, its backslash is left to the next part.
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = part[:-1] or raw[at:]
        at += len(part)
        # In a valid text, only strings have escapes.
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b'""'.join(pieces[inside::2])
        inside = (inside + len(pieces) - 1) % 2


def width(raw: bytes) -> int:
    """Upper bound of the bytes per character that Python needs for a UTF-8 text."""
    if raw.isascii():
        return 1
    largest = np.frombuffer(raw, np.uint8).max()
    return 1 if largest < 0xC4 else 2 if largest < 0xF0 else 4


def parse(
    raw: bytes,
    budget: Budget,
    remedy: str,
    member: str | None = None,
    *,
    numbers: bool = False,
    compact: Compact | None = None,
) -> dict[str, Any]:
    """Parses a JSON object, and refuses duplicate keys, NaN and infinities.

    `remedy` and `member` go into error messages. `numbers` allows numbers with a fraction or an
    exponent; without it only integers are allowed. `compact` describes objects to store in less
    memory than a dict.

    Raises:
        MalformedFile, AmbiguousFile, BudgetExceeded.
    """
    path = budget.path
    if not raw.startswith(b"{") or not raw.endswith((b"}", b" ")):
        raise MalformedFile(path, "the JSON does not run from '{' to '}'", remedy, member)

    def once(pairs: list[tuple[str, Any]]) -> Any:
        items = dict(pairs)
        if len(items) != len(pairs):
            raise AmbiguousFile(path, "the JSON has this key twice", remedy, _twice(pairs))
        return compact.made(items) if compact else items

    def refused(text: str) -> Any:
        raise MalformedFile(path, f"the JSON has the number {text[:40]}", remedy, member)

    def finite(text: str) -> float:
        number = float(text)
        return number if math.isfinite(number) else refused(text)

    hooks = {
        "object_pairs_hook": once,
        "parse_float": finite if numbers else refused,
        "parse_constant": refused,
    }
    try:
        found: dict[str, Any] = load(raw, budget, compact, **hooks)
    except RecursionError:
        raise MalformedFile(path, "the JSON is nested too deeply", remedy, member) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise MalformedFile(path, f"the JSON is damaged ({e})", remedy, member) from e
    except CheckpointError:
        raise
    except ValueError as e:
        raise MalformedFile(path, "the JSON has a number of too many digits", remedy, member) from e
    return found
