"""Reads the semantics of attention blocks from configurations of transformers, by model type."""

from collections.abc import Mapping
from typing import Any

from jaxmha.converters.discovery import disentangled, layer_kinds, other_behaviours
from jaxmha.converters.discovery.other_behaviours import Reader, Values

# Key under which readers find the index of the layer, next to the keys of a configuration.
LAYER = "(layer)"


def _multiplied(own: Mapping[str, Any]) -> Values:
    return {"scale": float(own["attention_multiplier"])}


def _scaled(own: Mapping[str, Any]) -> Values:
    return {"scale": float(own["query_pre_attn_scalar"]) ** -0.5}


def _capped(own: Mapping[str, Any]) -> Values:
    return _scaled(own) | _only_capped(own)


def _normalised(own: Mapping[str, Any]) -> Values:
    return {"qk_norm": "rms", "qk_norm_epsilon": float(own["rms_norm_eps"])}


def _clipped(own: Mapping[str, Any]) -> Values:
    nested = own.get("attn_config")
    clip = (nested if isinstance(nested, dict) else own).get("clip_qkv")
    return {"clip_qkv": None if clip is None else float(clip)}


def _of_mpt(own: Mapping[str, Any]) -> Values:
    nested = own.get("attn_config")
    scale = nested.get("softmax_scale") if isinstance(nested, dict) else None
    return _clipped(own) | {"scale": None if scale is None else float(scale)}


def _normalised_and_clipped(own: Mapping[str, Any]) -> Values:
    return _normalised(own) | _clipped(own)


def _with_norm_eps(own: Mapping[str, Any]) -> Values:
    return {"qk_norm": "rms", "qk_norm_epsilon": float(own["norm_eps"])}


def _offset(own: Mapping[str, Any]) -> Values:
    return _normalised(own) | {"qk_norm_offset": 1.0}


def _offset_and_scaled(own: Mapping[str, Any]) -> Values:
    """No soft cap: these classes have `attn_logit_softcapping` in their settings, and ignore it."""
    return _scaled(own) | _offset(own)


def _unlearned(own: Mapping[str, Any]) -> Values:
    """Norms without learned scales. They commute with the rotation, so their order is arbitrary."""
    return _normalised(own) | {"qk_norm_learned": False}


def _unlearned_and_scaled(own: Mapping[str, Any]) -> Values:
    """Norms as in `_unlearned`, and the usual scale multiplied by `qk_scale_factor`."""
    scale = float(own["qk_scale_factor"]) * float(own["head_dim"]) ** -0.5
    return _unlearned(own) | {"scale": scale}


def _normalised_if_set(own: Mapping[str, Any]) -> Values:
    return _normalised(own) if own["use_qk_norm"] else {}


def _unlearned_where_rotated(own: Mapping[str, Any]) -> Values:
    """Norms as in `_unlearned`, but only in layers with rotary positions."""
    rotated = layer_kinds.rotated(own, "llama4_text", own[LAYER])
    if not own["use_qk_norm"] or not rotated:
        return {"qk_norm": None}
    return _unlearned(own)


def _only_capped(own: Mapping[str, Any]) -> Values:
    cap = own["attn_logit_softcapping"]
    return {"logits_soft_cap": None if cap is None else float(cap)}


def _of_layer_norms(own: Mapping[str, Any]) -> Values:
    key = "norm_eps" if "layer_norm_eps" not in own else "layer_norm_eps"
    return {"qk_norm": "layer", "qk_norm_epsilon": float(own[key])}


def _torch_norms(own: Mapping[str, Any]) -> Values:
    """Layer norms with torch's default epsilon, for which these model types have no setting."""
    return {"qk_norm": "layer", "qk_norm_epsilon": 1e-5}


def _unscaled(own: Mapping[str, Any]) -> Values:
    return {"scale": 1.0}


def _of_half(own: Mapping[str, Any]) -> Values:
    width = own.get("attention_head_dim")
    if not width:
        width = 2 * int(own["hidden_size"]) // int(own["num_attention_heads"])
    return {"scale": (float(width) / 2) ** -0.5}


def _of_gpt2(own: Mapping[str, Any]) -> Values:
    """The scale of GPT-2: by default the usual one, which needs no semantics."""
    usual = own.get("scale_attn_weights", True)
    by_layer = own.get("scale_attn_by_inverse_layer_idx", False)
    if usual and not by_layer:
        return {}
    features = own.get("n_embd") or own["hidden_size"]
    heads = own.get("n_head") or own["num_attention_heads"]
    scale = (int(features) // int(heads)) ** -0.5 if usual else 1.0
    return {"scale": scale / (own[LAYER] + 1 if by_layer else 1)}


def _disentangled(own: Mapping[str, Any]) -> Values:
    """The scale of DeBERTa: it divides by the root of head width times number of logit terms."""
    terms = 1 + len(disentangled.kinds(own))
    if terms == 1:
        return {"scale": None}
    width = int(own["hidden_size"]) // int(own["num_attention_heads"])
    return {"scale": (width * terms) ** -0.5}


# Model types, and the function that reads the semantics of their blocks from a configuration. The
# zoo tests compare each with the model's own output.
READERS: tuple[tuple[str, Reader], ...] = (
    (
        (
            "granite granitemoe granitemoeshared granite_docling_text hyperclovax granite_swa "
            "granitemoe_swa granitemoehybrid granite4_vision_text"
        ),
        _multiplied,
    ),
    ("gpt_neo dia_encoder dia_decoder", _unscaled),
    ("zamba zamba2", _of_half),
    ("gemma2 vaultgemma t5_gemma_module", _capped),
    ("olmo dbrx", _clipped),
    ("mpt", _of_mpt),
    ("gpt2 imagegpt decision_transformer gpt_bigcode", _of_gpt2),
    ("olmoe", _normalised_and_clipped),
    (
        (
            "qwen3 qwen3_moe qwen3_vl_text qwen3_vl_moe_text exaone4 exaone_moe apertus hy_v3 "
            "kolibri1 mellum pe_audio_encoder dots1 flint afmoe beam olmo2 olmo3 flex_olmo "
            "olmo_hybrid minimax_m2 exaone4_5_text glm_ocr_vision glm5_next_vision "
            "qwen3_omni_moe_text qwen3_omni_moe_talker_text molmo2_text "
            "dots3_note_vision_encoder"
        ),
        _normalised,
    ),
    ("lfm2 lfm2_moe lfm3 lfm3_vl_vision", _with_norm_eps),
    (
        "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text minimax_m3_vl_text",
        _offset,
    ),
    ("gemma3 gemma3_text t5gemma2_text", _offset_and_scaled),
    ("nanochat", _unlearned),
    ("muse_glimmer_text", _unlearned_and_scaled),
    ("sapiens2", _normalised_if_set),
    ("llama4_text", _unlearned_where_rotated),
    ("videoprism_vision_model videoprism_text_model", _only_capped),
    ("persimmon fuyu", _of_layer_norms),
    ("chameleon esmc", _torch_norms),
    ("nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp", _torch_norms),
    ("deberta deberta-v2 sew-d", _disentangled),
    *other_behaviours.READERS,
)


# Functions that read every setting of `hf_config.BEHAVIOUR` that their model types have, so that
# `refuse_unread` lets these settings pass.
OF_SETTINGS = (
    _multiplied,
    _capped,
    _offset_and_scaled,
    _clipped,
    _of_mpt,
    _of_gpt2,
    _normalised_and_clipped,
    _normalised_if_set,
    _unlearned_where_rotated,
    _only_capped,
    other_behaviours.of_litgpt,
)


def reader_of(model_type: str) -> Reader | None:
    """The function that reads the behaviour of a model type from its configuration.

    >>> reader_of("qwen3") is not None, reader_of("bert") is None
    (True, True)
    """
    return next((found for types, found in READERS if model_type in types.split()), None)
