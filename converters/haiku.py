"""haiku.MultiHeadAttention, in and out; keys are its module paths joined with `/`.

Called as (query, key, value). In its masks True means attend.
"""

from jaxmha.converters.by_hand import TIES
from jaxmha.converters.layout import Entry, Layout
from jaxmha.converters.verbs import verbs

_HAIKU = (
    Entry("query/w", "Dq (N H)", ("query.kernel",)),
    Entry("key/w", "Dk (N H)", ("key.kernel",)),
    Entry("value/w", "Dv (N h)", ("value.kernel",)),
    Entry("linear/w", "(N h) Do", ("out.kernel",)),
    Entry("query/b", "(N H)", ("query.bias",), "bias"),
    Entry("key/b", "(N H)", ("key.bias",), "bias"),
    Entry("value/b", "(N h)", ("value.bias",), "bias"),
    Entry("linear/b", "Do", ("out.bias",), "bias"),
)
HAIKU = Layout(
    "haiku",
    _HAIKU,
    ties={"K": TIES["K"]},
    separator="/",
    about="haiku.MultiHeadAttention",
)
LAYOUTS = (HAIKU,)
import_params, export_params = verbs(LAYOUTS)
