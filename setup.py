"""The description on the package index: the README, with links that work outside the repository."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/jaxmha/jaxmha"


def absolute(match: re.Match[str]) -> str:
    """The link of a page or, after `!`, of an image."""
    image, text, path = match.groups()
    return f"{image}[{text}]({REPOSITORY}/{'raw' if image else 'blob'}/main/{path})"


readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", absolute, readme),
    long_description_content_type="text/markdown",
)
