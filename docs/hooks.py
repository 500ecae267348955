"""The site: examples in docstrings, the changelog, and tutorials as notebooks."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import notebook

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
    """Adds pages that have their source elsewhere: the changelog, and a notebook of every tutorial."""
    changes = (ROOT / "CHANGELOG.md").read_text().replace("](docs/pages/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    for file in list(files.documentation_pages()):
        if file.src_uri.startswith("tutorials/"):
            name = f"{file.src_uri.removesuffix('.md')}.ipynb"
            files.append(File.generated(config, name, content=notebook(file.content_string)))
    return files


def on_page_markdown(text: str, page: Page, **_: Any) -> str:
    """Names the notebook below the title of a tutorial."""
    if not page.file.src_uri.startswith("tutorials/"):
        return text
    title, _line, rest = text.partition("\n")
    name = Path(page.file.src_uri).stem
    return f"{title}\n\n[This page as a notebook]({name}.ipynb){{ download .notebook }}\n{rest}"
