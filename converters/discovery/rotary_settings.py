"""RoPE parameters of a layer, from a configuration of any version of transformers.

Where a key is missing, the defaults of the configuration classes of transformers 5.23 hold.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxmha.converters.discovery import layer_kinds

# Keys of a configuration that hold the share of rotated features in a head.
_SHARES = ("partial_rotary_factor", "rotary_pct")
_BASES = ("rope_theta", "rotary_emb_base", "default_theta")


class Bases(NamedTuple):
    """The keys and defaults of the bases of full and of sliding attention.

    `scaled`: `rope_scaling` applies to sliding attention as well.
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
    "olmo3": Bases("rope_theta", 5e5, "rope_theta", 5e5),
}
# Base -> the model types whose class has it by default; all others have 10000 by default.
BASES = {
    100.0: "eomt_dinov3",
    1000.0: "nomic_bert",
    20000.0: "jina_embeddings_v3 pe_audio_encoder pe_audio_video_encoder pe_video_encoder",
    100000.0: "helium",
    160000.0: "gte",
    500000.0: (
        "bitnet blt blt_global_transformer blt_local_decoder blt_local_encoder cohere csm "
        "csm_depth_decoder_model ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text evolla flex_olmo "
        "llama4_text mllama_text_model muse_glimmer_assistant muse_spark_text paddleocr_vl_text "
        "qwen3_vl_moe_text qwen3_vl_text"
    ),
    1000000.0: (
        "emu3_text_model lfm2 lfm2_moe lfm3_vl_vision minimax mixtral phimoe qwen2_5_omni_talker "
        "qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text qwen3_omni_moe_text solar_open"
    ),
    2000000.0: "smollm3",
    5000000.0: "minimax_m2 minimax_m3_vl_text",
    6000000.0: "bailing_hybrid",
    10000000.0: "longcat_flash",
    11158840.0: "hy_v3",
    100000000.0: "cosmos3_edge_text",
}
# Share -> the model types whose class rotates that share of a head by default; others rotate all of it.
SHARES = {
    0.25: "gpt_neox qwen3_5_moe_text qwen3_5_text qwen3_next stablelm",
    0.5: (
        "bamba dots3_note_audio_encoder glm glm4 glm4_moe glm4v_moe_text glmasr_encoder nemotron "
        "nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp persimmon phi "
        "recurrent_gemma"
    ),
    0.8: "moonshine_streaming",
    0.9: "moonshine",
}
# Model types whose classes scale positions by default, all alike or by kind of layer: `of` raises
# if their configuration has no RoPE parameters.
NEEDED = frozenset((
    "apertus", "cwm", "diffusion_gemma_text", "dots3_note_text", "embedding_gemma2_text",
    "gemma4_text", "gemma4_unified_text", "gemma4_vision", "gpt_oss", "higgs_audio_v2", "laguna",
    "lfm3", "mellum", "mimo_v2_flash", "minimax_m3_vl_vision", "ministral3", "mistral4",
    "mistral_large4_text", "mlcd_vision_model", "musicflamingo", "neomme", "openai_privacy_filter",
    "step3p5", "step3p5_vision", "ultrabert", "zaya",
))  # fmt: skip
# Model types whose list layer_rope_theta holds the base of each layer.
_BASE_OF_LAYER = ("granite_swa", "granitemoe_swa")


def of(own: Mapping[str, Any], model_type: str, layer: int | None) -> dict[str, Any]:
    """The RoPE parameters of a layer of a model type.

    Raises:
      TypeError: the configuration has them as another type than an object.
      ValueError: the configuration does not determine them.
    """
    given: Any = own.get("rope_parameters") or own.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise TypeError(f"rope_parameters or rope_scaling is no object: {str(given)[:40]}")
    if not given and model_type in NEEDED:
        raise ValueError("rope_parameters of the configuration are missing")
    nested, base = any(isinstance(x, Mapping) for x in given.values()), _base(own, model_type)
    rule = BY_KIND.get(model_type)
    if rule is not None or nested:
        kind = layer_kinds.of(own, model_type, layer)
        if nested:
            given = _of_kind(given, kind)
        if rule is not None:
            sliding = kind == layer_kinds.SLIDING
            if sliding and not nested and not rule.scaled:
                given = {}
            base = own.get(rule.full) or rule.full_default
            if sliding:  # None: the base of full attention
                base = own.get(rule.sliding, rule.sliding_default) or base
    found = {"rope_theta": base} | {k: v for k, v in given.items() if v is not None}
    rows = own.get("layer_rope_theta") if model_type in _BASE_OF_LAYER else None
    if isinstance(rows, list) and layer is not None and layer < len(rows):
        found["rope_theta"] = rows[layer]
    if "original_max_position_embeddings" not in found:
        before = own.get("original_max_position_embeddings") or own.get("max_position_embeddings")
        found["original_max_position_embeddings"] = before
    return found


def _of_kind(given: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The parameters of a kind of layer; of a model that lists no kinds, those of full attention."""
    if not kind and layer_kinds.FULL not in given and len(given) > 1:
        raise ValueError("layer_types of the configuration are missing")
    found = given.get(
        kind or (layer_kinds.FULL if layer_kinds.FULL in given else next(iter(given)))
    )
    return found if isinstance(found, Mapping) else {}


def _base(own: Mapping[str, Any], model_type: str) -> Any:
    """The base of all layers; DBRX has it in attn_config."""
    nested = own.get("attn_config")
    for part in (own, nested if isinstance(nested, Mapping) else {}):
        for key in _BASES:
            if part.get(key):
                return part[key]
    return next((base for base, types in BASES.items() if model_type in types.split()), 10000.0)


def share(own: Mapping[str, Any], rope: Mapping[str, Any], model_type: str) -> float:
    """The share of the features of a head that is rotated, given the RoPE parameters of its layer."""
    for part in (rope, own):
        for key in _SHARES:
            if part.get(key) is not None:
                return float(part[key])
    return next((part for part, types in SHARES.items() if model_type in types.split()), 1.0)
