"""Data of single model types: settings over the generic tiny configuration, and inputs."""

from collections.abc import Callable
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
_FEW = {"num_queries": 10}
_TOWER = {"hidden_size": 128, "num_heads": 4, "depth": 2, "intermediate_size": 64, "out_hidden_size": 64,
          "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BOTH = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
}
_HYBRID = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}
_SPARK = {"patch_sizes": [16, 6, 5, 4], "hidden_sizes": [16, 16, 32, 32], "out_hidden_size": 64}
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
    "perceiver": {"d_model": 16},
    "aria": {"vision_config": {"model_type": "idefics3_vision"}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": _ROPE | {"mrope_section": [1, 1, 1, 1]}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 4, "clip_qkv": 8.0},
        "n_heads": 8,
        "d_model": 64,
    },
    "cohere_compass_text": _BOTH,
    "cohere_compass": {"text_config": _BOTH, "vision_config": _TOWER},
    **dict.fromkeys(("cohere_compass_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision"), _TOWER),
    **dict.fromkeys(
        ("d_fine", "deimv2", "rt_detr", "rt_detr_v2", "pp_doclayout_v3", "pp_doclayout_v4"), _FEW
    ),
    "bailing_hybrid": {"num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 2},
    "blt": {"encoder_hash_byte_group_vocab": 50, "num_hidden_layers": 2},
    "cvt": {"depth": [1, 2, 3]},
    "diffusion_gemma": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    },
    "dinov3_vit": {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 100.0},
    "dots3_note_text": _DOTS,
    "dots3_note": {"__factor__": 8, "text_config": {k: v for k, v in _DOTS.items() if k[0] != "_"}},
    "efficientloftr": {
        "hidden_size": 64,
        "out_features": [16, 16, 32, 64],
        "stage_num_blocks": [1, 1, 1, 1],
        "fine_fusion_dims": [64, 32, 16],
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "stage_in_channels": [1, 16, 16, 32],
        "stage_block_stride": [[2], [1], [2], [2]],
        "stage_block_out_channels": [[16], [16], [32], [64]],
        "stage_block_in_channels": [[1], [16], [16], [32]],
    },
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]]},
    "lw_detr": {"projector_scale_factors": [1.0], "num_queries": 10, "num_feature_levels": 1},
    "mobilevitv2": {"image_size": 256},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "muse_spark_audio": _SPARK,
    "muse_spark": {
        "__factor__": 16,
        "audio_config": _SPARK | {"out_hidden_size": 512},
        "vision_config": _TABLE | {"num_attention_heads": 4},
    },
    **dict.fromkeys(("muse_spark_vision", "muse_glimmer_vision"), _TABLE),
    "muse_glimmer": {"vision_config": _TABLE},
    "kimi_k25_vision": {"pos_emb_width": 64, "hidden_size": 128, "num_attention_heads": 4},
    "kimi_k25": {
        "vision_config": {"pos_emb_width": 64, "hidden_size": 128, "num_attention_heads": 4}
    },
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"text_config": _INDEXER},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": _SIGHT,
    **dict.fromkeys(("sam2", "sam2_video"), {"vision_config": _SIGHT}),
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.1}},
    "xlnet": {"__factor__": 8, "d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID,
    "zamba2": _HYBRID | {"hybrid_layer_ids": [1, 2]},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "aya_vision": {"vision_config": {"num_attention_heads": 4}},
    "nemotron": {"num_key_value_heads": 8},
    "longcat_flash": {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
}
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
# Type or class of a model -> a function from its configuration to the arguments of a forward call.


def _series(config: Any) -> dict[str, Any]:
    """Values, their times and which are observed, as long as the model looks back."""
    import torch

    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, config.num_time_features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, config.prediction_length),
        "future_time_features": torch.randn(2, config.prediction_length, config.num_time_features),
    }


def _long(config: Any) -> dict[str, Any]:
    """Many channels of one length."""
    import torch

    return {"past_values": torch.randn(2, config.context_length, config.num_input_channels)}


def _sight(config: Any) -> dict[str, Any]:
    """Words, and features of regions of an image."""
    import torch

    return {
        "input_ids": torch.randint(5, 90, (2, 12)),
        "visual_feats": torch.randn(2, 9, config.visual_feat_dim),
        "visual_pos": torch.rand(2, 9, 4),
    }


def _sound(config: Any) -> dict[str, Any]:
    """Frames of a sound, all of which count."""
    import torch

    frames = 2 * config.max_source_positions
    return {
        "input_features": torch.randn(2, config.num_mel_bins, frames),
        "input_features_mask": torch.ones(2, frames, dtype=torch.long),
    }


def _frames(width: int) -> Callable[[Any], dict[str, Any]]:
    """Frames of this width."""

    def made(config: Any) -> dict[str, Any]:
        import torch

        mask = torch.ones(2, 64, dtype=torch.long)
        return {"input_features": torch.randn(2, 64, width)} | (
            {"input_features_mask": mask} if width == 560 else {}
        )

    return made


def _queries(config: Any) -> dict[str, Any]:
    """Queries, and what they look at."""
    import torch

    return {
        "query_embeds": torch.randn(2, 12, config.hidden_size),
        "encoder_hidden_states": torch.randn(2, 9, config.encoder_hidden_size),
    }


def _latents(config: Any) -> dict[str, Any]:
    import torch

    return {"latents": torch.randn(2, config.hidden_size, 12)}


def _shown(config: Any) -> dict[str, Any]:
    """Words that look at one image."""
    import torch

    size = config.vision_config.image_size
    return {
        "input_ids": torch.randint(5, 60, (2, 12)),
        "pixel_values": torch.randn(2, 1, 3, size, size),
        "image_attention_mask": torch.ones(2, 12, 1),
    }


def _patched(width: int, *more: str, merge: int = 1) -> Callable[[Any], dict[str, Any]]:
    """Two images of 4 x 4 patches of this width, with further sizes by name."""

    def made(config: Any) -> dict[str, Any]:
        import torch

        found = {"pixel_values": torch.randn(32, width), "grid_thw": torch.tensor([[1, 4, 4]] * 2)}
        return found | {name: torch.tensor([merge] * 2) for name in more}

    return made


def _crops(config: Any) -> dict[str, Any]:
    """Every patch an image of its own."""
    import torch

    size = config.patch_size
    grid = torch.tensor([[1, 4, 4]] * 2)
    return {"pixel_values": torch.randn(32, 3, size, size), "grid_thw": grid}


def _merged_crops(config: Any) -> dict[str, Any]:
    import torch

    size = config.patch_size * config.spatial_merge_size
    grid = torch.tensor([[1, 4, 4]] * 2)
    return {"pixel_values": torch.randn(32, size, size, 3), "image_grid_thw": grid}


def _placed(config: Any) -> dict[str, Any]:
    """Patches with the row and the column of each."""
    import torch

    places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij"), -1)
    width = 3 * config.patch_size**2
    return {
        "pixel_values": torch.rand(2, 36, width),
        "pixel_position_ids": places.reshape(1, 36, 2).repeat(2, 1, 1),
    }


def _sized(config: Any) -> dict[str, Any]:
    """Patches of two images of 4 x 4 patches."""
    import torch

    return {
        "pixel_values": torch.randn(1, 3, config.patch_size, 32 * config.patch_size),
        "target_sizes": torch.tensor([[4, 4]] * 2),
    }


def _several(config: Any) -> dict[str, Any]:
    """A word and the codes of a frame at every time."""
    import torch

    return {"input_ids": torch.randint(0, 60, (2, 12, config.num_codebooks + 1))}


def _spoken(config: Any) -> dict[str, Any]:
    import torch

    width = 4 * (config.subsampling_conv_channels[0] // 4)
    return {
        "input_features": torch.randn(2, 64, width),
        "attention_mask": torch.ones(2, 64).bool(),
    }


def _coded(config: Any) -> dict[str, Any]:
    """Words, and the codes of a sound of every codebook."""
    import torch

    own = getattr(config, "decoder", config)
    rows = torch.randint(0, 60, (2 * own.num_codebooks, 7))
    if own is config:
        return {"input_ids": rows, "encoder_hidden_states": torch.randn(2, 9, config.hidden_size)}
    return {"input_ids": torch.randint(5, 60, (2, 12)), "decoder_input_ids": rows}


def _pair(config: Any) -> dict[str, Any]:
    """Two grey images to match."""
    import torch

    return {"pixel_values": torch.randn(1, 2, 3, 128, 128)}


def _voice(config: Any) -> dict[str, Any]:
    import torch

    return {"input_features": torch.randn(2, config.num_mel_bins, 100),
            "input_features_mask": torch.ones(2, 100, dtype=torch.long)}  # fmt: skip


def _samples(config: Any) -> dict[str, Any]:
    import torch

    return {"input_values": torch.randn(2, 1920)}


def _timed(config: Any) -> dict[str, Any]:
    """Words, and the time to which the model listened."""
    import torch

    time = torch.randn(2, 1, config.hidden_size)
    return {"input_ids": torch.randint(5, 60, (2, 12)), "t_cond": time}


def _heard(config: Any) -> dict[str, Any]:
    import torch

    width = config.input_feat_size
    return {"audio_mel": torch.randn(2, 64, width), "audio_mel_mask": torch.zeros(2, 64).bool()}


def _prompted(config: Any) -> dict[str, Any]:
    """An image, and an image with its segmentation as an example."""
    import torch

    height, width = config.image_size
    image = torch.randn(2, 3, height // 2, width)
    return {"pixel_values": image, "prompt_pixel_values": image.flip(0),
            "prompt_masks": torch.randn(2, 3, height // 2, width)}  # fmt: skip


def _flat(config: Any) -> dict[str, Any]:
    import torch

    return {
        "pixel_values": torch.randn(2, 16, 3 * config.patch_size**2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * 2),
    }


def _past(config: Any) -> dict[str, Any]:
    import torch

    past = torch.randn(2, 4 * config.patch_length)
    zeros = torch.zeros(2, 4 * config.patch_length, dtype=torch.long)
    freq = torch.zeros(2, 1, dtype=torch.long)
    return {"past_values": past, "past_values_padding": zeros, "freq": freq}


def _noise(config: Any) -> dict[str, Any]:
    import torch

    width = config.hidden_size
    layers = len(config.target_layer_ids)
    return {
        "noise_embeds": torch.randn(2, 8, width),
        "context_hidden_states": torch.randn(2, 12, width * layers),
    }


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _series),
    **dict.fromkeys(("patchtst", "patchtsmixer"), _long),
    "lxmert": _sight,
    "AudioFlamingo3Encoder": _sound,
    "FunAsrNanoEncoder": _frames(560),
    **dict.fromkeys(("GraniteSpeech5Encoder", "GraniteSpeech5ForCTC"), _frames(320)),
    "Blip2QFormerModel": _queries,
    **dict.fromkeys(("MimiDecoderModel", "PocketTTSAudioTokenizerDecoderModel"), _latents),
    "idefics": _shown,
    "Kimi_K25VisionModel": _crops,
    "Inkling2VisionModel": _merged_crops,
    **dict.fromkeys(("MuseGlimmerVisionModel", "MuseSparkVisionModel"), _patched(1176)),
    "VideoLlama3VisionModel": _patched(768, "merge_sizes"),
    "Gemma4VisionModel": _placed,
    **dict.fromkeys(("MiniCPMOcrVisionModel", "MiniCPMV4_7VisionModel"), _sized),
    "kyutai_speech_to_text": _several,
    "Gemma4AudioModel": _spoken,
    "Gemma3nAudioEncoder": _heard,
    **dict.fromkeys(("MusicgenDecoder", "MusicgenModel", "MusicgenMelodyModel"), _coded),
    **dict.fromkeys(("musicgen", "musicgen_melody"), _coded),
    "efficientloftr": _pair,
    "Qwen3ASREncoder": _voice,
    "MuseSparkAudioModel": _samples,
    "VoxtralRealtimeTextModel": _timed,
    "SegGptModel": _prompted,
    "Siglip2VisionModel": _flat,
    "TimesFmModel": _past,
    "MuseGlimmerAssistantModel": _noise,
}
# Type -> its model class, where the auto classes name one that cannot be built alone.
CLASSES = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "voxtral_realtime_text": "voxtral_realtime.modeling_voxtral_realtime.VoxtralRealtimeTextModel",
}
