"""Parses the TOML of conversion plans, after checks of its size and structure.

Python's parser takes time quadratic in the number of parts of a dotted key, and 1 kB of memory for
a header of three bytes. Therefore long keys and unknown headers, which no plan has, are refused.
"""

import json
import os
import re
import tomllib
from collections.abc import Collection
from typing import Any

from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.source import Source

_LIMITS = Limits()
_MOST_DOTS = 8  # most dots in a line, outside of strings
# Characters of a number or a bare key; the parser takes 128 bytes for each.
_LONG = re.compile(r"[^\s,=\[\]{}\"]{1001}")
# Upper bounds of memory in bytes per sign outside of strings: comma: a list item; `=`: an entry;
# dot: a part of a key; brackets: a list, a table; quote: half of a string.
_SIGNS = ((",", 64), ("=", 160), (".", 1000), ("[", 100), ("{", 400), ('"', 50))
_TIMES = 8  # bytes of memory per byte of text; a `[[module]]` of 250 bytes takes 1.6 kB
# Strings and comments, in the order in which the parser tries them.
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+"{3,5}|'
    r"'''(?:[^']|'(?!''))*+'{3,5}|"
    r'"(?:[^"\\\n]|\\.)*+"|'
    r"'[^'\n]*+'|#[^\n]*+",
    re.DOTALL,
)
_HEADER = re.compile(r"^[ \t]*(\[.*\])[ \t\r]*$", re.MULTILINE)


def quoted(text: str) -> str:
    """A text as a TOML basic string.

    Example:
        >>> print(quoted('a"'))
        "a\\""
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read(path: str | os.PathLike[str]) -> str:
    """Reads the text of a plan.

    Raises:
        UnreadableFile, BudgetExceeded: no plain file, or too large.  ValueError: it is no UTF-8.
    """
    source = Source(path)
    try:
        most = _LIMITS.index_bytes
        Budget(source.path, 0, _LIMITS).spend("the size of the plan", source.size, most)
        return source.read(0, source.size).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the plan is no UTF-8 text") from error
    finally:
        source.close()


def loads(text: str, headers: Collection[str]) -> dict[str, Any]:
    """Parses a plan whose headers, such as `[[array]]`, are all in `headers`.

    Raises:
        ValueError: the text is no TOML, or has other headers or long keys.
        BudgetExceeded: it takes too much memory.

    Example:
        >>> loads("a = 1\\n[[array]]\\nb = 2", ["[[array]]"])
        {'a': 1, 'array': [{'b': 2}]}
    """
    bare = _STRING.sub(lambda found: "" if found[0][0] == "#" else '""', text)
    if any(line.count(".") > _MOST_DOTS for line in bare.split("\n")):
        raise ValueError(f"the plan has a key of more than {_MOST_DOTS} parts")
    if _LONG.search(bare):
        raise ValueError("the plan has a number or a key of more than 1,000 characters")
    for header in _HEADER.finditer(bare):
        if re.sub("[ \t]", "", header[1]) not in headers:
            raise ValueError(f"the plan must have no tables but {' and '.join(headers)}")
    _charge(text, bare)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("the plan is nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or a number with too many digits
        raise ValueError(f"the plan is no TOML: {error}") from error


def _charge(text: str, bare: str) -> None:
    """Raises BudgetExceeded if parsing would take too much memory."""
    budget = Budget("the plan", _TIMES // 2 * len(text), _LIMITS)
    budget.build(sum(bare.count(sign) * size for sign, size in _SIGNS), "its TOML")
