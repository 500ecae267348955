"""The document's walk through attention, step by step, and the nodes that it means."""

from typing import Any, NamedTuple

from experiments.dataflow.choices import DOCUMENT
from jaxmha.introspect.graph import DataFlow
from jaxmha.introspect.graph_nodes import describe

SIZES: dict[str, Any] = {"num_heads": 8, "features": 512}
LENGTHS: dict[str, Any] = {"query_len": 10, "kv_len": 12}


class Step(NamedTuple):
    """One step of the document, as `document.toml` has it."""

    name: str
    nodes: list[str]
    verdict: str
    shape: str = ""


STEPS = tuple(Step(**step) for step in DOCUMENT["steps"])


def flow() -> DataFlow:
    """The document's layer: no batch, queries and keys of different lengths, a mask."""
    lengths = (1, 1, LENGTHS["query_len"], LENGTHS["kv_len"])
    return describe(**SIZES, **LENGTHS, mask=lengths)


def predicted(B: int, T: int) -> dict[str, float]:
    """Shares that the graph predicts for self-attention of one shape."""
    found = describe(**SIZES, query_len=T, batch=B)
    pairs = [node for node in found.nodes if node.axes.startswith("B N") or node.name == "context"]
    projections = [node for node in found.nodes if node.parameters]
    return {
        "flops": float(found.flops),
        "projections": sum(node.flops for node in projections) / found.flops,
        "pairs": sum(node.flops for node in pairs) / found.flops,
        "bytes": float(found.bytes),
        "fused": found.bytes / found.bytes_fused,
    }
