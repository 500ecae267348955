"""Parameter layout of equinox.nn.MultiheadAttention; keys are its attribute paths."""

from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.by_hand import TIES

_EQUINOX = (
    Entry("query_proj.weight", "(N H) Dq", ("query.kernel",)),
    Entry("key_proj.weight", "(N H) Dk", ("key.kernel",)),
    Entry("value_proj.weight", "(N h) Dv", ("value.kernel",)),
    Entry("output_proj.weight", "Do (N h)", ("out.kernel",)),
    Entry("query_proj.bias", "(N H)", ("query.bias",), "query bias"),
    Entry("key_proj.bias", "(N H)", ("key.bias",), "key bias"),
    Entry("value_proj.bias", "(N h)", ("value.bias",), "value bias"),
    Entry("output_proj.bias", "Do", ("out.bias",), "output bias"),
)
EQUINOX = Layout(
    "equinox",
    _EQUINOX,
    ties={"K": TIES["K"]},
    holds=frozenset({"dropout_rate"}),
    about="equinox.nn.MultiheadAttention",
)
LAYOUTS = (EQUINOX,)
