"""The document's walk through attention, step by step, and the nodes that it means."""

from typing import Any, NamedTuple

from jaxmha.introspect.graph import DataFlow
from jaxmha.introspect.graph_nodes import describe

SIZES: dict[str, Any] = {"num_heads": 8, "features": 512}
LENGTHS: dict[str, Any] = {"query_len": 10, "kv_len": 12}


class Step(NamedTuple):
    """One step of the document.

    Attributes:
      name, shape: as the document has them; "" where it gives none.
      nodes: of `describe`.
      verdict: what is so, and what is not.
    """

    name: str
    shape: str
    nodes: tuple[str, ...]
    verdict: str


_PAIRS = "[q_len x kv_len]"
STEPS = (
    Step("project queries, keys and values", "", ("query_heads", "key_heads", "value_heads"),
         "so; nearly all the work at short lengths"),
    Step("split into heads", "", ("query_heads",),
         "no work of its own: kernels have the heads as an axis, and torch's split is a view"),
    Step("`Q`", "[q_len x qk_dim]", ("query_heads",), "so, for every head"),
    Step("`K`", "[kv_len x qk_dim]", ("key_heads",), "so"),
    Step("`V`", "[kv_len x v_dim]", ("value_heads",), "so; in torch's module v_dim is qk_dim"),
    Step("`A`", _PAIRS, ("logits",), "so"),
    Step("`A_scaled`", _PAIRS, ("scaled_query",),
         "the same numbers; frameworks scale the queries or the logits, before or after rounding"),
    Step("mask", _PAIRS, ("masked_logits",),
         "-inf in torch; finite constants in Keras, Flax and jax.nn"),
    Step("`A_probs`", _PAIRS, ("weights",),
         "so, unless nothing is left to attend: NaN, 0 or a mean, by framework and path"),
    Step("`output` of attention", "[q_len x v_dim]", ("context",), "so"),
    Step("combine the heads, project the output", "", ("out",), "so; combining is no work"),
)  # fmt: skip


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
