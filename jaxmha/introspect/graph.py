"""Multi-head attention as a graph of nodes, each with its formula, shape and cost."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxmha.introspect.graph_svg import draw
from jaxmha.introspect.node import Node


@dataclass(frozen=True)
class DataFlow:
    """The result of `describe`: `print` shows a table, a notebook a drawing.

    Attributes:
      sizes: axis letter -> size.
      dtype: dtype of heads and output.
      framework: the framework whose arrays and differences are listed; None lists jaxmha's arrays,
        and the differences of all frameworks.
      refused: the reason why no layer of the framework has this configuration, or None.
      nodes: all nodes in the order of computation.
      pairs: number of query-key pairs that causality allows, per head and batch row; None means
        all.
    """

    sizes: Mapping[str, int]
    dtype: str
    framework: str | None
    refused: str | None
    nodes: tuple[Node, ...]
    pairs: int | None = None

    def __getitem__(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def flops(self) -> int:
        """Operations of all nodes."""
        return sum(node.flops for node in self.nodes)

    @property
    def bytes(self) -> int:
        """Bytes read and written by all nodes, as if each were a separate program."""
        return sum(node.bytes for node in self.nodes)

    @property
    def bytes_fused(self) -> int:
        """Bytes read and written if no array with both axes T and S leaves the chip.

        This is the traffic of fused attention: it reads heads (and a mask), and writes the context.
        """
        over_pairs = {n.name for n in self.nodes if n.kind != "input" and n.axes.startswith("B N")}
        inside = over_pairs | {"scaled_query"}
        needed = {i for n in self.nodes if n.name in inside for i in n.inputs} - inside
        outside = [n for n in self.nodes if n.name not in inside | {"context"}]
        context = self["context"]
        needed |= set(context.inputs) - inside
        read = sum(self[name].size for name in needed)
        return sum(n.bytes for n in outside) + read + context.bytes_written

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-compatible data."""
        nodes = []
        for node in self.nodes:
            row = asdict(node)
            row["parameters"] = [array._asdict() for array in node.parameters]
            row["differences"] = [one._asdict() for one in node.differences]
            nodes.append(row)
        totals = {name: getattr(self, name) for name in ("flops", "bytes", "bytes_fused")}
        head = {k: getattr(self, k) for k in ("dtype", "framework", "refused", "pairs")}
        return {"sizes": dict(self.sizes), **head, **totals, "nodes": nodes}

    def __str__(self) -> str:
        rows = [("node", "formula", "axes", "shape", "dtype", "FLOPs", "bytes")]
        rows += [
            (n.name, n.formula, n.axes, str(n.shape), n.dtype, f"{n.flops:,}", f"{n.bytes:,}")
            for n in self.nodes
        ]
        rows += [("all", "", "", "", "", f"{self.flops:,}", f"{self.bytes:,}")]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    def svg(self) -> str:
        """The graph as an SVG that is legible on light and dark backgrounds."""
        return draw(self)

    _repr_svg_ = svg
