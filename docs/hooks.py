"""The site: examples in docstrings, the changelog, and links from tutorials to their notebooks."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import HOSTED

ROOT = Path(__file__).parents[1]

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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the changelog, which has its source elsewhere."""
    changes = (ROOT / "CHANGELOG.md").read_text().replace("](docs/pages/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    return files


def on_page_markdown(text: str, page: Page, **_: Any) -> str:
    """Names the notebook below the title of a tutorial."""
    if not page.file.src_uri.startswith("tutorials/"):
        return text
    title, _line, rest = text.partition("\n")
    name = Path(page.file.src_uri).stem
    notebook = f"[This page as a notebook]({name}.ipynb){{ download .notebook }}"
    return f"{title}\n\n{notebook}, to download or to [run in a browser]({HOSTED}/{name}.ipynb)\n{rest}"
