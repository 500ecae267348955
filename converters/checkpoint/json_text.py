"""JSON from a file: its memory is counted before it is parsed; an ambiguous text is refused.

A text of `[],` needs 25 times its size once it is parsed. Counting its punctuation is fast and
needs no memory.

Format: https://www.rfc-editor.org/rfc/rfc8259
"""

import json
from collections import Counter
from typing import Any

from jaxmha.converters.checkpoint.errors import AmbiguousFile, CheckpointError, MalformedFile
from jaxmha.converters.checkpoint.limits import Budget

# Bytes at most for each sign in CPython: a place in a list and a small value, an entry of a dict
# and of the table of keys, an empty container. Signs within strings count too.
_SIGNS = ((b",", 64), (b":", 160), (b"[", 72), (b"{", 72))


def load(raw: bytes, budget: Budget, **hooks: Any) -> Any:
    """The value of a JSON text, once the budget has paid for it; `hooks` go to `json.loads`.

    A caller that keeps no reference to `raw` saves its memory.

    Raises:
        BudgetExceeded; ValueError or RecursionError as `json.loads`.
    """
    # The text and the strings cut from it; where a string may be wide, four bytes a character.
    wide = 1 if raw.isascii() and b"\\u" not in raw else 4
    signs = sum(raw.count(sign) * size for sign, size in _SIGNS)
    budget.build(signs + 2 * wide * len(raw), "its JSON")
    text = raw.decode()
    del raw
    return json.loads(text, **hooks)


def parse(
    raw: bytes, budget: Budget, remedy: str, member: str | None = None, *, numbers: bool = False
) -> dict[str, Any]:
    """A JSON object without doubt about its content; `numbers` allows 1.0.

    Raises:
        MalformedFile, AmbiguousFile, BudgetExceeded.
    """
    path = budget.path
    if not raw.startswith(b"{") or not raw.endswith((b"}", b" ")):
        raise MalformedFile(path, "the JSON does not run from '{' to '}'", remedy, member)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items = dict(pairs)
        if len(items) != len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise AmbiguousFile(path, "the JSON has this key twice", remedy, twice)
        return items

    def refused(text: str) -> Any:
        raise MalformedFile(path, f"the JSON has the number {text[:40]}", remedy, member)

    hooks = {
        "object_pairs_hook": unique,
        "parse_float": float if numbers else refused,
        "parse_constant": refused,
    }
    try:
        found: dict[str, Any] = load(raw, budget, **hooks)
    except RecursionError:
        raise MalformedFile(path, "the JSON is nested too deeply", remedy, member) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise MalformedFile(path, f"the JSON is damaged ({e})", remedy, member) from e
    except CheckpointError:
        raise
    except ValueError as e:
        raise MalformedFile(path, "the JSON has a number of too many digits", remedy, member) from e
    return found
