"""Multi-head attention as a graph of nodes, each with its formula, shape and cost."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jaxmha.introspect.framework_differences import Difference

Kind = Literal["input", "product", "elementwise", "softmax", "joined"]


class Stored(NamedTuple):
    """A parameter array: its name in the framework, its axes and its shape."""

    name: str
    axes: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One step of attention, as if it were a separate program.

    Attributes:
      name: name of the result.
      kind: `input`; `product` of matrices; `elementwise`; `softmax`; `joined` (concatenated).
      formula: formula of the result, in the names of other nodes and of parameters.
      axes: axes of the result, in jaxmha's axis letters; `S+1` has an extra key position.
      shape: shape of the result.
      dtype: dtype of the result.
      inputs: the nodes that it reads.
      parameters: the parameter arrays that it reads, as the framework stores them.
      cost: number of operations, as a formula. An addition, multiplication, division, comparison or
        exponential counts 1; selecting and copying count 0.
      flops: value of `cost`.
      bytes_read: bytes of inputs and parameters, each read once.
      bytes_written: bytes of the result.
      differences: how frameworks differ at this node.
    """

    name: str
    kind: Kind
    formula: str
    axes: str
    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[str, ...]
    parameters: tuple[Stored, ...]
    cost: str
    flops: int
    bytes_read: int
    bytes_written: int
    differences: tuple[Difference, ...]

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


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
        from jaxmha.introspect.graph_svg import draw

        return draw(self)

    _repr_svg_ = svg
