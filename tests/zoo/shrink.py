"""Tiny configurations: every width of a default configuration divided by one factor.

One factor for all parts of a model keeps the sizes that must agree in agreement, so few types need
settings of their own (`overrides.SETTINGS`).
"""

import re
from collections.abc import Mapping
from typing import Any

from tests.zoo.overrides import SETTINGS

FACTORS = (8, 4, 16, 2)  # tried in this order
_LAYERS = re.compile(
    r"(num_)?(hidden_|encoder_|decoder_|attention_)?(layers?|blocks)|[a-z]_layers?|depth|num_\w*layers"
    r"|(speech_|text_|t2u_|\w+_)?(en|de)coder_layers|num_encoder_blocks|num_hidden_(layers|groups)"
    r"|num_res_blocks|\w*depth$|vision_layers|num_blocks|num_upscale_blocks|\w+_num_layers"
    r"|\w+_hidden_layers|num_\w+_blocks"
)
_NO_LAYERS = re.compile(
    r".*(share|adapter|feature_layer|conv|freeze|lstm|residual|shared|postnet|predictor|iou_head"
    r"|max_depth|bit_depth|min_depth|upsampl|nextn|feat_extract|max_window|prelude).*"
)
_WIDTH = re.compile(
    r".*(hidden|intermediate|dim|d_model|d_ff|d_kv|embd|embed|channels|width|filters|planes|ffn"
    r"|projection_size|embedding_size|key_size|output_size|head_size|lora_rank|linear_units"
    r"|d_inner|n_inner|d_embed|feature_size|bottleneck|projector|units|qk_channels|v_channels"
    r"|d_latents|input_size|num_pos_feats|mrope_section|upsample_groups).*|feat_size|d_state"
)
_NO_WIDTH = re.compile(
    r"num_(?!filters|pos_feats).*|.*(kernel|image|patch|position|layers|token|vocab|dropout|stride"
    r"|init|act|eps|ratio|mult|type|indices|chunk|codebook|window|index|depth|heads|temporal"
    r"|max_|factor|audio_channels|rate|scale|tubelet|mel|input_channels|padding|blocks"
    r"|group|levels|pooling|stages|sequence|temperature|sizes?_per|prob).*|in_channels|in_chans"
    r"|channels|rope_.*|rotary_embedding_base"
)
_TOKEN = re.compile(r".*token_(id|index|idx)s?(_list)?|.*_token|.*tokens?_id|ctc_blank.*|blank_id")
_EXPERTS = re.compile(r"(num|n)_(local_|routed_|moe_)?experts|moe_num_experts")
_CHOSEN = re.compile(r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_?k|num_selected_experts")
SECTIONS = r"^(qwen2_vl|qwen2_5_vl|qwen2_5_omni|glm4v|glm46v|glm_ocr|glm_image|glmga|ernie4_5_vl|paddleocr_vl)"
RESNET = {"model_type": "resnet", "hidden_sizes": [16, 24, 32, 40], "embedding_size": 8,
          "depths": [1, 1, 1, 1], "layer_type": "basic",
          "out_features": ["stage1", "stage2", "stage3", "stage4"]}  # fmt: skip
INNER = (
    "intermediate_size", "moe_intermediate_size", "ffn_dim", "d_ff", "n_inner", "mlp_dim",
    "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "shared_expert_intermediate_size",
)  # fmt: skip
VOCABULARY, PATCHES, EXPERTS = 160, 4, 4
# Keys of windows, which are made shorter than the inputs, so that they matter.
WINDOWS = ("sliding_window", "local_attention", "attention_chunk_size", "attention_window_size",
           "sliding_window_size")  # fmt: skip
WINDOW = 4
DROPPED = ("stage_names", "out_features", "out_indices", "_out_features", "_out_indices",
           "transformers_version", "dtype", "torch_dtype", "quantization_config", "id2label",
           "label2id", "architectures", "_name_or_path")  # fmt: skip


def tiny(model_type: str, factor: int) -> Any:
    """The configuration of a type with every width divided by `factor`, and with two layers."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    settings = dict(SETTINGS.get(model_type, {}))
    start = settings.pop("__init__", {})
    content = smaller(kind(**start).to_dict(), settings.pop("__factor__", factor))
    return kind.from_dict(_with_sections(merged(content, settings)))


def _with_sections(content: dict[str, Any]) -> dict[str, Any]:
    """With the sections of multimodal rotary positions, which the models have in full size."""
    found = {k: _with_sections(v) if isinstance(v, dict) else v for k, v in content.items()}
    rope = found.get("rope_parameters")
    if (
        isinstance(rope, dict)
        and "num_attention_heads" in found
        and re.search(SECTIONS, str(found.get("model_type")))
    ):
        features: Any = found.get("hidden_size", 0)
        width: Any = found.get("head_dim") or features // found["num_attention_heads"]
        half = int(width * rope.get("partial_rotary_factor", 1)) // 2
        third = half // 3
        found["rope_parameters"] = rope | {"mrope_section": [third, third, half - 2 * third]}
    return found


def merged(content: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content with settings laid over it, dictionary by dictionary."""
    found = dict(content)
    for key, value in settings.items():
        own = found.get(key)
        found[key] = (
            merged(own, value) if isinstance(value, Mapping) and isinstance(own, dict) else value
        )
    return found


def smaller(content: dict[str, Any], factor: int) -> dict[str, Any]:
    """The content of a configuration, made tiny; parts of it are made so by the same rules."""
    kinds = _kinds(content)
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(key, int):
            found[key] = value
            continue
        if key in DROPPED and not ("out_" in key and not _cut(content)):
            continue
        if isinstance(value, dict) and value.get("model_type") in ("timm_backbone", "timm_wrapper"):
            found[key] = RESNET if "backbone" in key else value
            continue
        if key == "per_layer_config" and isinstance(value, dict):
            found[key] = {"01": smaller(dict(next(iter(value.values()))), factor)} if value else {}
            continue
        if isinstance(value, dict) and key not in ("rope_parameters", "rope_scaling"):
            found[key] = smaller(value, factor)
        elif key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            found[key] = _rope(value, factor)
        elif key in kinds:
            found[key] = kinds[key]
        else:
            found[key] = _one(key, value, factor, content)
    return found


def _cut(content: dict[str, Any]) -> bool:
    """True if stages of the model are its layers, which are cut."""
    return "num_hidden_layers" in content and "depths" not in content


def _rope(value: dict[str, Any], factor: int) -> dict[str, Any]:
    return {
        k: _rope(v, factor) if isinstance(v, dict)
        else [max(n // factor, 1) for n in v] if k == "mrope_section" and v
        else v
        for k, v in value.items()
    }  # fmt: skip


def _kinds(content: dict[str, Any]) -> dict[str, Any]:
    """Lists with one entry for each layer, cut to one layer of every kind (at least two)."""
    counts = {
        value
        for key, value in content.items()
        if isinstance(value, int) and not isinstance(value, bool) and _is_layers(str(key))
    }
    lists = {
        key: value
        for key, value in content.items()
        if isinstance(value, list) and len(value) > 2 and len(value) in counts
    }
    if not lists:
        return {}
    rows = list(
        zip(*(v for v in lists.values() if len(v) == max(map(len, lists.values()))), strict=True)
    )
    kept: list[int] = []
    for i, row in enumerate(rows):
        if repr(row) not in {repr(rows[k]) for k in kept} and len(kept) < 6:
            kept.append(i)
    kept = kept if len(kept) > 1 else [0, 1]
    most = len(kept)
    found: dict[str, Any] = {
        key: [value[i] for i in kept] if len(value) == len(rows) else value[:most]
        for key, value in lists.items()
    }
    for key, value in content.items():
        if isinstance(value, int) and not isinstance(value, bool) and _is_layers(str(key)):
            found[key] = min(value, most)
    return found


def _is_layers(key: str) -> bool:
    return bool(_LAYERS.fullmatch(key)) and not _NO_LAYERS.fullmatch(key)


def _one(key: str, value: Any, factor: int, content: dict[str, Any]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | list | tuple):
        return value
    if isinstance(value, list | tuple):
        if not value or not all(type(x) is int for x in value):
            return value
        if key in ("depths", "num_block_repeats", "stage_num_blocks", "blocks_per_stage"):
            return [min(x, 2) for x in value]
        return type(value)(_one(key, x, factor, content) for x in value)
    if _TOKEN.fullmatch(key):
        return value if 0 <= value < VOCABULARY // 2 else VOCABULARY // 2 + sum(map(ord, key)) % 60
    if "vocab_size" in key or key == "num_embeddings_text":
        return min(value, VOCABULARY)
    if key in WINDOWS and value > WINDOW:
        return WINDOW
    if _is_layers(key):
        return min(value, 2)
    if _EXPERTS.fullmatch(key):
        return min(value, EXPERTS)
    if _CHOSEN.fullmatch(key):
        return min(value, 2)
    if key in ("n_group", "topk_group"):
        return 1
    if key in ("max_source_positions", "max_target_positions"):
        return min(value, 32)
    if key == "window_size" and "depths" in content:
        return min(value, 2)
    if key == "image_size" and "depths" in content and isinstance(content.get("patch_size"), int):
        return min(value, 64)
    if key == "image_size":
        patch = content.get("patch_size")
        patch = patch[0] if isinstance(patch, list | tuple) else patch
        least = max(PATCHES * patch, 32) if isinstance(patch, int) and patch > 1 else 64
        return min(value, least)
    if key == "upsample_groups":
        return value // factor
    if key in INNER:
        return max(min(value // factor, 64), 1)
    if _WIDTH.fullmatch(key) and not _NO_WIDTH.fullmatch(key) and value >= 32:
        return value // factor if value % factor == 0 else value
    return value
