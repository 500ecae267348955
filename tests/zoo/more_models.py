"""Further models of other libraries: those that the tables were not made from, when first tried.

A row has the path of a class, its arguments, and under `inputs` a function that returns the
arguments of a call.
"""

from importlib import import_module
from typing import Any

from tests.zoo.others import ids, rand, time_step

_SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 4}
TIMM: dict[str, dict[str, Any]] = {
    "vit_base_patch16_rope_reg1_gap_256": _SMALL, "vit_pe_core_base_patch16_224": _SMALL,
    "eva02_base_patch16_clip_224": _SMALL, "eva02_base_patch14_224": _SMALL,
    "vit_tiny_patch16_dinov3_qkvb": _SMALL, "vit_pwee_patch16_reg1_gap_256": _SMALL,
    "vit_little_patch16_reg1_gap_256": _SMALL, "beit3_base_patch16_224": _SMALL,
    "vit_relpos_medium_patch16_rpn_224": _SMALL, "naflexvit_base_patch16_par_gap": _SMALL,
    "maxxvit_rmlp_nano_rw_256": {}, "swin_s3_tiny_224": {},
}  # fmt: skip
VIT_SIZES = {
    "dim": 48, "depth": 2, "heads": 3, "mlp_dim": 64, "num_classes": 5, "image_size": 64,
    "patch_size": 16,
}  # fmt: skip
VIT_PYTORCH: dict[str, dict[str, Any]] = {
    "vit_1d.ViT": {"seq_len": 64, "patch_size": 8, "num_classes": 5, "dim": 48, "depth": 2, "heads": 3, "mlp_dim": 64, "shape": (3, 64)},
    "vit_3d.ViT": {"image_size": 32, "image_patch_size": 16, "frames": 4, "frame_patch_size": 2, "num_classes": 5, "dim": 48,
                   "depth": 2, "heads": 3, "mlp_dim": 64, "shape": (3, 4, 32, 32)},
    "simple_vit_1d.SimpleViT": {"seq_len": 64, "patch_size": 8, "num_classes": 5, "dim": 48, "depth": 2, "heads": 3, "mlp_dim": 64,
                                "shape": (3, 64)},
    **dict.fromkeys(("simple_flash_attn_vit.SimpleViT", "vit_with_patch_dropout.ViT", "simple_vit_with_register_tokens.SimpleViT", "rvt.RvT", "normalized_vit.nViT", "simple_uvit.SimpleUViT"), VIT_SIZES),
    "max_vit_with_registers.MaxViT": {"num_classes": 5, "dim": 32, "depth": (1, 1), "dim_head": 16, "window_size": 4, "shape": (3, 64, 64)},
    "t2t.T2TViT": {"dim": 48, "image_size": 64, "depth": 2, "heads": 3, "mlp_dim": 64, "num_classes": 5, "t2t_layers": ((7, 4), (3, 2))},
}  # fmt: skip
X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Encoder (RMS)": {"use_rmsnorm": True, "ff_glu": True},
    "Encoder (kv heads)": {"heads": 4, "attn_kv_heads": 2},
    "Decoder (memory)": {"attn_num_mem_kv": 4},
    "Decoder (sandwich)": {"sandwich_norm": True},
    "Decoder (null keys)": {"attn_add_zero_kv": True},
}
_GPT = {"n_embd": 64, "n_head": 4, "intermediate_size": 96, "head_size": 16}
LITGPT: dict[str, dict[str, Any]] = {
    "Mistral-7B-v0.1": _GPT | {"n_query_groups": 2},
    "Qwen2.5-0.5B": _GPT | {"n_query_groups": 2},
    "Phi-3-mini-4k-instruct": _GPT | {"n_query_groups": 4},
}  # fmt: skip
_PIX = {"num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 2}
_BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}


DIFFUSERS: dict[str, dict[str, Any]] = {
    "Transformer2DModel": {
        **_PIX, "in_channels": 32, "cross_attention_dim": 24, "norm_num_groups": 8,
        "inputs": lambda: ((rand(1, 32, 8, 8), rand(1, 9, 24)), {}),
    },
    "UNet3DConditionModel": {
        **_BLOCKS, "cross_attention_dim": 24, "attention_head_dim": 16,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "inputs": lambda: ((rand(1, 4, 3, 16, 16), time_step(), rand(1, 9, 24)), {}),
    },
    "VQModel": {
        **_BLOCKS, "down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D"), "latent_channels": 4,
        "up_block_types": ("AttnUpDecoderBlock2D", "UpDecoderBlock2D"), "num_vq_embeddings": 16,
        "inputs": lambda: ((rand(1, 3, 32, 32),), {}),
    },
    "AutoencoderKLTemporalDecoder": {
        "block_out_channels": (32, 64), "latent_channels": 4, "down_block_types": ("DownEncoderBlock2D",) * 2,
        "layers_per_block": 2, "inputs": lambda: ((rand(2, 3, 32, 32),), {"num_frames": 2}),
    },
    "LatteTransformer3DModel": {
        **_PIX, "in_channels": 4, "out_channels": 8, "sample_size": 8, "patch_size": 2, "cross_attention_dim": 48,
        "caption_channels": 24, "norm_type": "ada_norm_single", "video_length": 3,
        "inputs": lambda: ((rand(1, 4, 3, 8, 8), time_step(), rand(1, 9, 24)), {}),
    },
    "LuminaNextDiT2DModel": {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 48, "num_layers": 2, "num_attention_heads": 3,
        "num_kv_heads": 1, "multiple_of": 16, "cross_attention_dim": 24, "inputs": lambda: _lumina(),
    },
    "CogView3PlusTransformer2DModel": {
        **_PIX, "patch_size": 2, "in_channels": 4, "out_channels": 4, "text_embed_dim": 24, "time_embed_dim": 12,
        "condition_dim": 4, "pos_embed_max_size": 16, "sample_size": 8,
        "inputs": lambda: ((rand(1, 4, 8, 8), rand(1, 9, 24), time_step(), _pair(), _pair(), _pair()), {}),
    },
    "UVit2DModel": {
        "hidden_size": 48, "cond_embed_dim": 24, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40,
        "encoder_hidden_size": 24, "vocab_size": 32, "codebook_size": 24, "in_channels": 48, "block_out_channels": 48,
        "num_res_blocks": 1, "num_hidden_layers": 2, "num_attention_heads": 3, "block_num_heads": 3, "sample_size": 8,
        "intermediate_size": 64,
        "inputs": lambda: ((ids(1, 8, 8, most=20), rand(1, 9, 24), rand(1, 24), rand(1, 5)), {}),
    },
}  # fmt: skip


def _pair() -> Any:
    import torch

    return torch.tensor([[8.0, 8.0]])


def _lumina() -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    turned = get_2d_rotary_pos_embed_lumina(16, 8, 8)
    return (rand(1, 4, 8, 8), time_step() / 1.0, rand(1, 9, 24), torch.ones(1, 9), turned), {
        "cross_attention_kwargs": {}
    }


def _lengths(*values: int) -> Any:
    import torch

    return torch.tensor(values)


TORCHAUDIO: dict[str, dict[str, Any]] = {
    "models.Conformer": {
        "input_dim": 48, "num_heads": 3, "ffn_dim": 64, "num_layers": 2, "depthwise_conv_kernel_size": 7,
        "inputs": lambda: ((rand(2, 12, 48), _lengths(12, 9)), {}),
    },
    "models.Emformer": {
        "input_dim": 48, "num_heads": 3, "ffn_dim": 64, "num_layers": 2, "segment_length": 4, "right_context_length": 1,
        "inputs": lambda: ((rand(2, 13, 48), _lengths(12, 12)), {}),
    },
    "models.wav2vec2_model": {
        "extractor_mode": "group_norm", "extractor_conv_layer_config": [(32, 10, 5), (32, 3, 2)], "extractor_conv_bias": False,
        "encoder_embed_dim": 48, "encoder_projection_dropout": 0.0, "encoder_pos_conv_kernel": 8, "encoder_pos_conv_groups": 4,
        "encoder_num_layers": 2, "encoder_num_heads": 3, "encoder_attention_dropout": 0.0, "encoder_ff_interm_features": 64,
        "encoder_ff_interm_dropout": 0.0, "encoder_dropout": 0.0, "encoder_layer_norm_first": False, "encoder_layer_drop": 0.0,
        "aux_num_out": None, "inputs": lambda: ((rand(2, 2000),), {}),
    },
}  # fmt: skip
KORNIA: dict[str, dict[str, Any]] = {
    "models.vit.VisionTransformer": {
        "image_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3,
        "inputs": lambda: ((rand(1, 3, 64, 64),), {}),
    },
    "models.vit_mobile.MobileViT": {"mode": "xxs", "inputs": lambda: ((rand(1, 3, 128, 128),), {})},
}  # fmt: skip
MONAI: dict[str, dict[str, Any]] = {
    "networks.nets.ViT": {
        "in_channels": 1, "img_size": (32, 32), "patch_size": (8, 8), "hidden_size": 48, "mlp_dim": 64, "num_layers": 2,
        "num_heads": 3, "spatial_dims": 2, "inputs": lambda: ((rand(1, 1, 32, 32),), {}),
    },
    "networks.nets.UNETR": {
        "in_channels": 1, "out_channels": 2, "img_size": (32, 32), "feature_size": 8, "hidden_size": 48, "mlp_dim": 64,
        "num_heads": 3, "spatial_dims": 2, "inputs": lambda: ((rand(1, 1, 32, 32),), {}),
    },
    "networks.nets.SwinUNETR": {
        "in_channels": 1, "out_channels": 2, "feature_size": 12, "spatial_dims": 2, "num_heads": (1, 2, 3, 3),
        "inputs": lambda: ((rand(1, 1, 64, 64),), {}),
    },
    "networks.nets.DecoderOnlyTransformer": {
        "num_tokens": 50, "max_seq_len": 16, "attn_layers_dim": 48, "attn_layers_depth": 2, "attn_layers_heads": 3,
        "inputs": lambda: ((ids(2, 12, most=40),), {}),
    },
    "networks.nets.DiffusionModelUNet": {
        "spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (32, 64), "attention_levels": (False, True),
        "num_res_blocks": 1, "num_head_channels": 16, "norm_num_groups": 8,
        "inputs": lambda: ((rand(1, 1, 16, 16), time_step()), {}),
    },
    "networks.nets.AutoencoderKL": {
        "spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (32, 64), "attention_levels": (False, True),
        "latent_channels": 4, "num_res_blocks": 1, "norm_num_groups": 8, "inputs": lambda: ((rand(1, 1, 16, 16),), {}),
    },
}  # fmt: skip
_LATENTS = {"num_latents": 8, "latent_dim": 48, "cross_heads": 1, "latent_heads": 3, "cross_dim_head": 16, "latent_dim_head": 16}  # fmt: skip
PERCEIVER_PYTORCH: dict[str, dict[str, Any]] = {
    "Perceiver": {
        **_LATENTS, "input_channels": 3, "input_axis": 2, "num_freq_bands": 4, "max_freq": 10.0, "depth": 2, "num_classes": 5,
        "inputs": lambda: ((rand(1, 8, 8, 3),), {}),
    },
    "PerceiverIO": {
        **_LATENTS, "dim": 24, "depth": 2, "queries_dim": 24, "logits_dim": 5,
        "inputs": lambda: ((rand(1, 12, 24),), {"queries": rand(1, 7, 24)}),
    },
}  # fmt: skip
RTDL_REVISITING_MODELS: dict[str, dict[str, Any]] = {
    "FTTransformer": {
        "n_cont_features": 4, "cat_cardinalities": [3, 4], "d_out": 1, "n_blocks": 2, "d_block": 48, "attention_n_heads": 3,
        "attention_dropout": 0.0, "ffn_d_hidden_multiplier": 2.0, "ffn_dropout": 0.0, "residual_dropout": 0.0,
        "inputs": lambda: ((rand(2, 4), ids(2, 2, most=4) - 2), {}),
    },
}  # fmt: skip
DEMUCS: dict[str, dict[str, Any]] = {
    "transformer.CrossTransformerEncoder": {
        "dim": 48, "num_heads": 3, "num_layers": 3, "hidden_scale": 2.0, "inputs": lambda: ((rand(1, 48, 4, 5), rand(1, 48, 9)), {}),
    },
}  # fmt: skip
CONFORMER: dict[str, dict[str, Any]] = {
    "Conformer": {"dim": 48, "depth": 2, "dim_head": 16, "heads": 3, "inputs": lambda: ((rand(2, 12, 48),), {})},
}  # fmt: skip
TAB_TRANSFORMER_PYTORCH: dict[str, dict[str, Any]] = {
    "FTTransformer": {"categories": (3, 4), "num_continuous": 2, "dim": 48, "depth": 2, "heads": 3, "dim_head": 16,
          "inputs": lambda: ((ids(2, 2, most=4) - 3, rand(2, 2)), {})}
}  # fmt: skip
PALM_RLHF_PYTORCH: dict[str, dict[str, Any]] = {
    "PaLM": {"num_tokens": 50, "dim": 48, "depth": 2, "heads": 3, "dim_head": 16, "inputs": lambda: ((ids(2, 12, most=40),), {})},
}  # fmt: skip
ENCODEC: dict[str, dict[str, Any]] = {
    "modules.transformer.StreamingTransformerEncoder": {
        "dim": 48, "hidden_scale": 2.0, "num_heads": 3, "num_layers": 2, "inputs": lambda: ((rand(2, 12, 48),), {}),
    },
}  # fmt: skip
SEGMENTATION_MODELS_PYTORCH: dict[str, dict[str, Any]] = {
    "Segformer": {"encoder_name": "mit_b0", "encoder_weights": None, "inputs": lambda: ((rand(1, 3, 64, 64),), {})},
}  # fmt: skip
CLIP: dict[str, dict[str, Any]] = {
    "model.CLIP": {
        "embed_dim": 48, "image_resolution": 64, "vision_layers": 2, "vision_width": 64, "vision_patch_size": 16,
        "context_length": 12, "vocab_size": 100, "transformer_width": 64, "transformer_heads": 2, "transformer_layers": 2,
        "inputs": lambda: ((rand(2, 3, 64, 64), ids(2, 12)), {}),
    },
}  # fmt: skip
ULTRALYTICS: dict[str, dict[str, Any]] = {
    "nn.tasks.DetectionModel": {"cfg": "yolo11n.yaml", "verbose": False, "inputs": lambda: ((rand(1, 3, 64, 64),), {})},
}  # fmt: skip
_SPEECH = {"tgt_vocab": 50, "input_size": 40, "d_model": 48, "nhead": 3, "num_encoder_layers": 2, "num_decoder_layers": 2,
           "d_ffn": 64, "inputs": lambda: ((rand(2, 20, 40), ids(2, 7, most=40)), {})}  # fmt: skip
SPEECHBRAIN: dict[str, dict[str, Any]] = {
    "lobes.models.transformer.TransformerASR.TransformerASR": _SPEECH,
    "lobes.models.transformer.TransformerASR.TransformerASR (conformer)": {
        **_SPEECH, "encoder_module": "conformer", "attention_type": "RelPosMHAXL", "kernel_size": 7, "normalize_before": True,
    },
}  # fmt: skip
_TUNE = {"vocab_size": 50, "num_layers": 2, "num_heads": 4, "embed_dim": 64, "max_seq_len": 32}
_IDS: dict[str, Any] = {"inputs": lambda: ((ids(2, 12, most=40),), {})}
TORCHTUNE: dict[str, dict[str, Any]] = {
    "models.llama2.llama2": {**_TUNE, "num_kv_heads": 2, **_IDS},
    "models.qwen2.qwen2": {**_TUNE, "num_kv_heads": 2, "intermediate_dim": 96, **_IDS},
    "models.gemma.gemma": {**_TUNE, "num_kv_heads": 1, "head_dim": 16, "intermediate_dim": 96, **_IDS},
}  # fmt: skip


def _curated(config: str, **settings: Any) -> dict[str, Any]:
    """Settings of a model of curated-transformers, and a call of it with a mask that keeps all tokens."""

    def configured() -> Any:
        import torch

        models: Any = import_module("curated_transformers.models")
        return getattr(models, config)(
            hidden_width=48, n_hidden_layers=2, n_pieces=50, dtype=torch.float32, **settings
        )

    def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        import torch

        layers: Any = import_module("curated_transformers.layers")
        return (ids(2, 12, most=40), layers.AttentionMask(torch.ones(2, 12, dtype=torch.bool))), {}

    return {"config": configured, "inputs": inputs}


_MLP = {"intermediate_width": 64}
CURATED_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "models.BERTEncoder": _curated("BERTConfig", embedding_width=48, n_attention_heads=3, **_MLP),
    "models.ALBERTEncoder": _curated("ALBERTConfig", embedding_width=24, n_attention_heads=3, **_MLP),
    "models.LlamaDecoder": _curated("LlamaConfig", n_query_heads=6, n_key_value_heads=2, **_MLP),
    "models.FalconDecoder": _curated("FalconConfig", n_query_heads=3, rotary_embedding_fraction=1.0),
    "models.GPTNeoXDecoder": _curated("GPTNeoXConfig", n_attention_heads=3, **_MLP),
}  # fmt: skip
_NET = {"dim": 16, "dim_mults": (1, 2), "attn_heads": 3, "attn_dim_head": 8}
DENOISING_DIFFUSION_PYTORCH: dict[str, dict[str, Any]] = {
    "Unet": {**_NET, "inputs": lambda: ((rand(1, 3, 16, 16), time_step()), {})},
}  # fmt: skip
# Libraries whose classes are built from their paths.
BY_PATH: dict[str, dict[str, dict[str, Any]]] = {
    "torchaudio": TORCHAUDIO,
    "kornia": KORNIA,
    "monai": MONAI,
    "perceiver_pytorch": PERCEIVER_PYTORCH,
    "rtdl_revisiting_models": RTDL_REVISITING_MODELS,
    "demucs": DEMUCS,
    "conformer": CONFORMER,
    "tab_transformer_pytorch": TAB_TRANSFORMER_PYTORCH,
    "palm_rlhf_pytorch": PALM_RLHF_PYTORCH,
    "encodec": ENCODEC,
    "segmentation_models_pytorch": SEGMENTATION_MODELS_PYTORCH,
    "clip": CLIP,
    "ultralytics": ULTRALYTICS,
    "speechbrain": SPEECHBRAIN,
    "torchtune": TORCHTUNE,
    "curated_transformers": CURATED_TRANSFORMERS,
    "denoising_diffusion_pytorch": DENOISING_DIFFUSION_PYTORCH,
}
