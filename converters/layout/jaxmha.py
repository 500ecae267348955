"""jaxmha's own layout: every leaf of `MHAParams` as it is; metadata of the file holds `Semantics`."""

from dataclasses import fields

from jaxmha import Semantics
from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.params import CANONICAL

# Leaf -> its group; "" for required leaves. Every other leaf is a group of its own.
_TOGETHER = {
    **dict.fromkeys(("query.kernel", "key.kernel", "value.kernel"), ""),
    **dict.fromkeys(("bias_k", "bias_v"), "bias kv"),
    **dict.fromkeys(("query_norm", "key_norm"), "norms"),
    **dict.fromkeys(("query_norm_heads", "key_norm_heads"), "norms of every head"),
    **dict.fromkeys(("query_norm_bias", "key_norm_bias"), "norm biases"),
    **dict.fromkeys(("query_norm_bias_heads", "key_norm_bias_heads"), "norm biases of every head"),
}

_ENTRIES = tuple(
    Entry(leaf.replace(".", "_"), axes, (leaf,), _TOGETHER.get(leaf, leaf))
    for leaf, axes in CANONICAL.items()
)
JAXMHA = Layout(
    "jaxmha",
    _ENTRIES,
    ties={},
    convention="",
    holds=frozenset(field.name for field in fields(Semantics)),
    about="jaxmha's own arrays: query_kernel, query_bias etc. with heads as axes; the metadata of a "
    "safetensors file holds what the weights do not (scale, soft cap, norms)",
)
LAYOUTS = (JAXMHA,)
