"""Parameter layout of haiku.MultiHeadAttention; keys are its module paths joined with `/`."""

from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.by_hand import TIES

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
    convention="haiku",
    about="haiku.MultiHeadAttention",
)
LAYOUTS = (HAIKU,)
