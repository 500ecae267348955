"""Pages of results: the Jinja template `page.md` of an experiment, filled with its results.

The first two lines of a template are the question and the command; the first paragraph is the
conclusion. A template can call the functions of the `page.py` next to it, if there is one, and
reads the results as `found`.
"""

import importlib
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Rows = Sequence[Sequence[str]]  # of a table; the first is its head
HERE = Path(__file__).parent


class Page:
    """One page: `path` of its template in `experiments/`, and the module of its functions.

    `helpers` names the module, if it is not the `page.py` next to the template.
    """

    def __init__(self, path: str, helpers: str = "") -> None:
        self.path = HERE / path
        head, _, self.template = self.path.read_text().partition("\n\n")
        self.question, self.command = (line.partition(": ")[2] for line in head.splitlines())
        if not helpers and self.path.with_suffix(".py").is_file():
            helpers = f"experiments.{path.removesuffix('.md').replace('/', '.')}"
        self.helpers = helpers

    def text(self, found: Mapping[str, Any]) -> str:
        """The whole page in Markdown; the conclusion is its first line."""
        calls = vars(importlib.import_module(self.helpers)) if self.helpers else {}
        made = _environment(self.path.parent).from_string(self.template)
        first, _, rest = made.render(calls, found=found).strip().partition("\n\n")
        return f"{' '.join(first.split())}\n\n{rest}"

    def conclusion(self, found: Mapping[str, Any]) -> str:
        """The first paragraph of the page."""
        return self.text(found).partition("\n\n")[0]


def fill(module: dict[str, Any], template: str, /, **values: Any) -> str:
    """The Markdown file next to a module, with its values.

    Args:
      module: `globals()` of the module: the page may call its functions.
      template: name of the file.
      values: what else has a place on the page. A name that is missing raises.
    """
    path = Path(module["__file__"]).with_name(template)
    text: str = _environment(path.parent).get_template(template).render(module | values)
    return text


def markdown(rows: Rows) -> str:
    """A table, or "" where it has no rows but its head.

    >>> print(markdown([("a", "b"), ("1", "2")]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    head, *body = rows
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) if body else ""


def percent(share: float) -> str:
    """A share in percent with two digits, or as a whole number from 99.5 % on."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


@cache
def _environment(folder: Path) -> Any:
    """The Jinja environment of a folder; `{{ x | form(".2f") }}` calls Python's `format`."""
    import jinja2  # only pages need it

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    made.filters |= {"form": format, "table": markdown}
    made.globals |= {"len": len, "list": list, "max": max, "min": min, "zip": zip}
    made.globals |= {"mean": statistics.geometric_mean, "median": statistics.median}
    return made
