"""Parameter layout of a toy library: query, key and value in one array, head by head."""

from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.by_hand import TIES

TOY = Layout(
    "toy",
    (
        Entry("pack.w", "Dq (N qkv H)", ("query.kernel", "key.kernel", "value.kernel")),
        Entry("mix.w", "(N h) Do", ("out.kernel",)),
    ),
    ties={
        **TIES,
        "Dk": ("Dq", "one input is projected to query, key and value"),
        "Dv": ("Dq", "one input is projected to query, key and value"),
    },
    about="the attention layer of a toy library",
)
LAYOUTS = (TOY,)
