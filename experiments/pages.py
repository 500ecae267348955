"""Pages of results: Markdown with a place for every number, which comes from the results."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

Rows = Sequence[Sequence[str]]  # of a table; the first is its head
Tables = Mapping[str, Rows]  # by title


def fill(module: dict[str, Any], /, *, template: str = "page.md", **values: Any) -> str:
    """The Markdown file next to a module, with its values.

    Args:
      module: `globals()` of the module: the page may call its functions.
      template: name of the file.
      values: what else has a place on the page. A name that is missing raises.
    """
    path = Path(module["__file__"]).with_name(template)
    text: str = _template(path).render(module | values)
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


@cache
def _template(path: Path) -> Any:
    """A template of Jinja; `{{ x | form(".2f") }}` formats as Python does."""
    import jinja2  # only pages need it

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    made.filters |= {"form": format, "table": markdown}
    made.globals |= {"len": len, "list": list, "max": max, "min": min}
    return made.get_template(path.name)
