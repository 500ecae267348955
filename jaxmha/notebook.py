"""HTML of values for notebooks: small, escaped, of bounded size, and legible on light and dark."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

import numpy as np

from jaxmha.mask_repr import LARGEST, Conditions, corner, describe

ROWS = 50  # of a table
_LONGEST = 120  # characters of a cell
_CELL = 7
_TEXT = "font:12px ui-monospace,monospace;text-align:left"


def text(value: object, most: int = _LONGEST) -> str:
    """A value as escaped text of at most `most` characters, with invisible characters shown.

    >>> text("<b>\\n")
    '&lt;b&gt;\\\\n'
    """
    given = str(value)[: most + 1]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in given)
    return escape(shown if len(shown) <= most else f"{shown[: most - 1]}…")


def table(caption: object, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns an HTML table of at most `ROWS` rows; a last line counts the rows left out.

    >>> table("few", ("a",), [["<x>"]]).count("&lt;x&gt;")
    1
    """
    head = "".join(f'<th style="{_TEXT}">{text(name)}</th>' for name in columns)
    body = [
        "<tr>" + "".join(f'<td style="{_TEXT}">{text(cell)}</td>' for cell in row) + "</tr>"
        for row in rows[:ROWS]
    ]
    if len(rows) > ROWS:
        body.append(f"<tr><td colspan={len(columns)}>... {len(rows) - ROWS} more</td></tr>")
    return f"<div>{text(caption)}</div><table><tr>{head}</tr>{''.join(body)}</table>"


def of_mask(mask: Conditions) -> str:
    """The conditions of a mask, and a picture: rows are queries, columns keys, and filled attends.

    Masks beyond the size of the picture are shown by their first positions, and never materialised.
    """
    parts = [f"<div>{text(describe(mask))}</div>"]
    shown = corner(mask)
    if shown is None:
        return parts[0]
    for name, allowed in shown.panels:
        parts.append(f"<figure style='display:inline-block;margin:4px 12px 4px 0'>{_grid(allowed)}")
        parts.append(f"<figcaption>{text(name)}</figcaption></figure>" if name else "</figure>")
    if max(shown.T, shown.S) > LARGEST:
        parts.append(f"<div>the first {LARGEST} positions of T={shown.T}, S={shown.S}</div>")
    if shown.left_out:
        parts.append(f"<div>{text(shown.left_out)}</div>")
    return "".join(parts)


def _grid(allowed: np.ndarray) -> str:
    """A Boolean array as SVG: one path of all runs of True."""
    T, S = allowed.shape
    runs = []
    for i, row in enumerate(allowed.tolist()):
        j = 0
        for value, cells in groupby(row):
            size = len([*cells])
            if value:
                runs.append(f"M{j} {i}h{size}v1h-{size}z")
            j += size
    return (
        f'<svg role="img" aria-label="{int(allowed.sum())} of {T * S} pairs attend" '
        f'width="{S * _CELL + 2}" height="{T * _CELL + 2}" viewBox="-.1 -.1 {S + 0.2} {T + 0.2}">'
        f'<path d="M0 0h{S}v{T}h-{S}z" fill="currentColor" fill-opacity=".1"/>'
        f'<path d="{"".join(runs)}" fill="currentColor" fill-opacity=".75"/></svg>'
    )
