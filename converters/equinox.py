"""equinox.nn.MultiheadAttention, in and out; keys are its attribute paths.

Called as (query, key, value) without a batch axis. In its masks True means attend.
"""

from jaxmha.converters.by_hand import TIES
from jaxmha.converters.layout import Entry, Layout
from jaxmha.converters.verbs import verbs

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
import_params, export_params = verbs(LAYOUTS)
