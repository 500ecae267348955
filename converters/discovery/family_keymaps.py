"""Names of the layers other than attention, for each family of models.

Kinds are those of `layer_layouts`. A pattern matches the end of a name: `{i}` stands for a number,
and spaces separate alternatives. `other_layers` decides the kind of all other names.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class KeyMap(NamedTuple):
    """The other layers of a family; attention blocks determine the family (`model_families`).

    `kinds`: kind -> name patterns. `epsilon`: key of config.json that holds the epsilon that the
    norms add to the variance. `bare`: parameters and buffers outside any layer, which keep their
    names.
    """

    family: str
    kinds: Mapping[str, str]
    epsilon: str = "layer_norm_eps"
    bare: str = ""


_VIT_KINDS = {
    "convolution": "patch_embeddings.projection",
    "norm": "layernorm_before layernorm_after layernorm",
    "linear": "intermediate.dense output.dense pooler.dense classifier mlp.fc1 mlp.fc2",
}
_VIT_BARE = "embeddings.cls_token embeddings.position_embeddings embeddings.mask_token"
_SEQUENCE_KINDS = {
    "embedding": "shared embed_tokens embed_positions",
    "norm": "layers.{i}.self_attn_layer_norm layers.{i}.encoder_attn_layer_norm "
    "final_layer_norm layer_norm layernorm_embedding",
}

KEYMAPS: tuple[KeyMap, ...] = (
    KeyMap(
        "BERT",
        {
            "embedding": "embeddings.word_embeddings embeddings.position_embeddings "
            "embeddings.token_type_embeddings",
            "norm": "embeddings.LayerNorm attention.output.LayerNorm crossattention.output.LayerNorm "
            "layer.{i}.output.LayerNorm predictions.transform.LayerNorm lm_head.layer_norm",
            "linear": "intermediate.dense layer.{i}.output.dense pooler.dense "
            "predictions.transform.dense predictions.decoder seq_relationship lm_head.dense "
            "lm_head.decoder classifier classifier.dense classifier.out_proj qa_outputs",
        },
        bare="embeddings.position_ids embeddings.token_type_ids predictions.bias lm_head.bias",
    ),
    KeyMap(
        "GPT-2",
        {
            "embedding": "wte wpe",
            "norm": "h.{i}.ln_1 h.{i}.ln_2 h.{i}.ln_cross_attn ln_f",
            "conv1d": "h.{i}.mlp.c_fc h.{i}.mlp.c_proj",
            "linear": "lm_head score classifier",
        },
        "layer_norm_epsilon",
        "attn.bias attn.masked_bias",
    ),
    KeyMap(
        "Llama",
        {
            "embedding": "embed_tokens",
            "rmsnorm": "layers.{i}.input_layernorm layers.{i}.post_attention_layernorm norm",
            "linear": "mlp.gate_proj mlp.up_proj mlp.down_proj lm_head score",
        },
        "rms_norm_eps",
        "rotary_emb.inv_freq",
    ),
    KeyMap("ViT (transformers 4)", _VIT_KINDS, bare=_VIT_BARE),
    KeyMap("ViT (transformers 5)", _VIT_KINDS, bare=_VIT_BARE),
    KeyMap(
        "CLIP",
        {
            "embedding": "embeddings.token_embedding embeddings.position_embedding",
            "convolution": "embeddings.patch_embedding",
            "norm": "layers.{i}.layer_norm1 layers.{i}.layer_norm2 pre_layrnorm pre_layernorm "
            "post_layernorm final_layer_norm",
            "linear": "mlp.fc1 mlp.fc2 visual_projection text_projection",
        },
        bare="logit_scale embeddings.class_embedding embeddings.position_ids",
    ),
    KeyMap(
        "T5",
        {
            "embedding": "shared embed_tokens",
            "rmsnorm": "layer_norm final_layer_norm",
            "linear": "DenseReluDense.wi DenseReluDense.wi_0 DenseReluDense.wi_1 DenseReluDense.wo "
            "lm_head",
        },
        "layer_norm_epsilon",
        "relative_attention_bias.weight",
    ),
    KeyMap(
        "GPT-NeoX",
        {
            "embedding": "embed_in",
            "norm": "layers.{i}.input_layernorm layers.{i}.post_attention_layernorm final_layer_norm",
            "linear": "mlp.dense_h_to_4h mlp.dense_4h_to_h embed_out lm_head score classifier "
            "qa_outputs",
        },
        bare="attention.bias attention.masked_bias rotary_emb.inv_freq",
    ),
    KeyMap(
        "BLOOM",
        {
            "embedding": "word_embeddings",
            "norm": "word_embeddings_layernorm h.{i}.input_layernorm "
            "h.{i}.post_attention_layernorm ln_f",
            "linear": "mlp.dense_h_to_4h mlp.dense_4h_to_h lm_head score classifier qa_outputs",
        },
        "layer_norm_epsilon",
    ),
    KeyMap(
        "Whisper",
        _SEQUENCE_KINDS | {"linear": "layers.{i}.fc1 layers.{i}.fc2 proj_out projector classifier"},
        "",
    ),
    KeyMap(
        "BART, OPT",
        _SEQUENCE_KINDS
        | {
            "linear": "layers.{i}.fc1 layers.{i}.fc2 lm_head project_in project_out "
            "classification_head.dense classification_head.out_proj qa_outputs score",
        },
        "",
        "final_logits_bias",
    ),
    KeyMap(
        "nn.Transformer",
        {
            "linear": "layers.{i}.linear1 layers.{i}.linear2",
            "norm": "layers.{i}.norm1 layers.{i}.norm2 layers.{i}.norm3 encoder.norm decoder.norm norm",
        },
        "",
    ),
)


def kind_at(prefix: str, families: Iterable[str]) -> tuple[str, str] | None:
    """The kind of the layer at a prefix, and the pattern that matches; None if no pattern matches.

    >>> kind_at("transformer.h.3.mlp.c_fc", ["GPT-2"])
    ('conv1d', 'GPT-2: h.{i}.mlp.c_fc')
    >>> kind_at("model.embed_tokens", ["BERT"])
    """
    for keymap in KEYMAPS:
        if keymap.family in families:
            for kind, patterns in keymap.kinds.items():
                for pattern in patterns.split():
                    if _ends(prefix, pattern) and not (pattern == "norm" and _in_layer(prefix)):
                        return kind, f"{keymap.family}: {pattern}"
    return None


def _in_layer(path: str) -> bool:
    """True if a path is inside a layer or embeddings, and therefore not the final norm."""
    return re.search(r"(^|\.)(\d+|embeddings|attn_\d+)\.", path.replace("/", ".")) is not None


def is_bare(name: str, families: Iterable[str]) -> bool:
    """True if one of the families has a parameter or buffer of this name outside any layer."""
    return any(
        _ends(name, pattern)
        for keymap in KEYMAPS
        if keymap.family in families
        for pattern in keymap.bare.split()
    )


def _ends(path: str, pattern: str) -> bool:
    numbered = re.escape(pattern).replace(r"\{i\}", r"\d+")
    return re.search(rf"(^|\.){numbered}$", path.replace("/", ".")) is not None
