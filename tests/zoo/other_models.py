"""Models of other libraries that the zoo tries, made small where their settings allow it."""

from typing import Any

from tests.zoo import more_models as more
from tests.zoo.others import Other, rand, time_step

_VIT = {"embed_dim": 48, "depth": 2, "num_heads": 3}
_SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 4}
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": _VIT,
    "vit_base_patch16_siglip_224": _VIT,
    "vit_base_patch16_rope_mixed_224": _SMALL,
    "vit_small_patch16_dinov3": _SMALL,
    "vit_relpos_small_patch16_224": _VIT,
    "vit_srelpos_small_patch16_224": _VIT,
    "vit_tiny_r_s16_p8_224": {"size": 224},
    "deit_tiny_distilled_patch16_224": _VIT,
    "deit3_small_patch16_224": _VIT,
    "beit_base_patch16_224": _VIT,
    "beitv2_base_patch16_224": _VIT,
    "eva02_tiny_patch14_224": _SMALL,
    "eva_giant_patch14_224": _SMALL,
    "naflexvit_base_patch16_gap": _VIT,
    "aimv2_large_patch14_224": _VIT,
    "gemma4_vit_167m": _SMALL,
    "qwen3_vit_88m": _SMALL,
    "deepseek_vit_412m": _SMALL,
    "cait_xxs24_224": {"depth": 2},
    "convit_tiny": {"depth": 12},
    "crossvit_9_240": {},
    "pit_ti_224": {},
    "tnt_s_patch16_224": {"depth": 2},
    "visformer_tiny": {},
    "levit_128s": {},
    "mvitv2_tiny": {},
    "swin_tiny_patch4_window7_224": {"depths": (2, 2), "num_heads": (3, 6), "embed_dim": 48},
    "swinv2_tiny_window8_256": {"depths": (2, 2), "num_heads": (3, 6), "embed_dim": 48},
    "swinv2_cr_tiny_ns_224": {"depths": (2, 2), "num_heads": (3, 6), "embed_dim": 48},
    "twins_pcpvt_small": {},
    "twins_svt_small": {},
    "pvt_v2_b0": {},
    "xcit_nano_12_p16_224": {"depth": 2},
    "volo_d1_224": {},
    "nest_tiny": {},
    "coat_lite_mini": {},
    "coat_tiny": {},
    "coatnet_nano_rw_224": {},
    "maxvit_tiny_tf_224": {},
    "maxvit_rmlp_pico_rw_256": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "efficientformer_l1": {},
    "efficientformerv2_s0": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {},
    "edgenext_xx_small": {},
    "davit_tiny": {},
    "gcvit_xxtiny": {},
    "hiera_tiny_224": {},
    "sam2_hiera_tiny": {"size": 256},
    "samvit_base_patch16": {
        "depth": 3,
        "embed_dim": 48,
        "num_heads": 3,
        "size": 256,
        "img_size": 256,
    },
    "tiny_vit_5m_224": {},
    "nextvit_small": {},
    "fastvit_sa12": {},
    "caformer_s18": {},
    "vitamin_small_224": {},
    "botnet26t_256": {},
    "halonet26t": {},
    "lambda_resnet26t": {},
    "mobilenetv5_base": {},
    "mobilenetv4_hybrid_medium": {},
    "shvit_s1": {},
    "swiftformer_xs": {},
    "iformer_t": {},
    "csatv2": {},
    "lowformer_b0": {},
    "resnet50_clip": {},
}
_TV = {"patch_size": 16, "num_layers": 2, "num_heads": 3, "hidden_dim": 48, "mlp_dim": 64}
TORCHVISION: dict[str, dict[str, Any]] = {
    "VisionTransformer": {"image_size": 64, "shape": (3, 64, 64), **_TV},
    "swin_t": {},
    "swin_v2_t": {},
    "maxvit_t": {},
    "mvit_v1_b": {"shape": (3, 16, 224, 224)},
    "mvit_v2_s": {"shape": (3, 16, 224, 224)},
    "SwinTransformer3d": {
        "patch_size": [2, 4, 4],
        "embed_dim": 48,
        "depths": [2, 2],
        "num_heads": [3, 6],
        "window_size": [4, 7, 7],
        "shape": (3, 8, 112, 112),
    },
}
TORCH: dict[str, dict[str, Any]] = {
    "Transformer": {},
    "TransformerEncoder": {"norm_first": True},
    "TransformerDecoderLayer": {},
    "MultiheadAttention": {},
    "MultiheadAttention (other widths)": {"kdim": 20, "vdim": 28},
    "MultiheadAttention (a learned key)": {"add_bias_kv": True},
}
OPEN_CLIP: dict[str, dict[str, Any]] = {
    "CLIP": {},
    "CustomTextCLIP": {"vision_cfg": {"attentional_pool": True}},
    "CoCa": {"text_cfg": {"embed_cls": True, "output_tokens": True}, "multimodal_cfg": {"context_length": 12, "vocab_size": 100, "width": 48, "heads": 3, "layers": 2},
             "vision_cfg": {"attentional_pool": True, "attn_pooler_heads": 3, "output_tokens": True}},
}  # fmt: skip
X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "ViTransformerWrapper": {},
    "Encoder": {},
    "Decoder (cross)": {"cross_attend": True},
    "Decoder (rotary)": {"rotary_pos_emb": True, "attn_dim_head": 64},
    "Decoder (ALiBi)": {"alibi_pos_bias": True},
    "Decoder (T5)": {"rel_pos_bias": True},
    "Decoder (one key head)": {"attn_one_kv_head": True},
    "Decoder (qk norm)": {"attn_qk_norm": True},
    "Decoder (gate)": {"attn_gate_values": True},
    "Decoder (talking heads)": {"attn_pre_talking_heads": True},
}
_PIX = {"num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 2}


def _image(size: int, channels: int = 4, **more: Any) -> Any:
    return lambda: ((rand(1, channels, size, size),), {k: v() for k, v in more.items()})


DIFFUSERS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {
        "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 24, "norm_num_groups": 8,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 4,
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "inputs": _image(16, timestep=time_step, encoder_hidden_states=lambda: rand(1, 9, 24)),
    },
    "UNet2DModel": {
        "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
        "attention_head_dim": 8, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "inputs": _image(16, 3, timestep=time_step),
    },
    "AutoencoderKL": {
        "block_out_channels": (32, 64), "norm_num_groups": 8, "latent_channels": 4,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
        "inputs": _image(32, 3),
    },
    "DiTTransformer2DModel": {
        **_PIX, "in_channels": 4, "sample_size": 16, "num_embeds_ada_norm": 10, "norm_num_groups": 4,
        "inputs": _image(16, timestep=time_step, class_labels=time_step),
    },
    "PixArtTransformer2DModel": {
        **_PIX, "in_channels": 4, "sample_size": 16, "cross_attention_dim": 48, "caption_channels": 24,
        "norm_num_groups": 4,
        "inputs": _image(16, timestep=time_step, encoder_hidden_states=lambda: rand(1, 9, 24),
                         added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None}),
    },
    "SD3Transformer2DModel": {
        **_PIX, "in_channels": 4, "sample_size": 16, "joint_attention_dim": 24, "caption_projection_dim": 48,
        "pooled_projection_dim": 20, "out_channels": 4, "pos_embed_max_size": 16,
        "inputs": _image(16, timestep=time_step, encoder_hidden_states=lambda: rand(1, 9, 24),
                         pooled_projections=lambda: rand(1, 20)),
    },
    "FluxTransformer2DModel": {
        **_PIX, "num_single_layers": 1, "in_channels": 4, "joint_attention_dim": 24,
        "pooled_projection_dim": 20, "axes_dims_rope": (4, 4, 8),
        "inputs": lambda: ((), {"hidden_states": rand(1, 16, 4), "timestep": time_step() / 1.0,
                                "encoder_hidden_states": rand(1, 9, 24), "pooled_projections": rand(1, 20),
                                "img_ids": rand(16, 3), "txt_ids": rand(9, 3)}),
    },
    "PriorTransformer": {
        **_PIX, "embedding_dim": 24, "num_embeddings": 9,
        "inputs": lambda: ((rand(1, 24), 3, rand(1, 24), rand(1, 9, 24)), {}),
    },
    "AuraFlowTransformer2DModel": {
        "num_attention_heads": 3, "attention_head_dim": 16, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
        "in_channels": 4, "sample_size": 16, "joint_attention_dim": 24, "caption_projection_dim": 48,
        "pos_embed_max_size": 64, "out_channels": 4,
        "inputs": _image(16, timestep=time_step, encoder_hidden_states=lambda: rand(1, 9, 24)),
    },
    "CogVideoXTransformer3DModel": {
        "num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 2, "in_channels": 4,
        "out_channels": 4, "text_embed_dim": 24, "time_embed_dim": 12, "sample_width": 8,
        "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 9, "patch_size": 2,
        "inputs": lambda: ((rand(1, 2, 4, 8, 8), rand(1, 9, 24), time_step()), {}),
    },
    "LTXVideoTransformer3DModel": {
        "num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 2, "in_channels": 4,
        "out_channels": 4, "cross_attention_dim": 48, "caption_channels": 24,
        "inputs": lambda: ((rand(1, 27, 4), rand(1, 9, 24), time_step(), rand(1, 9).abs().gt(-1)),
                           {"num_frames": 3, "height": 3, "width": 3}),
    },
    "WanTransformer3DModel": {
        "num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 2, "in_channels": 4,
        "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 64,
        "inputs": lambda: ((rand(1, 4, 3, 6, 6), time_step(), rand(1, 9, 24)), {}),
    },
    "StableAudioDiTModel": {
        "num_attention_heads": 4, "num_key_value_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2,
        "in_channels": 4, "out_channels": 4, "cross_attention_dim": 24, "global_states_input_dim": 24,
        "time_proj_dim": 16, "cross_attention_input_dim": 24,
        "inputs": lambda: ((rand(1, 4, 12), time_step(), rand(1, 9, 24), rand(1, 1, 24)), {}),
    },
    "SanaTransformer2DModel": {
        "num_attention_heads": 3, "attention_head_dim": 16, "num_cross_attention_heads": 3, "num_layers": 2,
        "cross_attention_head_dim": 16, "cross_attention_dim": 48, "caption_channels": 24, "in_channels": 4,
        "out_channels": 4, "sample_size": 8,
        "inputs": _image(8, encoder_hidden_states=lambda: rand(1, 9, 24), timestep=time_step),
    },
}  # fmt: skip
_FORMS = {"num_classes": 5}
VIT_PYTORCH: dict[str, dict[str, Any]] = {
    "vit.ViT": more.VIT_SIZES,
    "simple_vit.SimpleViT": more.VIT_SIZES,
    "simple_vit_with_qk_norm.SimpleViT": more.VIT_SIZES,
    "deepvit.DeepViT": more.VIT_SIZES,
    "cait.CaiT": {**more.VIT_SIZES, "cls_depth": 1},
    "cct.CCT": {"img_size": (64, 64), "embedding_dim": 48, "num_layers": 2, "num_heads": 3, "num_classes": 5},
    "cross_vit.CrossViT": {**_FORMS, "image_size": 64, "depth": 1, "sm_dim": 48, "lg_dim": 48, "sm_enc_heads": 3, "lg_enc_heads": 3,
                           "sm_patch_size": 16, "lg_patch_size": 32, "sm_enc_depth": 1, "lg_enc_depth": 1},
    "pit.PiT": {**_FORMS, "image_size": 64, "patch_size": 8, "dim": 48, "depth": (1, 1), "heads": 3, "mlp_dim": 64},
    "levit.LeViT": {**_FORMS, "image_size": 64, "dim": (48, 64), "depth": 1, "heads": (3, 4), "mlp_mult": 2},
    "cvt.CvT": {"num_classes": 5},
    "twins_svt.TwinsSVT": {"num_classes": 5, "s1_emb_dim": 24, "s2_emb_dim": 48, "s3_emb_dim": 48, "s4_emb_dim": 48, "s3_depth": 1,
                           "shape": (3, 224, 224)},
    "crossformer.CrossFormer": {"num_classes": 5, "dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1), "shape": (3, 224, 224)},
    "nest.NesT": {**_FORMS, "image_size": 64, "patch_size": 4, "dim": 48, "heads": 3, "num_hierarchies": 2, "block_repeats": (1, 1)},
    "max_vit.MaxViT": {"num_classes": 5, "dim": 32, "depth": (1, 1), "dim_head": 16, "window_size": 4, "shape": (3, 64, 64)},
    "mobile_vit.MobileViT": {"image_size": (128, 128), "shape": (3, 128, 128), "dims": [32, 40, 48], "channels": [16, 16, 24, 24, 32, 32, 40, 40, 48, 48, 64],
                             "num_classes": 5},
    "xcit.XCiT": {"dim": 48, "depth": 2, "cls_depth": 1, "heads": 3, "mlp_dim": 64, "num_classes": 5, "image_size": 64, "patch_size": 16},
    "scalable_vit.ScalableViT": {"num_classes": 5, "dim": 32, "heads": (1, 2), "depth": (1, 1), "ssa_dim_key": 16, "reduction_factor": (4, 2),
                                 "window_size": (8, None), "ssa_dim_value": 16, "iwsa_dim_key": 16, "iwsa_dim_value": 16},
    "regionvit.RegionViT": {"num_classes": 5, "dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1), "window_size": 7, "shape": (3, 224, 224)},
    "vivit.ViViT": {"image_size": 32, "image_patch_size": 16, "frames": 4, "frame_patch_size": 2, "num_classes": 5, "dim": 48,
                  "spatial_depth": 1, "temporal_depth": 1, "heads": 3, "mlp_dim": 64, "shape": (3, 4, 32, 32)},
    "vit_for_small_dataset.ViT": more.VIT_SIZES,
    "parallel_vit.ViT": {**more.VIT_SIZES, "num_parallel_branches": 2},
}  # fmt: skip
ESM: dict[str, dict[str, Any]] = {"ESM2": {}, "ProteinBertModel": {}, "MSATransformer": {}}
_GPT = {"n_embd": 64, "n_head": 4, "intermediate_size": 96}
LITGPT: dict[str, dict[str, Any]] = {
    "pythia-14m": {"n_embd": 64, "intermediate_size": 96},
    "Llama-3.2-1B": _GPT | {"n_query_groups": 2, "head_size": 16},
    "gemma-2b": _GPT | {"n_query_groups": 1, "head_size": 16},
    "Gemma-2-2b": _GPT | {"n_query_groups": 2, "head_size": 16},
    "phi-2": _GPT | {"head_size": 16},
    "falcon-7b": _GPT | {"n_query_groups": 1, "head_size": 16},
    "Qwen3-0.6B": _GPT | {"n_query_groups": 2, "head_size": 16},
    "OLMo-2-1124-7B": _GPT | {"n_query_groups": 4, "head_size": 16},
}
_LIBRARIES: tuple[tuple[str, dict[str, dict[str, Any]]], ...] = (
    ("timm", TIMM | more.TIMM),
    ("torchvision", TORCHVISION),
    ("torch", TORCH),
    ("open_clip", OPEN_CLIP),
    ("x_transformers", X_TRANSFORMERS | more.X_TRANSFORMERS),
    ("diffusers", DIFFUSERS | more.DIFFUSERS),
    ("vit_pytorch", VIT_PYTORCH | more.VIT_PYTORCH),
    ("esm", ESM),
    ("segment_anything", {"ImageEncoderViT": {}, "MaskDecoder": {}}),
    ("whisper", {"Whisper": {}}),
    ("litgpt", LITGPT | more.LITGPT),
    *more.BY_PATH.items(),
)
MODELS: tuple[Other, ...] = tuple(
    Other(library, name, settings)
    for library, rows in _LIBRARIES
    for name, settings in rows.items()
)
BY_TITLE = {one.title: one for one in MODELS}
_CHANNELS = "it attends over channels"
_LINEAR = "linear attention has no softmax over keys"
_MIXED = "heads are mixed before or after the softmax"
_POOLED = "queries, keys or values are pooled after their projections"
_STREAMS = "tokens of two streams have projections of their own, and attend each other"
_NORMED = "batch norms follow the projections"
_COSINES = "the logits are cosines, times a number for every head"
_CONVOLVED = "projections are convolutions over several places"
_SUBNORM = "a norm is between the heads and the output layer"
# Model -> why its attention, or a part of it, is no softmax over keys of projected tokens, or has a
# part that no file tells.
UNLIKE: dict[str, str] = {
    "timm/cait_xxs24_224": _MIXED,
    "timm/convit_tiny": "two softmaxes, of content and of positions, are added",
    "timm/mvitv2_tiny": _POOLED,
    "timm/xcit_nano_12_p16_224": _CHANNELS,
    "timm/edgenext_xx_small": _CHANNELS,
    "timm/davit_tiny": _CHANNELS,
    "timm/volo_d1_224": "the weights are a projection of one token, not products with keys",
    "timm/coat_lite_mini": _LINEAR,
    "timm/coat_tiny": _LINEAR,
    "timm/mobilevitv2_050": _LINEAR,
    "timm/efficientvit_b0": _LINEAR,
    "timm/swiftformer_xs": _LINEAR,
    "timm/lambda_resnet26t": _LINEAR,
    "timm/efficientformerv2_s0": _MIXED,
    "timm/efficientvit_m0": "every head reads the output of the head before it",
    "timm/gcvit_xxtiny": "queries come from a network of the whole image, and not from a projection",
    "timm/hiera_tiny_224": _POOLED,
    "timm/sam2_hiera_tiny": _POOLED,
    "torchvision/mvit_v1_b": _POOLED,
    "torchvision/mvit_v2_s": _POOLED,
    "x_transformers/Decoder (talking heads)": _MIXED,
    "diffusers/SD3Transformer2DModel": _STREAMS,
    "diffusers/FluxTransformer2DModel": _STREAMS,
    "diffusers/AuraFlowTransformer2DModel": _STREAMS,
    "diffusers/SanaTransformer2DModel": _LINEAR,
    "vit_pytorch/deepvit.DeepViT": _MIXED,
    "vit_pytorch/cait.CaiT": _MIXED,
    "vit_pytorch/cvt.CvT": _CONVOLVED,
    "vit_pytorch/twins_svt.TwinsSVT": _CONVOLVED,
    "vit_pytorch/xcit.XCiT": _CHANNELS,
    "vit_pytorch/vit_for_small_dataset.ViT": "the temperature is learned, and no token attends itself",
    "timm/levit_128s": _NORMED,
    "timm/shvit_s1": _NORMED,
    "timm/iformer_t": _NORMED,
    "vit_pytorch/levit.LeViT": _NORMED,
    "timm/swinv2_tiny_window8_256": _COSINES,
    "timm/swinv2_cr_tiny_ns_224": _COSINES,
    "torchvision/swin_v2_t": _COSINES,
    "x_transformers/Decoder (qk norm)": _COSINES,
    "timm/lowformer_b0": _CONVOLVED,
    "timm/mobilenetv4_hybrid_medium": _CONVOLVED,
    "timm/gemma4_vit_167m": "the projections clip their inputs and outputs",
    "timm/eva02_base_patch16_clip_224": _SUBNORM,
    "timm/beit3_base_patch16_224": _SUBNORM,
    "vit_pytorch/rvt.RvT": _CONVOLVED,
    "ultralytics/nn.tasks.DetectionModel": _NORMED,
    "esm/MSATransformer": "the rows of an alignment share their weights",
    "denoising_diffusion_pytorch/Unet": _LINEAR,
    "vit_pytorch/normalized_vit.nViT": "queries, keys and weights are divided by their lengths",
    "vit_pytorch/scalable_vit.ScalableViT": _CONVOLVED,
    "timm/halonet26t": "the keys of every block of queries are gathered around it",
    "x_transformers/Decoder (memory)": "every head has several learned keys and values",
    "x_transformers/Decoder (null keys)": "a key and a value of zeros are in no file",
    "x_transformers/Decoder (gate)": "no file tells the function of its gate, sigmoid or SiLU",
}
