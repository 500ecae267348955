"""Head counts of models whose configurations do not name the block prefixes that have them.

A row is a pattern of block prefixes and the path of configuration keys to the head count of these
blocks, such as "vision_config: num_heads". The first row whose pattern occurs in a prefix decides.
A path that ends in " / 64" leads to a width, and every 64 features are a head; one that ends in
" / 2" leads to twice the count.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmha.converters.discovery import other_configs, part_types

_LANGUAGE = r"^(model\.)?(language_model\.)?(model\.)?layers\."
# Prefixes of the layers of a text model in any wrapper, as of DDP or PEFT, for models in which all
# other layers are of vision.
_NOT_VISION = r"^(?!.*(vision|visual)).*\blayers\."
_SWIN = (
    (r"pixel_level_module\.encoder", "backbone_config: num_heads"),
    (r"transformer_module", "num_attention_heads"),
)
_KOSMOS = (
    (r"vision_model", "vision_config: num_attention_heads"),
    (r"text_model|image_to_text_projection", "text_config: attention_heads"),
)
_DECODED = (
    (r"backbone", "backbone_config: num_attention_heads"),
    (r"decoder.*self_attn", "decoder_self_attention_heads"),
)
_AUDIO = (
    (r"audio_tower", "audio_config: encoder_attention_heads"),
    (r"(^|\.)layers\.", "text_config: num_attention_heads"),
)
_OMNI = ((r"visual", "vision_config: num_heads"), *_AUDIO)
_SAM_FIRST = (
    (r"qwen2_model|vision_encoder", "vision_config: encoder_config: num_attention_heads"),
    (r"sam_(model|encoder)", "vision_config: sam_config: num_attention_heads"),
    (r"(^|\.)layers\.", "text_config: num_attention_heads"),
)
Rows = Sequence[tuple[str, str]]
TOWERS: dict[str, Rows] = {
    "csm": (
        (r"codec_model", "codec_config: num_attention_heads"),
        (r"depth_decoder", "depth_decoder_config: num_attention_heads"),
        (rf"backbone_model|{_LANGUAGE}", "num_attention_heads"),
    ),
    "clvp": (
        (r"text_encoder", "text_config: num_attention_heads"),
        (r"speech_encoder", "speech_config: num_attention_heads"),
        (r"speech_decoder|conditioning_encoder", "decoder_config: num_attention_heads"),
    ),
    "deepseek_ocr2": _SAM_FIRST,
    "idefics2": ((r"perceiver_resampler", "perceiver_config: resampler_n_heads"),),
    "idefics": (
        (r"vision_model", "vision_config: num_attention_heads"),
        (r"perceiver_resampler", "perceiver_config: resampler_n_heads"),
        (r"layers\.", "num_attention_heads"),
    ),
    "kosmos-2": _KOSMOS,
    "kosmos-2.5": _KOSMOS,
    "mask2former": _SWIN,
    "oneformer": _SWIN,
    "maskformer": (
        (r"pixel_level_module\.encoder", "backbone_config: num_heads"),
        (r"transformer_module", "decoder_config: decoder_attention_heads"),
    ),
    "mllama": (
        (r"vision_model", "vision_config: attention_heads"),
        (r"layers\.", "text_config: num_attention_heads"),
    ),
    "phi4_multimodal": (
        (r"img_processor", "vision_config: num_attention_heads"),
        (r"audio_embed", "audio_config: num_attention_heads"),
        (_LANGUAGE, "num_attention_heads"),
    ),
    "qwen2_audio": _AUDIO,
    "qwen2_audio_encoder": ((r"", "encoder_attention_heads"),),
    "qwen2_5_omni_thinker": _OMNI,
    "qwen3_omni_moe_thinker": _OMNI,
    "qwen3_asr_encoder": ((r"", "encoder_attention_heads"),),
    "rf_detr": _DECODED,
    "lw_detr": _DECODED,
    "t5gemma2": (
        (r"vision", "encoder: vision_config: num_attention_heads"),
        (r"^(model\.)?encoder", "encoder: text_config: num_attention_heads"),
        (r"^(model\.)?decoder", "decoder: num_attention_heads"),
    ),
    "fun_asr_nano": (
        (r"multi_modal_projector", "adaptor_config: num_attention_heads"),
        (r"audio_tower", "audio_config: num_attention_heads"),
        (r"layers\.", "text_config: num_attention_heads"),
    ),
    "ernie4_5_vl_moe": (
        (r"vision|visual", "vision_config: num_heads"),
        (_LANGUAGE, "text_config: num_attention_heads"),
    ),
    "evolla": (
        (r"protein_encoder\.model", "protein_encoder_config: num_attention_heads"),
        (_LANGUAGE, "num_attention_heads"),
    ),
    "moshi": (
        (r"audio_encoder", "audio_encoder_config: num_attention_heads"),
        (r"depth_decoder", "depth_decoder_config: num_attention_heads"),
        (r"layers\.", "num_attention_heads"),
    ),
    "perceiver": (
        (r"self_attends", "num_self_attention_heads"),
        (r"cross_attention", "num_cross_attention_heads"),
    ),
    "kyutai_speech_to_text": (
        (r"codec_model", "codec_config: num_attention_heads"),
        (r"layers\.", "num_attention_heads"),
    ),
    "molmo2": (
        (r"adapter|projector", "adapter_config: num_attention_heads"),
        (r"vision", "vision_config: num_attention_heads"),
        (r"(layers|blocks)\.", "text_config: num_attention_heads"),
    ),
    "blt": (
        (r"patcher", "patcher_config: num_attention_heads"),
        (r"local_encoder", "encoder_config: num_attention_heads"),
        (r"local_decoder", "decoder_config: num_attention_heads"),
        (r"global_transformer", "global_config: num_attention_heads"),
    ),
    "t5gemma2_encoder": (
        (r"vision", "vision_config: num_attention_heads"),
        (r"layers\.", "text_config: num_attention_heads"),
    ),
    "video_llava": (
        (r"image_tower|video_tower", "vision_config: num_attention_heads"),
        (r"layers\.", "text_config: num_attention_heads"),
    ),
    **dict.fromkeys(
        ("vit_mae", "videomae"),
        (
            (r"(^|\.)decoder\.", "decoder_num_attention_heads"),
            (r"", "num_attention_heads"),
        ),
    ),
    "vjepa2": (
        (r"predictor", "pred_num_attention_heads"),
        (r"encoder", "num_attention_heads"),
    ),
    "xclip": (
        (r"mit\.", "vision_config: mit_num_attention_heads"),
        (r"prompts_generator", "prompt_num_attention_heads"),
        (r"text_model", "text_config: num_attention_heads"),
        (r"vision_model", "vision_config: num_attention_heads"),
    ),
    "emu3": (
        (r"vqmodel", "vq_config: num_attention_heads"),
        (r"layers\.", "text_config: num_attention_heads"),
    ),
    "aria": (
        (r"vision|projector", "vision_config: num_attention_heads"),
        (r"layers\.", "text_config: num_attention_heads"),
    ),
    "git": (
        (r"image_encoder|vision", "vision_config: num_attention_heads"),
        (r"encoder\.layer\.", "num_attention_heads"),
    ),
    "gpt_neo": ((r"", "num_heads"),),
    "dbrx": ((r"", "n_heads"),),
    "bridgetower": (
        (r"vision_model", "vision_config: hidden_size / 64"),
        (r"text_model", "text_config: num_attention_heads"),
        (r"cross_modal", "text_config: num_attention_heads"),
    ),
    "videoprism": (
        (r"text_model", "text_config: num_attention_heads"),
        (r"video_model|vision_model", "vision_config: num_attention_heads"),
    ),
    "dia": ((r"decoder.*cross_attention", "decoder_config: cross_num_attention_heads"),),
    **dict.fromkeys(
        ("grounding-dino", "mm-grounding-dino"),
        ((r"text_enhancer_layer", "encoder_attention_heads / 2"),),
    ),
    "edgetam_video": ((r"spatial_perceiver", "perceiver_resampler_num_attention_heads"),),
    "unlimited_ocr": (
        (r"vision_(model|encoder)", "vision_config: encoder_config: num_attention_heads"),
        *_SAM_FIRST[1:],
    ),
}


def rows(content: Any) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yields prefix pattern, key path and head count of the rows for a configuration.

    Rows whose keys are missing from the configuration are skipped.

    >>> config = {"model_type": "rf_detr", "decoder_self_attention_heads": 8}
    >>> [(way, heads) for _, way, heads in rows(config)]
    [(('decoder_self_attention_heads',), 8)]
    """
    if not isinstance(content, Mapping):
        return
    yield from other_configs.rows(content)
    heads = content.get("num_attention_heads")
    is_flat = part_types.of_top(content) != str(content.get("model_type") or "")
    if is_flat and heads is not None and isinstance(content.get("vision_config"), Mapping):
        yield _NOT_VISION, ("num_attention_heads",), heads
    for pattern, path in TOWERS.get(str(content.get("model_type")), ()):
        keys, _, width = path.partition(" / ")
        way = tuple(keys.split(": "))
        value: Any = content
        for key in way:
            value = value.get(key) if isinstance(value, Mapping) else None
        if width and type(value) is int:
            value //= int(width)
        if value is not None:
            yield pattern, way, value


def fits(pattern: str, prefix: str) -> bool:
    """True if the pattern of a row occurs in a block prefix."""
    return re.search(pattern, prefix.replace("/", ".")) is not None
