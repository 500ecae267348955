"""Tutorials as notebooks: prose becomes cells of text, and the steps of a program cells of code."""

import json
import re
from collections.abc import Iterator
from typing import Any

REPOSITORY = "https://github.com/jaxmha/jaxmha"
# A service that opens notebooks of repositories, and runs them without a set-up.
HOSTED = f"{REPOSITORY.replace('github.com', 'colab.research.google.com/github')}/blob/main/docs/pages/tutorials"
INSTALL = f'%pip install --quiet "jaxmha[flax,torch] @ git+{REPOSITORY}" transformers optax'
_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
# A step of a program begins with a comment, `# 1. ...`, which may go on for some lines.
_STEP = re.compile(r"^# (\d+\. .*(?:\n# .*)*)\n", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def cells(page: str, folder: str = "docs/pages/tutorials") -> Iterator[tuple[str, str]]:
    """Kind and text of every cell of a page.

    >>> page = "# Add\\n\\n```python\\n# 1. Two\\n# numbers.\\nx = 1\\n```\\n\\nDone.\\n"
    >>> list(cells(page))
    [('markdown', '# Add'), ('markdown', '**1.** Two numbers.'), ('code', 'x = 1'), ('markdown', 'Done.')]
    """
    for number, text in enumerate(_BLOCK.split(page)):
        if number % 2 == 0:
            found = [("markdown", _LINK.sub(rf"]({REPOSITORY}/blob/main/{folder}/\1\2)", text))]
        else:
            before, *steps = _STEP.split(text)
            found = [("code", before)]
            for about, code in zip(steps[::2], steps[1::2], strict=True):
                number_of, _, about_it = " ".join(about.split("\n# ")).partition(" ")
                found += [("markdown", f"**{number_of}** {about_it}"), ("code", code)]
        yield from ((kind, text.strip()) for kind, text in found if text.strip())


def notebook(page: str) -> str:
    """The notebook of a page, without outputs; its first cell installs what it needs."""

    def cell(kind: str, text: str, **metadata: Any) -> dict[str, Any]:
        made = {"cell_type": kind, "metadata": metadata, "source": text.splitlines(keepends=True)}
        return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})

    made = [cell("code", INSTALL, tags=["install"]), *(cell(*one) for one in cells(page))]
    content = {
        "cells": [{"id": f"cell-{number}"} | one for number, one in enumerate(made)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1)
