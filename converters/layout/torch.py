"""Parameter layouts of torch.nn.MultiheadAttention."""

from jaxmha.converters.layout.base import Entry, Layout

_TIES = {
    "K": ("N", "nn.MultiheadAttention has as many key/value heads as query heads"),
    "h": ("H", "nn.MultiheadAttention has value heads as wide as query heads"),
    "Dq": ("N H", "nn.MultiheadAttention has heads of width embed_dim / num_heads"),
    "Do": ("Dq", "out_proj of nn.MultiheadAttention is square"),
}
_SHARED = (
    Entry("in_proj_bias", "(qkv N H)", ("query.bias", "key.bias", "value.bias"), "bias"),
    Entry("out_proj.weight", "Do (N h)", ("out.kernel",)),
    Entry("out_proj.bias", "Do", ("out.bias",), "bias"),
    Entry("bias_k", "1 1 (N H)", ("bias_k",), "bias_kv"),
    Entry("bias_v", "1 1 (N H)", ("bias_v",), "bias_kv"),
)
_HOLDS = frozenset({"add_zero_attn", "dropout_rate"})

PACKED = Layout(
    "torch",
    (
        Entry("in_proj_weight", "(qkv N H) Dq", ("query.kernel", "key.kernel", "value.kernel")),
        *_SHARED,
    ),
    ties={
        **_TIES,
        "Dk": ("Dq", "in_proj_weight packs projections of equal width (see torch-separate)"),
        "Dv": ("Dq", "in_proj_weight packs projections of equal width (see torch-separate)"),
    },
    holds=_HOLDS,
    about="torch.nn.MultiheadAttention with kdim = vdim = embed_dim",
)
SEPARATE = Layout(
    "torch-separate",
    (
        Entry("q_proj_weight", "(N H) Dq", ("query.kernel",)),
        Entry("k_proj_weight", "(N H) Dk", ("key.kernel",)),
        Entry("v_proj_weight", "(N H) Dv", ("value.kernel",)),
        *_SHARED,
    ),
    ties=_TIES,
    apart=("Dq Dk Dv", "nn.MultiheadAttention packs projections of equal width (see torch)"),
    holds=_HOLDS,
    about="torch.nn.MultiheadAttention with kdim or vdim other than embed_dim",
)
LAYOUTS = (PACKED, SEPARATE)
