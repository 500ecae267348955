"""Attention blocks of Hugging Face transformers' checkpoints, in and out.

The head count is `num_attention_heads` in the checkpoint's config.json.
"""

from collections.abc import Mapping
from typing import Any

from jaxmha import MHAParams, Semantics
from jaxmha.converters import layout as engine
from jaxmha.converters.arrays import NDArray
from jaxmha.converters.layout import Entry, Layout

BERT = Layout(
    "bert",
    (
        Entry("self.query.weight", "(N H) Dq", ("query.kernel",)),
        Entry("self.query.bias", "(N H)", ("query.bias",)),
        Entry("self.key.weight", "(N H) Dk", ("key.kernel",)),
        Entry("self.key.bias", "(N H)", ("key.bias",)),
        Entry("self.value.weight", "(N H) Dv", ("value.kernel",)),
        Entry("self.value.bias", "(N H)", ("value.bias",)),
        Entry("output.dense.weight", "Do (N h)", ("out.kernel",)),
        Entry("output.dense.bias", "Do", ("out.bias",)),
    ),
    ties={
        "K": ("N", "BERT attention has as many key/value heads as query heads"),
        "h": ("H", "BERT attention has value heads as wide as query heads"),
        "Do": ("Dq", "BERT attention adds its output to its input"),
    },
    holds=frozenset({"dropout_rate"}),
    beside=("output.LayerNorm.weight", "output.LayerNorm.bias"),
    about="transformers BertAttention (bert, roberta, MiniLM): keys under `...attention`",
)
LAYOUTS = (BERT,)


def import_params(
    state: Mapping[str, Any],
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    prefix: str = "",
) -> tuple[MHAParams, Semantics]:
    """Parameters from a state dict; keys join the prefix (`encoder.layer.0.attention`) with `.`.

    Raises:
      ValueError: a key, shape or head count does not fit; names the key and the axes.
    """
    return engine.import_params(LAYOUTS, state, layout=layout, num_heads=num_heads, prefix=prefix)


def export_params(
    params: MHAParams,
    semantics: Semantics = Semantics(),
    *,
    layout: str | None = None,
    prefix: str = "",
) -> dict[str, NDArray]:
    """A state dict of NumPy arrays.

    Raises:
      ValueError: the layout cannot hold the parameters or the behaviour, with the reason.
    """
    chosen = engine.choose(LAYOUTS, [], layout or BERT.name, prefix)
    return engine.export_params(chosen, params, semantics, prefix=prefix)
