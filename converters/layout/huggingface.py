"""Parameter layouts of published checkpoints: Hugging Face transformers and timm."""

import re
from dataclasses import replace

from jaxmha import Semantics
from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.by_hand import TIES

_RESIDUAL = {"Do": ("Dq", "the block adds its output to its input")}
_PACKED = {
    "K": ("N", "query, key and value are packed with one head count"),
    "h": ("H", "query, key and value are packed with one head width"),
    "Dk": ("Dq", "one input is projected to query, key and value"),
    "Dv": ("Dq", "one input is projected to query, key and value"),
}
_QKV_KERNEL = ("query.kernel", "key.kernel", "value.kernel")
_QKV_BIAS = ("query.bias", "key.bias", "value.bias")
_DROPOUT = frozenset({"dropout_rate"})

_RELATIVE = ("self.relative_position_bias_table", "self.relative_position_index")
_TABLES = (
    "relative_position_bias_table", "relative_position_index",
    "rel_pos.relative_position_bias_table", "rel_pos.relative_position_index",
    "attention_biases", "attention_bias_idxs", "rel_pos_bias.weight",
    *(f"rel_pos.mlp.fc{i}.{array}" for i in (1, 2) for array in ("weight", "bias")),
)  # fmt: skip


def _arrays(layer: str) -> tuple[str, str]:
    return f"{layer}.weight", f"{layer}.bias"


_POST_NORM = _arrays("output.LayerNorm")
_BERT = (
    Entry("self.query.weight", "(N H) Dq", ("query.kernel",)),
    Entry("self.query.bias", "(N H)", ("query.bias",)),
    Entry("self.key.weight", "(N H) Dk", ("key.kernel",)),
    Entry("self.key.bias", "(N H)", ("key.bias",)),
    Entry("self.value.weight", "(N h) Dv", ("value.kernel",)),
    Entry("self.value.bias", "(N h)", ("value.bias",)),
    Entry("output.dense.weight", "Do (N h)", ("out.kernel",)),
    Entry("output.dense.bias", "Do", ("out.bias",)),
)
BERT = Layout(
    "bert",
    _BERT,
    ties={**TIES, **_RESIDUAL},
    holds=_DROPOUT,
    other_keys=(*_POST_NORM, *_RELATIVE),
    about="BERT, RoBERTa, MiniLM: keys under `encoder.layer.0.attention`",
)
LXMERT = Layout(
    "lxmert",
    tuple(entry._replace(key=entry.key.replace("self.", "att.")) for entry in _BERT),
    ties={**TIES, **_RESIDUAL},
    holds=_DROPOUT,
    other_keys=_POST_NORM,
    about="LXMERT: keys under `encoder.x_layers.0.visual_attention`",
)
DEBERTA_1 = Layout(
    "deberta-1",
    (
        Entry("self.in_proj.weight", "(N qkv H) Dq", _QKV_KERNEL),
        Entry("self.q_bias", "(N H)", ("query.bias",)),
        Entry("self.v_bias", "(N h)", ("value.bias",)),
        Entry("output.dense.weight", "Do (N h)", ("out.kernel",)),
        Entry("output.dense.bias", "Do", ("out.bias",)),
    ),
    ties={**_PACKED, **_RESIDUAL},
    holds=_DROPOUT,
    other_keys=(*_POST_NORM, "self.pos_proj.weight", *_arrays("self.pos_q_proj")),
    about="DeBERTa: packed head by head, without a key bias (terms by position apart)",
)
DEBERTA = Layout(
    "deberta",
    tuple(
        entry._replace(
            key=re.sub(r"self\.(query|key|value)\.", r"self.\1_proj.", entry.key),
        )
        for entry in _BERT
    ),
    ties={**TIES, **_RESIDUAL},
    holds=_DROPOUT,
    other_keys=(*_POST_NORM, *_arrays("self.pos_key_proj"), *_arrays("self.pos_query_proj")),
    about="DeBERTa v2 and v3: keys under `encoder.layer.0.attention` (terms by position apart)",
)
_VIT = (
    Entry("attention.query.weight", "(N H) Dq", ("query.kernel",)),
    Entry("attention.query.bias", "(N H)", ("query.bias",), "qkv bias"),
    Entry("attention.key.weight", "(N H) Dk", ("key.kernel",)),
    Entry("attention.key.bias", "(N H)", ("key.bias",), "qkv bias"),
    Entry("attention.value.weight", "(N h) Dv", ("value.kernel",)),
    Entry("attention.value.bias", "(N h)", ("value.bias",), "qkv bias"),
    Entry("output.dense.weight", "Do (N h)", ("out.kernel",)),
    Entry("output.dense.bias", "Do", ("out.bias",)),
)
VIT = Layout(
    "vit",
    _VIT,
    ties={**TIES, **_RESIDUAL},
    holds=_DROPOUT,
    about="ViT, DeiT: keys under `encoder.layer.0.attention`",
)
BEIT = Layout(
    "beit",
    tuple(
        entry._replace(group="qkv bias" if entry.group else "")
        for entry in _VIT
        if entry.leaves != ("key.bias",)
    ),
    ties={**TIES, **_RESIDUAL},
    holds=_DROPOUT,
    about="BEiT, ViT without a key bias: keys under `encoder.layer.0.attention`",
)
VIDEO_MAE = Layout(
    "videomae",
    (
        *(entry for entry in _VIT if entry.group == "" or entry.key.endswith("weight")),
        Entry("attention.q_bias", "(N H)", ("query.bias",), "qkv bias"),
        Entry("attention.v_bias", "(N h)", ("value.bias",), "qkv bias"),
    ),
    ties={**TIES, **_RESIDUAL},
    holds=_DROPOUT,
    about="VideoMAE: ViT with q_bias and v_bias, keys under `encoder.layer.0.attention`",
)
LW_DETR = Layout(
    "lw-detr",
    tuple(
        entry._replace(key=entry.key.replace("output.dense.", "output.")) for entry in BEIT.entries
    ),
    ties={**TIES, **_RESIDUAL},
    holds=_DROPOUT,
    about="LW-DETR: ViT without a key bias, keys under `encoder.layer.0.attention`",
)
VIDEO = Layout(
    "timesformer",
    (
        Entry("attention.qkv.weight", "(qkv N H) Dq", _QKV_KERNEL),
        Entry("attention.qkv.bias", "(qkv N H)", _QKV_BIAS, "qkv bias"),
        Entry("output.dense.weight", "Do (N h)", ("out.kernel",)),
        Entry("output.dense.bias", "Do", ("out.bias",)),
    ),
    ties=_PACKED,
    holds=_DROPOUT,
    about="TimeSformer: keys under `encoder.layer.0.attention`",
)


def _with_axes(entries: tuple[Entry, ...], old: str, new: str) -> tuple[Entry, ...]:
    """The entries, with `old` replaced by `new` in their axes."""
    return tuple(entry._replace(axes=entry.axes.replace(old, new)) for entry in entries)


TIMM = Layout(
    "timm",
    (
        Entry("qkv.weight", "(qkv N H) Dq", _QKV_KERNEL),
        Entry("qkv.bias", "(qkv N H)", _QKV_BIAS, "qkv bias"),
        Entry("proj.weight", "Do (N h)", ("out.kernel",)),
        Entry("proj.bias", "Do", ("out.bias",), "out bias"),
    ),
    ties={**_PACKED, **_RESIDUAL},
    holds=_DROPOUT,
    other_keys=("rel_pos_h", "rel_pos_w", *_TABLES, "latent"),
    about="timm vision transformers: keys under `blocks.0.attn`",
)
TIMM_KEYLESS = replace(
    TIMM,
    name="timm-keyless",
    entries=(
        TIMM.entries[0],
        Entry("q_bias", "(N H)", ("query.bias",)),
        Entry("v_bias", "(N h)", ("value.bias",)),
        *TIMM.entries[2:],
    ),
    about="BEiT and EVA of timm, packed without a key bias: keys under `blocks.0.attn`",
)
TIMM_HEADS = replace(
    TIMM,
    name="timm-heads",
    entries=_with_axes(TIMM.entries, "(qkv N H)", "(N qkv H)"),
    about="MaxViT of timm with relative positions of its own, packed head by head",
)
TIMM_HEADS_CONV = replace(
    TIMM_HEADS,
    name="timm-heads-conv",
    entries=tuple(
        entry._replace(axes=f"{entry.axes} 1 1") if entry.key.endswith("weight") else entry
        for entry in TIMM_HEADS.entries
    ),
    ties=_PACKED,  # the first block of a stage and its shortcut have Do > Dq
    about="CoAtNet of timm: convolutions of one position, packed head by head",
)
TIMM_NEST = replace(
    TIMM,
    name="timm-nest",
    entries=_with_axes(TIMM.entries, "(N h)", "(h N)"),
    about="NesT of timm: the output layer reads the features of all heads in turn",
)
GPT2 = Layout(
    "gpt2",
    (
        Entry("c_attn.weight", "Dq (qkv N H)", _QKV_KERNEL),
        Entry("c_attn.bias", "(qkv N H)", _QKV_BIAS),
        Entry("c_proj.weight", "(N h) Do", ("out.kernel",)),
        Entry("c_proj.bias", "Do", ("out.bias",)),
    ),
    ties={**_PACKED, **_RESIDUAL},
    holds=_DROPOUT,
    other_keys=("bias", "masked_bias"),
    about="GPT-2 (Conv1D, so kernels are not transposed): keys under `h.0.attn`",
)
NEOX = Layout(
    "gpt-neox",
    (
        Entry("query_key_value.weight", "(N qkv H) Dq", _QKV_KERNEL),
        Entry("query_key_value.bias", "(N qkv H)", _QKV_BIAS, "bias"),
        Entry("dense.weight", "Do (N h)", ("out.kernel",)),
        Entry("dense.bias", "Do", ("out.bias",), "bias"),
    ),
    ties={**_PACKED, **_RESIDUAL},
    holds=_DROPOUT,
    other_keys=("bias", "masked_bias", "rotary_emb.inv_freq"),
    about="GPT-NeoX, Pythia, packed head by head (rotary embedding apart)",
)
T5 = Layout(
    "t5",
    (
        Entry("q.weight", "(N H) Dq", ("query.kernel",)),
        Entry("k.weight", "(N H) Dk", ("key.kernel",)),
        Entry("v.weight", "(N h) Dv", ("value.kernel",)),
        Entry("o.weight", "Do (N h)", ("out.kernel",)),
    ),
    ties={**TIES, **_RESIDUAL},
    semantics=Semantics(scale=1.0),
    holds=_DROPOUT,
    other_keys=("relative_attention_bias.weight",),
    about="T5 without biases and scale: keys under `SelfAttention`, `EncDecAttention` (the relative "
    "bias goes to the call, or stays a tensor of a file; other layouts take --fold-scale)",
)
MPNET = Layout(
    "mpnet",
    tuple(
        entry._replace(key=entry.key.replace(".weight", end), axes=axes, leaves=(leaf,))
        for entry, out in zip(T5.entries, ("(N H)", "(N H)", "(N h)", "Do"), strict=True)
        for end, axes, leaf in (
            (".weight", entry.axes, entry.leaves[0]),
            (".bias", out, entry.leaves[0].replace("kernel", "bias")),
        )
    ),
    ties={**TIES, **_RESIDUAL},
    holds=_DROPOUT,
    about="MPNet: T5's names with biases, keys under `encoder.layer.0.attention.attn` (the relative "
    "bias goes to the call, or stays a tensor of a file)",
)
WHISPER = Layout(
    "whisper",
    (
        Entry("q_proj.weight", "(N H) Dq", ("query.kernel",)),
        Entry("q_proj.bias", "(N H)", ("query.bias",)),
        Entry("k_proj.weight", "(N H) Dk", ("key.kernel",)),
        Entry("v_proj.weight", "(N h) Dv", ("value.kernel",)),
        Entry("v_proj.bias", "(N h)", ("value.bias",)),
        Entry("out_proj.weight", "Do (N h)", ("out.kernel",)),
        Entry("out_proj.bias", "Do", ("out.bias",)),
    ),
    ties={**TIES, **_RESIDUAL},
    holds=_DROPOUT,
    about="Whisper, without a key bias: keys under `layers.0.self_attn`, `encoder_attn`",
)
LAYOUTS = (
    BERT,
    LXMERT,
    DEBERTA,
    DEBERTA_1,
    VIT,
    BEIT,
    LW_DETR,
    VIDEO_MAE,
    VIDEO,
    TIMM,
    TIMM_KEYLESS,
    TIMM_HEADS,
    TIMM_HEADS_CONV,
    TIMM_NEST,
    GPT2,
    NEOX,
    T5,
    MPNET,
    WHISPER,
)
