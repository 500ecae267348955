"""Tables of the terms in layer names: synonyms, positions in a sequence, packed projections."""

import re
from collections.abc import Sequence

# Canonical term -> its synonyms.
_SYNONYMS = {
    "query": "q query queries wq",
    "key": "k key keys wk",
    "value": "v value values wv",
    "attn": "attn attention att mha selfattention attend attends attentions multihead",
    "cross": "cross encdec crossattention memory xattn",
    "mlp": "mlp ffn ff feedforward densereludense ffw",
    "norm": "norm ln layernorm rmsnorm bn batchnorm normalization normalisation norms bns",
    "encoder": "encoder enc",
    "decoder": "decoder dec",
    "text": "text txt language",
    "vision": "vision visual image img images",
    "embed": "embed emb embd embedding embeddings embedder",
    "position": "pos position positions positional wpe",
    "token": "tok token tokens word terms wte vocab",
    "type": "type seg segment segments",
    "class": "cls class",
    "head": "head heads classifier logits predictions unembed unembedding",
    "out": "out output outputs o wo readout outc",
    "in": "in input inputs wi intermediate inc",
    "pool": "pool pooler pooled",
    "relative": "relative rel",
    "final": "final last",
    "scale": "scale gamma ls lambda",
    "gate": "gate router gating gated",
    "conv": "conv convs convolution conv1d conv2d",
    "time": "time t timestep",
    "label": "label y labels",
    "mean": "mean mu means",
    "logit": "logit temperature",
    "depthwise": "depthwise dw dwconv depth",
}
CANONICAL = {word: name for name, terms in _SYNONYMS.items() for word in terms.split()}
# Terms that do not distinguish one layer from another.
_NOISE = frozenset(
    [
        "layer",
        "layers",
        "block",
        "blocks",
        "model",
        "module",
        "net",
        "network",
        "list",
        "h",
        "stack",
        "stacks",
        "w",
        "weight",
        "weights",
        "linear",
        "linears",
        "dense",
        "fc",
        "lin",
        "proj",
        "projection",
        "kernel",
        "param",
        "params",
        "c",
        "to",
        "the",
        "and",
        "of",
        "a",
        "b",
        "base",
        "main",
        "backbone",
        "transformer",
        "vars",
        "func",
        "fn",
        "sub",
    ]
)
# Name of a list of repeated blocks -> the common name "layer".
LISTS = dict.fromkeys(("layer", "block", "h", "stack", "stage", "depth"), "layer")
# Terms that give the position of a layer in a sequence -> that position.
ORDER = {
    "in": 1,
    "out": 2,
    "first": 1,
    "second": 2,
    "third": 3,
    "fourth": 4,
    "before": 1,
    "after": 2,
}
# Name of a packed layer -> the projections in it, in order.
PACKED = {
    **dict.fromkeys(
        (
            *("in_proj_weight", "qkv", "c_attn", "to_qkv", "wqkv", "qkv_proj", "w_qkv"),
            *("query_key_value", "queries_keys_values", "w_pack", "att_proj"),
        ),
        ("query", "key", "value"),
    ),
    **dict.fromkeys(
        ("to_kv", "kv", "kv_proj", "wkv", "key_value", "keys_values"), ("key", "value")
    ),
    # w12 is xformers' and DINOv2's, and weights_in what transformers 4 calls it.
    **dict.fromkeys(("gate_up_proj", "gate_up", "w12", "weights_in"), ("gate", "up")),
}
# (name, axis order or "" for any) of packed layers whose parts follow one another, because only one
# library writes them: torch's MultiheadAttention, GPT-2's Conv1D and DINOv2's SwiGLU. The parts of
# other layers may alternate head by head: a question asks.
SURE = (("in_proj_weight", ""), ("c_attn", "io"), ("w12", ""), ("weights_in", ""))
# Mutually exclusive terms: layers with different terms of one group never match.
APART = (
    ("query", "key", "value", "out"),
    ("encoder", "decoder"),
    ("cross", "self"),
    ("text", "vision"),
    ("token", "position", "type"),
    ("attn", "mlp"),
    ("gate", "in", "out"),
    ("embed", "head"),
    ("norm", "embed"),
    ("mean", "logvar", "sigma"),
)
# Terms that mean the first and second matrix in an MLP only; in a U-Net, for example, they mean
# other things.
IN_MLP = {"up": "in", "down": "out"}
# Sibling names that have a role only if all of them exist -> the roles of each. Names with more than
# one row of roles have the row that their shapes allow (`roles.assigned`).
_GATE_UP_DOWN = (("gate", "in", "out"),)
TOGETHER = {
    ("w1", "w2", "w3"): (("gate", "out", "in"), ("gate", "in", "out")),  # Llama; xformers, DINOv2
    ("w1", "v1", "w2"): _GATE_UP_DOWN,  # DBRX
    ("w", "v", "w2"): _GATE_UP_DOWN,  # Shazeer 2020, "GLU variants improve transformer"
    ("linear_1", "linear_v", "linear_2"): _GATE_UP_DOWN,
    ("linear1", "linear_v", "linear2"): _GATE_UP_DOWN,
    ("linear", "linear_v", "linear_1"): _GATE_UP_DOWN,  # Grok-1
    ("fc1_g", "fc1_x", "fc2"): _GATE_UP_DOWN,  # timm
    ("wi_0", "wi_1", "wo"): _GATE_UP_DOWN,
    ("gate_proj", "up_proj", "down_proj"): _GATE_UP_DOWN,
    ("gate", "up", "down"): _GATE_UP_DOWN,
    ("gate", "up", "down_proj"): _GATE_UP_DOWN,  # gate and up are parts of a packed layer
    ("gate", "up", "w3"): _GATE_UP_DOWN,
    ("gate", "up", "weights_out"): _GATE_UP_DOWN,
}
# Classes, in snake case, that Keras, Haiku and linen name layers by and count: `dense_1`, `linear_1`,
# `LayerNorm_1`.
AUTOMATIC = frozenset(
    [
        "dense",
        "einsum_dense",
        "embedding",
        "layer_normalization",
        "batch_normalization",
        "group_normalization",
        "rms_normalization",
        "conv1d",
        "conv2d",
        "conv3d",
        "depthwise_conv1d",
        "depthwise_conv2d",
        "linear",
        "embed",
        "layer_norm",
        "batch_norm",
        "group_norm",
        "rms_norm",
        "conv1_d",
        "conv2_d",
        "conv3_d",
        "dense_general",
        "conv",
    ]
)
_PHRASES = (
    (
        r"enc(oder)?_?dec(oder)?_?att(entio)?n\w*|(encoder|src|multihead)_attn|crossattention",
        "cross_attn",
    ),
    (r"token_type(_ids)?", "type"),
    (r"cls_token|class_token|class_embedding|cls_embedding", "class"),
    (r"lm_head|embed_out|output_head", "head"),
    (r"log_?vars?|log_variance", "logvar"),
    (r"feed_forward|position_?wise", "mlp"),
    (r"self_attn|self_attention|selfattention", "self_attn"),
    (r"logit_scale", "logit"),
)


def snake(name: str) -> str:
    """The name of a class in snake case.

    >>> snake("LayerNorm"), snake("RMSNorm"), snake("conv2d")
    ('layer_norm', 'rms_norm', 'conv2d')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def terms(part: str) -> list[str]:
    """Splits one part of a path into lower-case terms; numbers are separate terms.

    >>> terms("encoder_attn"), terms("LayerNorm"), terms("fc1")
    (['cross', 'attn'], ['layer', 'norm'], ['fc', '1'])
    """
    text = snake(part)
    for pattern, name in _PHRASES:
        text = re.sub(rf"(?<![a-z0-9])({pattern})(?![a-z0-9])", name, text)
    found = re.findall(r"\d+|[a-z]+", text)
    return [word for word in found if word]


def meaning(path: Sequence[str]) -> frozenset[str]:
    """Returns the canonical terms of a path that distinguish layers; numbers are left out."""
    found: set[str] = set()
    for part in path:
        for word in terms(part):
            if word.isdigit() or word in _NOISE:
                continue
            named = CANONICAL.get(word) or CANONICAL.get(word.removesuffix("s"), "")
            found.add(named or (word.removesuffix("s") if len(word) > 3 else word))
            found |= {"embed"} if word in ("wte", "wpe") else set()
    return frozenset(found)


def contradict(a: frozenset[str], b: frozenset[str]) -> tuple[str, str] | None:
    """Returns two terms, one of each set, that exclude each other (`APART`); None if none do."""
    for group in APART:
        mine, theirs = a.intersection(group), b.intersection(group)
        if mine and theirs and not mine & theirs:
            return min(mine), min(theirs)
    return None


def packed(name: str) -> tuple[str, ...]:
    """Returns the projections packed in a layer of this name, in order; () if it packs none.

    >>> packed("c_attn"), packed("Wqkv"), packed("dense")
    (('query', 'key', 'value'), ('query', 'key', 'value'), ())
    """
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return PACKED.get(text, PACKED.get(text.replace("_", ""), ()))
