"""Settings of attention that classes of transformers 5.23 have where a configuration lacks the key.

Files omit a setting that equals the default of its class. A model type of several parts has the
defaults of its text model. Other modules have the defaults of rotary bases (`rotary_settings`) and of
windows (`layer_kinds`).
"""

from collections.abc import Mapping
from typing import Any

# Key -> pairs of a default, and the model types whose class has it.
_DEFAULTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "attention_multiplier": (
        (1.0, """
                granite granite4_vision_text granite_swa granitemoe granitemoe_swa
                granitemoehybrid granitemoeshared
            """),
        (0.015625, "granite_docling_text"),
        (0.08838834764831845, "hyperclovax"),
    ),
    "query_pre_attn_scalar": ((256, "gemma2 gemma3 gemma3_text t5_gemma_module t5gemma2_text vaultgemma"),),
    "attn_logit_softcapping": (
        (50.0, "gemma2 t5_gemma_module vaultgemma videoprism_text_model videoprism_vision_model"),
    ),
    "qk_scale_factor": ((3.87, "muse_glimmer_text"),),
    "use_qk_norm": ((True, "llama4_text sapiens2"),),
    "attn_temperature_tuning": ((True, "llama4_text"),),
    "attn_scale": ((0.1, "llama4_text"),),
    "floor_scale": ((8192, "llama4_text"),),
    "rms_norm_eps": (
        (1e-5, """
                afmoe apertus dots3_note_vision_encoder exaone4 exaone_moe glm5_next_vision
                glm_ocr_vision hy_v3 llama4_text muse_glimmer_text olmo2 olmo3 olmoe
                pe_audio_encoder
            """),
        (1e-6, """
                beam dots1 flex_olmo flint gemma3 gemma3_text kolibri1 mellum minimax_m2
                minimax_m3_vl_text molmo2_text nanochat olmo_hybrid qwen3 qwen3_5 qwen3_5_moe
                qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_talker_text qwen3_omni_moe_text
                qwen3_vl_moe_text qwen3_vl_text sapiens2 t5gemma2_text
            """),
    ),
    "norm_eps": ((1e-5, "lfm2 lfm2_moe lfm3 lfm3_vl_vision"),),
    "layer_norm_eps": (
        (1e-5, "fuyu persimmon"),
        (1e-7, "deberta deberta-v2 sew-d"),
    ),
    # Widths of heads that are not the width of the model divided by the head count.
    "head_dim": (
        (64, "gpt_oss muse_spark_text neomme openai_privacy_filter voxtral_realtime_encoder"),
        (80, "timesfm2_5"),
        (128, """
                afmoe beam cohere2_moe cosmos3_edge_text cwm dia_decoder dia_encoder ernie4_5
                flint glm glm4 helium higgs_audio_v2 hrm_text hy_v3 internlm3 iquestcoder
                kolibri1 laguna lfm3 llama4_text mellum minimax_m2 minimax_m3_vl_text ministral3
                molmo2_text muse_glimmer_assistant muse_glimmer_text paddleocr_vl_text
                pe_audio_encoder pe_audio_video_encoder pe_video_encoder qwen2_5_omni_talker
                qwen3 qwen3_omni_moe_talker_code_predictor qwen3_vl_text seed_oss solar_open
                step3p5 zaya
            """),
        (192, "mimo_v2_flash"),
        (256, """
                diffusion_gemma_text dots3_note_text embedding_gemma2_text gemma gemma2 gemma3
                gemma3_text gemma3n_text gemma4_text gemma4_unified_text qwen3_5 qwen3_5_moe
                qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text t5_gemma_module
                t5gemma2_decoder t5gemma2_text vaultgemma
            """),
    ),
    "rotary_dim": ((64, "codegen gptj"),),
    "position_embedding_type": (("absolute", "esm"),),
    "use_mem_rope": ((False, "zamba2"),),
    "embed_dim": ((1280, "qwen2_vl_vision"),),
    "relative_attention": ((True, "sew-d"), (False, "deberta deberta-v2")),
    "pos_att_type": (("p2c|c2p", "sew-d"),),
    "position_buckets": ((256, "sew-d"),),
    "share_att_key": ((True, "sew-d"),),
    "norm_rel_ebd": (("layer_norm", "sew-d"),),
    "max_position_embeddings": ((512, "deberta deberta-v2 sew-d"),),
    "original_max_position_embeddings": ((4096, "phi3 phi4_multimodal"),),
    "attention_window_size": ((2048, "recurrent_gemma"),),
    "window_size": ((256, "gpt_neo"), (24, "sam3_vit_model")),
    "image_size": ((1008, "sam3_vit_model"),),
    "patch_size": ((14, "sam3_vit_model"),),
    "max_window_layers": (
        (28, """
                deepseek_ocr2_encoder qwen2 qwen2_5_omni_talker qwen2_5_omni_text qwen2_moe
                qwen3 qwen3_omni_moe_talker_code_predictor
            """),
        (62, "dots1"),
        (80, "qwen2_5_vl_text qwen2_vl_text"),
    ),
}  # fmt: skip
# Model type -> its defaults.
OF_TYPES: dict[str, dict[str, Any]] = {}
for _key, _rows in _DEFAULTS.items():
    for _value, _types in _rows:
        for _type in _types.split():
            OF_TYPES.setdefault(_type, {})[_key] = _value


def filled(own: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The settings of a part of a configuration, with the defaults of its class for absent keys.

    >>> filled({"rms_norm_eps": 1e-5}, "gemma2")["query_pre_attn_scalar"]
    256
    """
    return {**OF_TYPES.get(model_type, {}), **own}
