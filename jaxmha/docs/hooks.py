"""What the site takes from elsewhere: parts of the README, and the examples in docstrings."""

import re
from pathlib import Path
from typing import Any

import griffe

README = Path(__file__).parents[2] / "README.md"
PART = re.compile(r"^<!-- README: (\w+) -->$", re.MULTILINE)
# From the first prompt to the end of the paragraph.
EXAMPLE = re.compile(r"^([ ]*)>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
FLAGS = re.compile(r"\s*# doctest: \+\w+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts what the README has between `<!-- name -->` marks where a page asks for it."""
    readme = README.read_text()

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return readme.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0]

    return PART.sub(part, markdown)


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
