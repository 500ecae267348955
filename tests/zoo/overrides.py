"""Data of single model types: settings over the generic tiny configuration."""

from typing import Any

_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 2,
    "feature_size": 6,
}
_HEAD = {"head_dim": 8}
_WHOLE = {"__factor__": 1}
_KEYS = {"d_kv": 16}  # the scale is folded without rounding
_HIERA = {"window_size_per_stage": [4, 4, 4, 4], "global_attention_blocks": [2]}
_SIGHT = {"backbone_config": _HIERA, "backbone_channel_list": [96, 48, 24, 12]}
_SAM3 = {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
         "backbone_config": {"window_size": 2, "global_attn_indexes": [1]}}  # fmt: skip
_FEW = {"num_queries": 10}
_EARLY = {"insert_layer_id": 0}
_TOWER = {"hidden_size": 128, "num_heads": 4, "depth": 2, "intermediate_size": 64, "out_hidden_size": 64,
          "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BOTH = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
}
_HYBRID = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}
_SPARK = {"patch_sizes": [16, 6, 5, 4], "hidden_sizes": [16, 16, 32, 32], "out_hidden_size": 64}
_VISION = {"vision_config": {"num_heads": 4}}
_TABLE = {"pos_emb_width": 32}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64,
            "indexer_budget": 8, "indexer_compress_ratio": 2}  # fmt: skip
_DOTS = {"__factor__": 8, "head_dim": 24, "num_hidden_layers": 2, "layer_types": ["indexed_attention", "sliding_attention"], "per_layer_config": None,
         "mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4,
         "num_experts_per_tok": 2}  # fmt: skip
_MAMBA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
          "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2,
          "attn_layer_indices": [1]}  # fmt: skip
# Type -> settings laid over its tiny configuration; `__init__`: arguments of the default
# configuration, `__factor__`: the factor of the widths.
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _SERIES),
    "audio-spectrogram-transformer": {"max_length": 128},
    "bamba": _MAMBA,
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"]},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral"), _HEAD),
    **dict.fromkeys(
        ("t5", "mt5", "longt5", "umt5", "switch_transformers", "udop", "pop2piano"), _KEYS
    ),
    "hunyuan_vl": {"text_config": _HEAD},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "kimi_linear": {"num_experts": 4, "num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    # Sizes that are computed from others, and fit the default ones alone.
    **dict.fromkeys(("bros", "layoutlmv3"), _WHOLE),
    "perceiver": {"d_model": 16, "num_latents": 32, "num_self_attends_per_block": 2},
    **{key: {"vision_config": _SAM3} for key in ("sam3_tracker", "sam3_tracker_video")},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
    "gpt_neo": {"window_size": 4},
    "mobilevit": {"image_size": 128},
    "clvp": {"__factor__": 2},
    "mistral4": {"rope_parameters": {"original_max_position_embeddings": 4}},  # factors that matter
    "llama4": {"vision_config": {"num_attention_heads": 4, "intermediate_size": 384}},
    **dict.fromkeys(
        (
            "qwen2_vl",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_vl",
            "qwen3_vl_moe",
            "cosmos3_omni",
            "ernie4_5_vl_moe",
            "qwen3_omni_moe_thinker",
        ),
        _VISION,
    ),
    "aria": {"vision_config": {"model_type": "idefics3_vision"}},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": _ROPE | {"mrope_section": [1, 1, 1, 1]}},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 4, "clip_qkv": 8.0},
        "n_heads": 8, "d_model": 64},
    "cohere_compass_text": _BOTH,
    "cohere_compass": {"text_config": _BOTH, "vision_config": _TOWER},
    **dict.fromkeys(("cohere_compass_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision"), _TOWER),
    **dict.fromkeys(
        (
            "d_fine",
            "deimv2",
            "rt_detr",
            "rt_detr_v2",
            "pp_doclayout_v3",
            "pp_doclayout_v4",
            "grounding-dino",
            "mm-grounding-dino",
        ),
        _FEW,
    ),
    "omdet-turbo": _FEW | {"apply_layernorm_after_vision_backbone": False,
        "encoder_in_channels": [24, 32, 40],
        "backbone_config": {"out_features": ["stage2", "stage3", "stage4"]}},
    "bailing_hybrid": {"num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 2},
    "blt": {"encoder_hash_byte_group_vocab": 50, "num_hidden_layers": 2},
    "cvt": {"depth": [1, 2, 3]},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32}},
    "dinov3_vit": {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 100.0},
    "dots3_note_text": _DOTS,
    "dots3_note": {"__factor__": 8, "text_config": {k: v for k, v in _DOTS.items() if k[0] != "_"}},
    "efficientloftr": {"hidden_size": 64, "out_features": [16, 16, 32, 64],
        "stage_num_blocks": [1, 1, 1, 1], "fine_fusion_dims": [64, 32, 16],
        "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8,
        "stage_in_channels": [1, 16, 16, 32], "stage_block_stride": [[2], [1], [2], [2]],
        "stage_block_out_channels": [[16], [16], [32], [64]],
        "stage_block_in_channels": [[1], [16], [16], [32]]},
    "granite_speech5_encoder": {"context_size": 16},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 16}},
    "molmo2_text": {"additional_vocab_size": 160, "qk_norm_type": "olmo"},
    "fastspeech2_conformer": {"speaking_speed": 8.0},
    "paddleocr_vl": {"vision_config": {"num_attention_heads": 9}},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]]},
    "lw_detr": {"projector_scale_factors": [1.0], "num_queries": 10, "num_feature_levels": 1},
    "mobilevitv2": {"image_size": 256},
    **dict.fromkeys(("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision"), _EARLY),
    **dict.fromkeys(
        ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _EARLY | {"vision_config": _EARLY}
    ),
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "muse_spark_audio": _SPARK,
    "muse_spark": {"__factor__": 16, "audio_config": _SPARK | {"out_hidden_size": 512},
        "vision_config": _TABLE | {"num_attention_heads": 4}},
    **dict.fromkeys(("muse_spark_vision", "muse_glimmer_vision"), _TABLE),
    "muse_glimmer": {"vision_config": _TABLE},
    "kimi_k25_vision": {"pos_emb_width": 64, "hidden_size": 128, "num_attention_heads": 4},
    "kimi_k25": {"vision_config": {"pos_emb_width": 64, "hidden_size": 128,
        "num_attention_heads": 4}},
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"text_config": _INDEXER},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": _SIGHT,
    **{key: {"vision_config": _SIGHT} for key in ("sam2", "sam2_video")},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.1}},
    "xlnet": {"__factor__": 8, "d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID,
    "zamba2": _HYBRID | {"hybrid_layer_ids": [1, 2]},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "aya_vision": {"vision_config": {"num_attention_heads": 4}},
    "nemotron": {"num_key_value_heads": 8},
    "longcat_flash": {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
}  # fmt: skip
# Type -> why it cannot be built or run here.
_LACKS = "its class needs {}, which is not installed"
UNBUILT: dict[str, str] = {
    **dict.fromkeys(
        ("timm_backbone", "timm_wrapper", "gemma3n_vision", "fast_vlm", "perception_lm",
         "pe_video", "pe_video_encoder", "pe_audio_video", "pe_audio_video_encoder", "gemma3n"),
        _LACKS.format("timm"),
    ),
    "depth_pro": "it takes images of 1536 pixels alone, in more than the time limit",
    "vits": "drawn durations make its sequences longer than the time limit allows",
    "dinat": _LACKS.format("natten"),
    "layoutlmv2": _LACKS.format("detectron2"),
    "higgs_audio_v2_tokenizer": _LACKS.format("torchaudio"),
}  # fmt: skip
# Paths of modules whose softmax weighs without queries and keys: streams of a residual (inkling),
# places of an image for each letter (MGP-STR).
NO_ATTENTION = r"(final|mlp|attention)_input$|a3_module$"
# Type -> its model class, where the auto classes name one that cannot be built alone, or one that
# saves names that are half those of published files.
CLASSES = {
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "voxtral_realtime_text": "voxtral_realtime.modeling_voxtral_realtime.VoxtralRealtimeTextModel",
}
# Type -> attn_implementation, where "eager" is wrong: it adds a Boolean mask, takes an additive one for a
# Boolean one, or adds ALiBi twice.
ATTENTION: dict[str, Any] = {
    **dict.fromkeys(
        ("falcon", "nemotron3_5_asr", "nemotron_asr_streaming", "nemotron_asr_streaming_encoder"),
        "sdpa",
    ),
    **{t: {"": "eager", "text_config": "sdpa"} for t in ("grounding-dino", "mm-grounding-dino")},
}
