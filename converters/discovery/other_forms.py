"""Arrays next to projections that make attention a function other than softmax over keys.

A block with such an array has no layout: a conversion copies its tensors, and a note names them.
"""

import re
from collections.abc import Iterable

# Pattern of a key under the prefix of a block -> description of the attention.
FORMS: tuple[tuple[str, str], ...] = (
    (r"(^|[./])temperature$", "it attends over channels, or divides by a learned temperature"),
    (
        r"proj_[lw][./]|talking_heads|head_(logits|weights)_proj|(^|[./])reattn",
        "heads are mixed before or after the softmax",
    ),
    (r"(^|[./])(crpe|pos_enc)[./]", "convolutions of the values are added"),
    (r"(^|[./])pool_[qkv]([./]|$)|(^|[./])attention_pool", "queries, keys and values are pooled"),
    (r"(^|[./])(cpb_mlp|meta_mlp)[./]", "logits are scaled cosines, and a network gives a bias"),
    (r"(^|[./])to_v_gate[./]", "values are gated"),
    (r"(^|[./])per_dim_scale$", "a learned factor of every feature scales the queries"),
    (r"(^|[./])A_log$", "it is linear attention with a state that decays"),
)
# As `FORMS`, for attention whose arrays fit no layout.
_UNKNOWN: tuple[tuple[str, str], ...] = (
    (r"(^|[./])sampling_offsets[./]", "it is deformable: queries give the places of their values"),
    (r"(^|[./])values_vision_proj[./]", "image and text attend each other by the same logits"),
    (r"(^|[./])indexer[./]", "an indexer chooses the keys of each query"),
    (r"(^|[./])[kv]_sconv[./]", "keys and values are convolved"),
    (
        r"(^|[./])continuous_position_bias_mlp[./]",
        "logits are scaled cosines, and a network gives a bias",
    ),
    (
        r"(^|[./])(query|key|value)_global[./]",
        "windows, and tokens that all attend, have projections",
    ),
    (r"(^|[./])conv_qk_\w+[./]", "queries and keys are convolved"),
    (r"(^|[./])r_[wr]_bias$", "positions are projected, and have biases (Transformer-XL)"),
    (r"(^|[./])time_decay$", "it is linear attention with a state that decays"),
    (r"(^|[./])batch_norm[./]", "batch norms follow its projections"),
    (r"(^|[./])convolution_projection_\w+[./]", "convolutions come before its projections"),
)
# Model type -> description of its attention, if no key reveals it.
_TYPES = {
    "codegen": "rows of queries, values and keys are packed in four parts",
    "squeezebert": "its projections are convolutions of groups of features",
    "aimv2_vision_model": "a learned vector is the query, without a projection",
    "aria": "queries, keys and values are projected twice",
    "conditional_detr": "queries and keys join projections of contents and of positions",
    "dab-detr": "queries and keys join projections of contents and of positions",
    "deepseek_v4": "one projection gives keys and values, and the output is rotated back",
    "dots3_note_text": "latents are multiplied by factors of their widths, and heads are gated",
    "florence_vision": "it attends over channels",
    "groupvit": "each token is assigned to one group",
    "hy_v4": "latent attention has gates and sinks, and keys that an indexer chose",
    "janus_vqgan": "a group norm comes first, and no configuration gives its one head",
    "jetmoe": "experts project its queries and its output",
    "longcat_flash": "latents are multiplied by factors of their widths",
    "minimax": "it is linear attention with a state that decays",
    "mobilevitv2": "a softmax weighs tokens, and no pairs of them",
    "neomme": "the output loses its part along the values",
    "reformer": "queries attend keys of equal hashes, or of neighbouring chunks",
    "rwkv": "it is a feed-forward layer whose names are those of attention",
    "swiftformer": "a softmax weighs tokens, and no pairs of them",
    "xlstm": "it has a memory with gates, and no softmax",
}


def of(keys: Iterable[str]) -> str:
    """The description in `FORMS` for a block with these keys; "" if no key matches.

    >>> of(["qkv.weight", "temperature"])
    'it attends over channels, or divides by a learned temperature'
    """
    return _first(FORMS, list(keys))


def of_unknown(keys: Iterable[str], model_types: Iterable[str] = ()) -> str:
    """The description of attention of no known layout, by its keys or else by its model types.

    >>> of_unknown(["sampling_offsets.weight"])
    'it is deformable: queries give the places of their values'
    >>> of_unknown(["qkv_proj.weight", "out_proj.weight"], ["codegen"])
    'rows of queries, values and keys are packed in four parts'
    """
    by_key = _first((*FORMS, *_UNKNOWN), list(keys))
    return by_key or next((_TYPES[kind] for kind in model_types if kind in _TYPES), "")


def _first(forms: Iterable[tuple[str, str]], keys: Iterable[str]) -> str:
    return next((why for form, why in forms if any(re.search(form, key) for key in keys)), "")
