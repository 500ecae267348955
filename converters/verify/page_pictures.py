"""Draws a comparison as SVG; the style sheet of the page defines the colours."""

import math
from collections.abc import Sequence
from html import escape

from jaxmha import notebook
from jaxmha.converters.verify.comparison_report import BlockReport
from jaxmha.converters.verify.page_facts import DIFFERS, LEFT, TensorFacts

LONGEST = 100  # characters of a name
CELLS = 4000  # tensors drawn
BLOCKS = 100  # blocks drawn
_CELL, _COLUMNS = 12, 60
_LEFT, _WIDTH, _ROW = 170, 520, 18
_CLASSES = {DIFFERS: "bad", LEFT: "left"}


def text(name: str, most: int = LONGEST) -> str:
    """Makes a name from a file safe for HTML: escaped, and cut to `most` characters.

    Control characters become visible escapes.

    >>> text("<a>\\n")
    '&lt;a&gt;\\\\n'
    """
    return notebook.text(name, most)


def tensors(found: Sequence[TensorFacts]) -> str:
    """Draws one square per tensor, in the order of the file, with its facts as tooltip."""
    drawn = found[:CELLS]
    rows = math.ceil(len(drawn) / _COLUMNS)
    cells = []
    for i, one in enumerate(drawn):
        x, y = i % _COLUMNS * _CELL, i // _COLUMNS * _CELL
        shape = ", ".join(map(str, one.shape))
        title = f"{text(one.name)}: {text(one.dtype)} ({shape}), {one.result}"
        cells.append(
            f'<rect class="{_CLASSES.get(one.result, "good")}" x="{x}" y="{y}" '
            f'width="{_CELL - 2}" height="{_CELL - 2}"><title>{title}</title></rect>'
        )
    columns = min(len(drawn), _COLUMNS)
    return _svg(columns * _CELL, rows * _CELL, "every tensor of the first source", cells)


def errors(blocks: Sequence[BlockReport], mask: str) -> str:
    """Draws the errors of both sources against float64 under one mask, a row per block.

    A ring is the first source and a dot the second: if both are the same, the dot is in the ring.
    The scale is linear, from 0 to the largest finite error or to 8 rounding floors.
    """
    drawn = [block for block in blocks if mask in block.errors][:BLOCKS]
    finite = [e for block in drawn for e in block.errors[mask] if math.isfinite(e)]
    largest = max([8.0, *finite])
    width, bottom = _WIDTH - _LEFT - 60, len(drawn) * _ROW + 8
    marks = []
    for tick in range(5):
        x, value = _LEFT + width * tick / 4, largest * tick / 4
        marks.append(f'<path class="rule" d="M{x:.1f} 4V{bottom}"/>')
        marks.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}">{value:.3g}</text>')
    for i, block in enumerate(drawn):
        y = i * _ROW + 14
        name = text(block.a or block.b or "(top)")
        short = text(_end(block.a or block.b or "(top)"))
        kind = "good" if block.same else "bad"
        first, second = block.errors[mask]
        places = [_place(error, largest, width) for error in (first, second)]
        marks.append(f'<text class="name" x="{_LEFT - 12}" y="{y + 4}">{short}</text>')
        marks.append(
            f'<g class="{kind}"><title>{name}: {first:.4g} and {second:.4g}</title>'
            f'<circle class="ring" cx="{places[0]:.1f}" cy="{y}" r="6"/>'
            f'<circle cx="{places[1]:.1f}" cy="{y}" r="3"/></g>'
        )
    return _svg(_WIDTH, bottom + 24, f"errors against float64, {escape(mask)}", marks)


def _end(name: str, most: int = 24) -> str:
    """Returns the end of a long name: blocks of one model differ there."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _place(error: float, largest: float, width: float) -> float:
    """Returns the x coordinate of an error; NaN and infinity lie beyond the end of the scale."""
    return (
        _LEFT
        + width * (error / largest if math.isfinite(error) else 1)
        + (0 if math.isfinite(error) else 30)
    )


def share(part: int, whole: int) -> str:
    """Draws the fraction of elements that differ, `part` of `whole`, as a bar."""
    width = max(1.0, 118 * part / max(whole, 1))
    return _svg(
        120,
        12,
        f"{part} of {whole}",
        [
            '<rect class="frame" x="0.5" y="0.5" width="119" height="11"/>',
            f'<rect class="bad" x="1" y="1" width="{width:.1f}" height="10"/>',
        ],
    )


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width} {height}" '
        f'style="width:{width}px">{"".join(parts)}</svg>'
    )
