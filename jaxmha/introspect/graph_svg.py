"""Draws a `DataFlow` as SVG: columns for query, key and value, with time running downwards."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol
from xml.sax.saxutils import escape, quoteattr

from jaxmha.introspect.node import Node
from jaxmha.introspect.svg import INK, adaptive

WIDTH, HEIGHT, GAP, ROW, EDGE = (
    318.0,
    82.0,
    26.0,
    122.0,
    14.0,
)  # pixels: size of a box, gap between boxes, distance of rows, margin
COLOURS = {  # tab10: distinct for colour-blind readers, on light and dark
    "input": "#7f7f7f",
    "product": "#1f77b4",
    "elementwise": "#2ca02c",
    "softmax": "#ff7f0e",
    "joined": "#9467bd",
}
LEGEND = {
    "input": "input",
    "product": "matrix product",
    "elementwise": "element by element",
    "softmax": "softmax",
    "joined": "copied together",
}
TITLE, TEXT = 14, 12  # font size in pixels: at least 9 points


class Flow(Protocol):
    """The part of a `DataFlow` that a drawing shows."""

    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def nodes(self) -> tuple[Node, ...]: ...
    @property
    def flops(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def bytes_fused(self) -> int: ...


class Place(NamedTuple):
    """The upper left corner of a box."""

    x: float
    y: float

    @property
    def middle(self) -> float:
        """The x coordinate where edges start and end."""
        return self.x + WIDTH / 2


def places(flow: Flow) -> dict[str, Place]:
    """The position of every box.

    A node is below all nodes that it reads. Nodes of only query, key or value stay in their column;
    nodes of query-key pairs are in the first column.
    """
    grid: dict[str, tuple[int, int]] = {}
    for node in flow.nodes:
        if node.kind == "input":
            column = {"query": 0, "key": 1, "value": 2}.get(node.name, 1)
            row = 0
            if node.name == "mask":  # next to the node that reads it
                row = max(r for r, _ in grid.values()) + 1
            grid[node.name] = row, column
            continue
        above = [grid[name] for name in node.inputs]
        row = max(r for r, _ in above) + 1
        column = min(c for _, c in above)
        if "mask" in node.inputs:
            row -= 1
        if node.name in ("context", "out"):
            column = 1
        grid[node.name] = row, column
    top = 52.0
    return {
        name: Place(EDGE + column * (WIDTH + GAP), top + row * ROW)
        for name, (row, column) in grid.items()
    }


def short(number: int) -> str:
    """Formats a number with three digits and a unit.

    >>> short(5_242_880), short(999), short(10)
    ('5.24 M', '999', '10')
    """
    size = float(number)
    for unit in ("", "k", "M", "G", "T", "P"):
        if size < 999.5 or unit == "P":
            return f"{size:.3g} {unit}".strip()
        size /= 1000
    raise AssertionError


def memory(number: int) -> str:
    """Formats bytes in powers of 1024.

    >>> memory(5_242_880)
    '5 MiB'
    """
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1023.5 or unit == "TiB":
            return f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError


def draw(flow: Flow) -> str:
    """The drawing as SVG text."""
    where = places(flow)
    width = 2 * EDGE + 3 * WIDTH + 2 * GAP
    height = max(place.y for place in where.values()) + HEIGHT + 44
    letters = ", ".join(f"{letter}={size}" for letter, size in flow.sizes.items())
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" fill="{INK}" role="img" '
            'aria-label="Data flow of multi-head attention">'
        ),
        (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        ),
        _text(EDGE, 20.0, letters, TEXT),
        _text(
            EDGE,
            38.0,
            f"{short(flow.flops)} FLOPs; {memory(flow.bytes)} read and written if every node is a "
            f"program of its own, {memory(flow.bytes_fused)} if attention is fused",
            TEXT,
        ),
    ]
    parts += [
        _edge(where[name], where[node.name], node.name == "masked_logits" and name == "mask")
        for node in flow.nodes
        for name in node.inputs
    ]
    parts += [_box(node, where[node.name], flow.flops) for node in flow.nodes]
    x = EDGE
    for kind, label in LEGEND.items():
        if any(node.kind == kind for node in flow.nodes):
            parts.append(
                f'<rect x="{x:g}" y="{height - 24:g}" width="12" height="12" rx="2" '
                f'fill="{COLOURS[kind]}"/>'
            )
            parts.append(_text(x + 18, height - 14, label, TEXT))
            x += 18 + 7 * len(label) + 24
    parts.append(_text(x, height - 14, "bar: share of all FLOPs", TEXT))
    return adaptive("\n".join([*parts, "</svg>"]) + "\n")


def _box(node: Node, place: Place, flops: int) -> str:
    colour, (x, y) = COLOURS[node.kind], place
    shape = " ".join(map(str, node.shape))
    cost = memory(node.bytes) if node.kind != "input" else ""
    if node.flops:
        cost = f"{short(node.flops)} FLOPs, {cost}"
    lines = [
        f"<g data-node={quoteattr(node.name)}><title>{escape(_hover(node))}</title>",
        (
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH:g}" height="{HEIGHT:g}" rx="6" fill="{colour}" '
            f'fill-opacity="0.13" stroke="{colour}" stroke-width="1.5"/>'
        ),
        _text(x + 10, y + 20, node.name, TITLE, bold=True),
        _text(x + WIDTH - 10, y + 20, cost, TEXT, end=True),
        _text(x + 10, y + 42, node.formula, TEXT, limit=WIDTH - 20),
        _text(x + 10, y + 62, f"{node.axes} = {shape}, {node.dtype}", TEXT, limit=WIDTH - 20),
    ]
    if node.flops:
        lines.append(
            f'<rect x="{x + 10:g}" y="{y + HEIGHT - 9:g}" height="4" rx="2" fill="{colour}" '
            f'width="{max((WIDTH - 20) * node.flops / flops, 1):.4g}"/>'
        )
    return "\n".join([*lines, "</g>"])


def _hover(node: Node) -> str:
    """The tooltip of a box: parameter arrays and differences."""
    lines = [f"{one.name}: {one.axes} = {one.shape}" for one in node.parameters]
    lines += [f"{one.framework}: {one.what}" for one in node.differences]
    return "\n".join([f"{node.name}: {node.cost} = {node.flops:,} FLOPs", *lines])


def _edge(start: Place, end: Place, sideways: bool) -> str:
    """Draws an edge: straight down in a column, else down to the gap between rows and across."""
    if sideways:
        y = start.y + HEIGHT / 2
        path = f"M{start.x:g} {y:g}H{end.x + WIDTH:g}"
    elif start.x == end.x:
        path = f"M{start.middle:g} {start.y + HEIGHT:g}V{end.y:g}"
    else:
        # End off the middle, so that edges from the left and from the right stay distinct.
        to = end.middle + (WIDTH / 4 if start.x > end.x else -WIDTH / 4)
        turn = end.y - (ROW - HEIGHT) / 2
        path = f"M{start.middle:g} {start.y + HEIGHT:g}V{turn:g}H{to:g}V{end.y:g}"
    return (
        f'<path d="{path}" fill="none" stroke="{INK}" stroke-opacity="0.7" marker-end="url(#tip)"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    size: int,
    *,
    bold: bool = False,
    end: bool = False,
    limit: float | None = None,
) -> str:
    """Draws one line of text; text wider than `limit` is compressed, never truncated."""
    wide = limit is not None and 0.56 * size * len(text) > limit
    more = f' textLength="{limit:g}" lengthAdjust="spacingAndGlyphs"' if wide else ""
    more += ' font-weight="bold"' * bold + ' text-anchor="end"' * end
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{more}>{escape(text)}</text>'
