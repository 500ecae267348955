"""Parameter layout of Flax linen.MultiHeadDotProductAttention and nnx.MultiHeadAttention."""

from jaxmha import Semantics
from jaxmha.converters.layout.base import Entry, Layout

_LINEN = (
    Entry("query/kernel", "Dq N H", ("query.kernel",)),
    Entry("query/bias", "N H", ("query.bias",), "bias"),
    Entry("key/kernel", "Dk K H", ("key.kernel",)),
    Entry("key/bias", "K H", ("key.bias",), "bias"),
    Entry("value/kernel", "Dv K H", ("value.kernel",)),
    Entry("value/bias", "K H", ("value.bias",), "bias"),
    Entry("out/kernel", "N H Do", ("out.kernel",)),
    Entry("out/bias", "Do", ("out.bias",), "bias"),
    Entry("query_ln/scale", "H", ("query_norm",), "norm"),
    Entry("key_ln/scale", "H", ("key_norm",), "norm"),
)
LINEN = Layout(
    "flax",
    _LINEN,
    ties={"h": ("H", "flax attention has value heads as wide as query heads")},
    separator="/",
    semantics=Semantics(qk_norm="layer"),
    holds=frozenset({"dropout_rate", "dropout_broadcast"}),
    convention="flax",
    about="flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention",
)
LAYOUTS = (LINEN,)

# linen and nnx share one parameter tree, but each class requires other sizes to be equal.
LINEN_TIES = {"K": ("N", "linen has as many key/value heads as query heads (nnx has fewer)")}
NNX_TIES = {
    "Dk": ("Dv", "nnx has one width for key and value inputs, in_kv_features (linen has two)")
}
