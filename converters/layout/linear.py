"""Layouts of attention made of linear layers: torch Linear, Keras Dense, or bare matrices."""

from dataclasses import replace

from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.by_hand import BY_HAND, DENSE_FILE, TIES, X_TRANSFORMERS

LINEAR = Layout(
    "linear",
    (
        Entry("q_proj.weight", "(N H) Dq", ("query.kernel",)),
        Entry("k_proj.weight", "(N H) Dk", ("key.kernel",)),
        Entry("v_proj.weight", "(N h) Dv", ("value.kernel",)),
        Entry("out_proj.weight", "Do (N h)", ("out.kernel",)),
        Entry("q_proj.bias", "(N H)", ("query.bias",), "bias"),
        Entry("k_proj.bias", "(N H)", ("key.bias",), "bias"),
        Entry("v_proj.bias", "(N h)", ("value.bias",), "bias"),
        Entry("out_proj.bias", "Do", ("out.bias",), "bias"),
    ),
    ties=TIES,
    about="four torch.nn.Linear q_proj, k_proj, v_proj, out_proj (also CLIP, BART, OPT)",
)
# Most layouts in `meaning` use these projections too.
LLAMA_ENTRIES = (
    Entry("q_proj.weight", "(N H) Dq", ("query.kernel",)),
    Entry("k_proj.weight", "(K H) Dk", ("key.kernel",)),
    Entry("v_proj.weight", "(K h) Dv", ("value.kernel",)),
    Entry("o_proj.weight", "Do (N h)", ("out.kernel",)),
    Entry("q_proj.bias", "(N H)", ("query.bias",), "qkv bias"),
    Entry("k_proj.bias", "(K H)", ("key.bias",), "qkv bias"),
    Entry("v_proj.bias", "(K h)", ("value.bias",), "qkv bias"),
    Entry("o_proj.bias", "Do", ("out.bias",), "out bias"),
)
LLAMA = Layout(
    "llama",
    LLAMA_ENTRIES,
    ties={
        "h": ("H", "Llama attention has value heads as wide as query heads"),
        "Dk": ("Dq", "Llama attention projects one input to query, key and value"),
        "Dv": ("Dq", "Llama attention projects one input to query, key and value"),
    },
    other_keys=("rotary_emb.inv_freq", "bias_u", "bias_v", "relative_k_proj.weight"),
    about="Llama, Mistral, Qwen2 attention with grouped queries (rotary embedding apart)",
)
LLAMA_KEYLESS = replace(
    LLAMA,
    name="llama-keyless",
    entries=tuple(
        entry._replace(group="") if entry.group == "qkv bias" else entry
        for entry in LLAMA_ENTRIES
        if entry.leaves != ("key.bias",)
    ),
    about="GLM-ASR, Voxtral, DINOv3: Llama's names without a bias of the keys",
)
LLAMA_ACROSS = replace(
    LLAMA,
    name="llama-across",
    ties={"h": LLAMA.ties["h"]},
    apart=("Dq Dk", "attention of one input has layout llama"),
    about="Dia, SAM 3, Idefics: Llama's names, keys and values of another input",
)
LINEAR_OUT_BIAS = replace(
    LINEAR,
    name="linear-out-bias",
    entries=tuple(
        entry._replace(group="") if entry.key == "out_proj.bias" else entry
        for entry in LINEAR.entries
        if not entry.group or entry.key == "out_proj.bias"
    ),
    other_keys=("causal_mask", "attn_mask", "mask", "tril"),  # buffers of masks
    about="GPT-Neo: q_proj, k_proj, v_proj without biases, out_proj with one",
)
_PACKED_TIES = {
    "Do": ("Dq", "the block adds its output to its input"),
    "h": ("H", "query, key and value are packed with one head width"),
    "Dk": ("Dq", "one input is projected to query, key and value"),
    "Dv": ("Dq", "one input is projected to query, key and value"),
}
_ALL = ("query.kernel", "key.kernel", "value.kernel"), ("query.bias", "key.bias", "value.bias")
# Layout name -> packed layer, output layer, axis letter for all heads (see `uneven`), description.
# `_uneven` lists the output kernel first: its input width and the head count give the head width.
_UNEVEN = {
    "phi3": ("qkv_proj", "o_proj", "M", "Phi-3: all queries, then all keys, then all values"),
    "dbrx": ("Wqkv", "out_proj", "M", "DBRX: all queries, then all keys, then all values"),
    "falcon": ("query_key_value", "dense", "U", "Falcon: groups of queries, a key and a value"),
    "chatglm": (
        "query_key_value",
        "dense",
        "M",
        "ChatGLM: all queries, then all keys, then values",
    ),
    "megatron": (
        "linear_qkv",
        "linear_proj",
        "U",
        "Megatron-Core: groups of queries, a key, a value",
    ),
    "molmo": ("att_proj", "attn_out", "M", "Molmo: all queries, then all keys, then all values"),
    "timm-grouped": ("qkv", "proj", "M", "EXAONE 4.5: all queries, then all keys, then values"),
    "starcoder": ("c_attn", "c_proj", "M", "StarCoder (gpt_bigcode): one head of keys and values"),
}


# Transformer Engine keeps the norm before a block in the block's first linear layer: keys under the
# prefix of the block that are not part of attention.
_OTHER = {"megatron": ("linear_qkv.layer_norm_weight", "linear_qkv.layer_norm_bias")}
_APART = {"chatglm": ("N K", "rows of as many keys as queries are those of layout gpt-neox")}


def _uneven(name: str, packed: str, out: str, heads: str, about: str) -> Layout:
    entries = (
        Entry(f"{out}.weight", "Do (N H)", ("out.kernel",)),
        Entry(f"{packed}.weight", f"({heads} H) Dq", _ALL[0]),
        Entry(f"{packed}.bias", f"({heads} H)", _ALL[1], "qkv bias"),
        Entry(f"{out}.bias", "Do", ("out.bias",), "out bias"),
    )
    return Layout(
        name,
        entries,
        ties=_PACKED_TIES,
        other_keys=("rotary_emb.inv_freq", *_OTHER.get(name, ())),
        apart=_APART.get(name, ("", "")),
        about=about,
    )


UNEVEN = tuple(_uneven(name, *row) for name, row in _UNEVEN.items())
# `starcoder` has the same keys, and nanoGPT too: only a config tells that heads are packed so.
STARCODER_HEADS = _uneven(
    "starcoder-heads", "c_attn", "c_proj", "U", "gpt_bigcode without multi_query: head by head"
)
_DENSE = (
    Entry("q_proj/kernel", "Dq (N H)", ("query.kernel",)),
    Entry("k_proj/kernel", "Dk (N H)", ("key.kernel",)),
    Entry("v_proj/kernel", "Dv (N h)", ("value.kernel",)),
    Entry("out_proj/kernel", "(N h) Do", ("out.kernel",)),
    Entry("q_proj/bias", "(N H)", ("query.bias",), "bias"),
    Entry("k_proj/bias", "(N H)", ("key.bias",), "bias"),
    Entry("v_proj/bias", "(N h)", ("value.bias",), "bias"),
    Entry("out_proj/bias", "Do", ("out.bias",), "bias"),
)
DENSE = Layout(
    "dense",
    _DENSE,
    ties=TIES,
    separator="/",
    convention="flax",
    about="four Keras or Flax Dense q_proj, k_proj, v_proj, out_proj",
)
ANNOTATED = Layout(
    "annotated",
    (
        Entry("linears.0.weight", "(N H) Dq", ("query.kernel",)),
        Entry("linears.1.weight", "(N H) Dk", ("key.kernel",)),
        Entry("linears.2.weight", "(N h) Dv", ("value.kernel",)),
        Entry("linears.3.weight", "Do (N h)", ("out.kernel",)),
        Entry("linears.0.bias", "(N H)", ("query.bias",), "bias"),
        Entry("linears.1.bias", "(N H)", ("key.bias",), "bias"),
        Entry("linears.2.bias", "(N h)", ("value.bias",), "bias"),
        Entry("linears.3.bias", "Do", ("out.bias",), "bias"),
    ),
    ties=TIES,
    about="MultiHeadedAttention of the Annotated Transformer: linears.0 to 3",
)
MATRICES = Layout(
    "matrices",
    (
        Entry("linears.0", "Dq (N H)", ("query.kernel",)),
        Entry("linears.1", "Dk (N H)", ("key.kernel",)),
        Entry("linears.2", "Dv (N h)", ("value.kernel",)),
    ),
    ties=TIES,
    convention="",
    about="three bare matrices applied as `x @ matrix`, heads concatenated, no output layer (for a "
    "target that has one, an identity computes the same)",
)
LAYOUTS = (
    LINEAR,
    LLAMA,
    LLAMA_KEYLESS,
    LLAMA_ACROSS,
    LINEAR_OUT_BIAS,
    *UNEVEN,
    DENSE,
    DENSE_FILE,
    ANNOTATED,
    MATRICES,
    *BY_HAND,
    X_TRANSFORMERS,
)
