"""Data of single model types: settings over the generic tiny configuration, and inputs."""

from collections.abc import Callable
from typing import Any

_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 2,
}
_HEAD = {"head_dim": 8}
_WHOLE = {"__factor__": 1}
_KEYS = {"d_kv": 16}  # the scale is folded without rounding
_WINDOWS = {"backbone_config": {"window_size_per_stage": [4, 2, 2, 2]}}
_MAMBA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
          "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2,
          "attn_layer_indices": [1], "layer_types": ["mamba", "attention"]}  # fmt: skip
# Type -> settings laid over its tiny configuration; `__init__`: arguments of the default
# configuration, `__factor__`: the factor of the widths.
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _SERIES),
    **dict.fromkeys(("bamba", "granitemoehybrid"), _MAMBA),
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
    **dict.fromkeys(("bros", "layoutlmv3", "dinov3_vit", "cohere_compass_vision"), _WHOLE),
    "perceiver": {"d_model": 16},
    "aria": {"vision_config": {"model_type": "idefics3_vision"}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "hunyuan_vl_text": {"head_dim": 8, "xdrope_section": [1, 1, 1, 1]},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 4, "clip_qkv": 8.0},
        "n_heads": 8,
        "d_model": 64,
    },
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "cohere_compass": {"text_config": {"layer_types": ["sliding_attention", "full_attention"]}},
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
}
