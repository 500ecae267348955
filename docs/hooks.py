"""Examples in docstrings as the site shows them."""

import re
from typing import Any

import griffe

# From the first prompt to the end of the paragraph.
EXAMPLE = re.compile(r"^([ ]*)>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
FLAGS = re.compile(r"\s*# doctest: \+\w+$", re.MULTILINE)


def fenced(text: str) -> str:
    """Examples as blocks of code, which Markdown would take for quotations.

    >>> fenced("Sum.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['Sum.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """

    def fence(match: re.Match[str]) -> str:
        indent = match[1]
        return f"{indent}```pycon\n{FLAGS.sub('', match[0])}\n{indent}```"

    return EXAMPLE.sub(fence, text)


class Examples(griffe.Extension):  # type: ignore[misc]
    """Fences the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
