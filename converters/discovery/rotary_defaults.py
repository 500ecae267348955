"""Defaults of rotary positions in the configuration classes of transformers 5.23.

Tables by model type; `rotary_settings` reads configurations with them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Bases(NamedTuple):
    """The keys and defaults of the bases of full and of sliding attention.

    `sliding` is "" if no key changes the base of sliding attention. `scaled`: `rope_scaling` applies
    to sliding attention as well.
    """

    full: str
    full_default: float
    sliding: str
    sliding_default: float
    scaled: bool = False


_GEMMA = Bases("rope_theta", 1e6, "rope_local_base_freq", 1e4)
_MODERN = Bases("global_rope_theta", 160000.0, "local_rope_theta", 1e4, scaled=True)
# Model types whose sliding attention has other RoPE parameters than their full attention.
BY_KIND = {
    **dict.fromkeys(("gemma3_text", "gemma3n_text", "t5gemma2_decoder", "t5gemma2_text"), _GEMMA),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), _MODERN),
    "olmo3": Bases("rope_theta", 5e5, "", 5e5),
}
# Base -> the model types whose class has it by default; all others have 10000 by default.
BASES = {
    100.0: "eomt_dinov3",
    1000.0: "nomic_bert",
    1200.0: "musicflamingo",
    20000.0: "jina_embeddings_v3 pe_audio_encoder pe_audio_video_encoder pe_video_encoder",
    100000.0: "helium",
    150000.0: "gpt_oss openai_privacy_filter",
    160000.0: "gte",
    500000.0: (
        "bitnet blt blt_global_transformer blt_local_decoder blt_local_encoder cohere csm "
        "csm_depth_decoder_model ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text evolla flex_olmo "
        "llama4_text mllama_text_model muse_glimmer_assistant paddleocr_vl_text qwen3_vl_moe_text "
        "qwen3_vl_text"
    ),
    1000000.0: (
        "cwm emu3_text_model lfm2 lfm2_moe lfm3 lfm3_vl_vision minimax mixtral phimoe "
        "qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text qwen3_omni_moe_text "
        "solar_open"
    ),
    2000000.0: "smollm3",
    5000000.0: "minimax_m2 minimax_m3_vl_text",
    6000000.0: "bailing_hybrid",
    10000000.0: "longcat_flash",
    11158840.0: "hy_v3",
    12000000.0: "apertus",
    80000000.0: "dots3_note_text",
    100000000.0: "cosmos3_edge_text",
}
# Share -> the model types whose class rotates that share of a head if no key gives another; others
# rotate all of it.
SHARES = {
    0.2: "musicflamingo",
    0.25: "gpt_neox qwen3_5_moe_text qwen3_5_text qwen3_next stablelm",
    0.5: (
        "bamba dots3_note_audio_encoder glm glm4 glm4_moe glm4v_moe_text glmasr_encoder nemotron "
        "persimmon phi recurrent_gemma"
    ),
    0.9: "moonshine",
}
# Model types whose classes scale positions by default, all alike or by kind of layer:
# `rotary_settings.of` raises if their configuration has no RoPE parameters.
NEEDED = frozenset((
    "apertus", "cwm", "diffusion_gemma_text", "dots3_note_text", "embedding_gemma2_text",
    "gemma4_text", "gemma4_unified_text", "gemma4_vision", "gpt_oss", "higgs_audio_v2", "laguna",
    "lfm3", "mellum", "mimo_v2_flash", "minimax_m3_vl_vision", "ministral3", "mistral4",
    "mistral_large4_text", "mlcd_vision_model", "musicflamingo", "neomme", "openai_privacy_filter",
    "step3p5", "step3p5_vision", "ultrabert", "zaya",
))  # fmt: skip
# Model types whose list layer_rope_theta holds the base of each layer.
BASE_OF_LAYER = ("granite_swa", "granitemoe_swa")
# Model type -> the key of the base of all its layers, where it is not rope_theta.
BASE_KEYS = {
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), "rotary_emb_base"),
    **dict.fromkeys(
        ("seamless_m4t", "wav2vec2-bert", "wav2vec2-conformer"), "rotary_embedding_base"
    ),
}
# Model type -> the key of its share of rotated features, where it is not partial_rotary_factor; "" if
# it has none.
SHARE_KEYS = {"bamba": "", "gpt_neox": "rotary_pct", "gpt_neox_japanese": "rotary_pct"}
# Model types with a key rotary_dim, the number of rotated features; all others ignore it.
WITH_DIMS = ("codegen", "gptj", "minimax_m2")
# Model types that rotate a share of each head; all others rotate the whole head.
PARTIAL = frozenset((
    "bamba", "dots3_note_audio_encoder", "dots3_note_text", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text",
    "glmasr_encoder", "gpt_neox", "gpt_neox_japanese", "laguna", "litgpt", "mellum",
    "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "moonshine", "moonshine_streaming",
    "musicflamingo", "nemotron", "nemotron3_5_transcribe_asr_audio",
    "nemotron3_5_transcribe_word_timestamp", "nemotron3_diarization_audio", "persimmon", "phi",
    "phi3", "phi4_multimodal", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text",
    "recurrent_gemma", "solar_open", "stablelm", "step3p5", "zaya",
))  # fmt: skip
# Model type -> the RoPE parameters that its class has if a configuration has neither rope_parameters
# nor rope_scaling. Its keys rope_theta and partial_rotary_factor are then ignored.
_HALF = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FILLED: dict[str, Mapping[str, Any]] = {
    "beam": {"sliding_attention": {"rope_theta": 10000.0}},
    "cosmos3_edge_text": {"rope_theta": 100000000.0},
    "moonshine_streaming": {"rope_theta": 10000.0, "partial_rotary_factor": 0.8},
    "nemotron3_5_transcribe_asr_audio": _HALF,
    "nemotron3_5_transcribe_word_timestamp": _HALF,
    "muse_spark_text": {"rope_theta": 500000.0},
}
# Model types, besides `BY_KIND`, whose configurations have RoPE parameters for each kind of layer.
OF_KINDS = frozenset((
    "beam", "cohere_compass_text", "deepseek_v4", "diffusion_gemma_text", "dots3_note_text",
    "embedding_gemma2_text", "gemma4_text", "gemma4_unified_text", "laguna", "lfm3", "mellum",
    "mimo_v2_flash", "neomme", "step3p5", "ultrabert", "zaya",
))  # fmt: skip
# Model types that ignore the key rope_scaling.
UNSCALED = ("cohere2_moe",)
# Model type -> rope type of a configuration -> the rope type that the class makes of it.
RENAMED = {
    "phi3": {"su": "longrope", "yarn": "longrope"},
    "phi4_multimodal": {"su": "longrope", "yarn": "longrope"},
    "qwen2_vl_text": {"mrope": "default"},
    "qwen2_5_vl_text": {"mrope": "default"},
}
