"""One table as Markdown and on a terminal: rows of strings, the first the head."""

from collections.abc import Sequence
from typing import Any

Rows = Sequence[Sequence[str]]


def markdown(rows: Rows) -> str:
    """For a page.

    >>> print(markdown([("a", "b"), ("1", "2")]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    head, *body = ([*row] for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in [head, *body]]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines)


def terminal(title: str, rows: Rows) -> Any:
    """For a console of rich."""
    from rich.table import Table

    head, *body = rows
    table = Table(*head, title=title, title_justify="left")
    for row in body:
        table.add_row(*row)
    return table
