"""Model types of transformers 5.23 whose attention is causal, or attends nearby tokens alone.

A type that is missing here is not causal; it has a window only where `layer_types` of its
configuration or `layer_kinds` gives it one. The table was made from the sources of the models; the
zoo tests compare the mask of every block with that of its model.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxmha.converters.discovery import architectures, layer_kinds

# Prefixes of blocks that attend another sequence.
ACROSS = (
    r"(encoder_attn|cross_attn|cross_attention|crossattention|x_attn|EncDecAttention|second_sub_layer"
    r"|encoder_decoder_attention)[^./]*$|(^|[./])attn2$"
)
# Property -> the model types that have it.
TYPES = {
    name: frozenset(types.split())
    for name, types in {
        # Model types all of whose self-attention is causal, apart from blocks of `_TOWERS`.
        "causal": """
            afmoe aimv2_text_model apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bark
            beam biogpt bitnet bloom blt blt_global_transformer blt_local_decoder
            blt_local_encoder blt_patcher chameleon clip_text_model clipseg_text_model
            clvp_decoder coarse_acoustics codegen cohere cohere2 cohere2_moe cohere_compass_text
            cosmos3_edge_text cosmos3_omni csm csm_depth_decoder_model ctrl cwm dbrx
            decision_transformer deepseek_ocr2_text deepseek_v2 deepseek_v3 deepseek_v32
            deepseek_v4 diffllama doge dots1 dots3_note_text emu3_text_model ernie4_5
            ernie4_5_moe ernie4_5_vl_moe_text evolla exaone4 exaone_moe falcon falcon_h1
            flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text git glm glm4 glm4_moe
            glm4_moe_lite glm4v_moe_text glm4v_text glm_image_text glm_moe_dsa glm_ocr_text gpt2
            gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj gradium_phonon_tts
            granite granite4_vision_text granite_docling_text granite_swa granitemoe
            granitemoe_swa granitemoehybrid granitemoeshared groupvit_text_model helium
            higgs_audio_v2 hrm_text hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hy_v3 hy_v4
            hyperclovax idefics imagegpt inkling2_text inkling_mm_model inkling_text internlm3
            iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 kosmos_2_5_text_model kosmos_2_text_model
            kyutai_speech_to_text laguna lfm2 lfm2_moe lfm3 llama llama4_text longcat_flash
            mellum metaclip_2_text_model mimi mimi_decoder mimi_encoder mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text
            ministral ministral3 mistral mistral4 mistral_large4_text mixtral mllama_text_model
            modernbert-decoder molmo2_text moshi moshi_depth mpt muse_glimmer_text
            muse_spark_text nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe
            openai-gpt opt owlv2_text_model owlvit_text_model paddleocr_vl_text persimmon phi
            phi3 phi4_multimodal phimoe pocket_tts pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen2
            qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3
            qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
            qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_text
            qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text recurrent_gemma seed_oss semantic
            smollm3 solar_open stablelm starcoder2 step3p5 timesfm timesfm2_5 unlimited_ocr_text
            vaultgemma videoprism_text_model voxtral_realtime_encoder voxtral_realtime_text
            xclip_text_model xglm youtu zamba zamba2 zaya
        """,
        # Model types that are causal in blocks whose prefix names a decoder.
        "decoded": """
            bart blip_text_model bigbird_pegasus blenderbot blenderbot-small canary canary_decoder cohere_asr
            dia dia_decoder fsmt informer led longt5 m2m_100 marian mbart moonshine
            moonshine_streaming mt5 musicgen_decoder musicgen_melody_decoder mvp nllb-moe
            pegasus pegasus_x pix2struct_text_model plbart pop2piano pp_formulanet_text
            prophetnet seamless_m4t seamless_m4t_v2 speech_to_text speecht5 switch_transformers
            t5 t5_gemma_module t5gemma2_decoder time_series_transformer trocr udop umt5 whisper
        """,
        # Model types that are causal where their key is_decoder is true.
        "is_decoder": """
            bert bert-generation big_bird bridgetower_text_model camembert
            data2vec-text electra ernie esm megatron-bert rembert roberta roberta-prelayernorm
            roc_bert roformer xlm-roberta xlm-roberta-xl xmod
        """,
        # Model types all of whose layers have a window if their key sliding_window is set.
        "sliding": """
            blt_patcher doge mimi mimi_decoder mimi_encoder minimax ministral ministral3 mistral mixtral openai_privacy_filter phi3
            phi4_multimodal phimoe pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen3_moe starcoder2
            voxtral_realtime_encoder voxtral_realtime_text
        """,
    }.items()
}
# Model type -> the key of its window where it has no sliding_window, and the divisor of the value.
WINDOWS = {
    "gpt_neo": ("window_size", 1),
    "inkling2_text": ("sliding_window_size", 1),
    "inkling_text": ("sliding_window_size", 1),
    "modernbert": ("local_attention", 2),
    "modernbert-decoder": ("local_attention", 2),
    "recurrent_gemma": ("attention_window_size", 1),
}
# Model type -> function from the size of its window to the numbers of keys before and after a
# query, where attention is not causal. In other model types, both numbers are the size.
BOTH_WAYS: dict[str, Callable[[int], tuple[int, int]]] = {
    "gemma3_text": lambda size: (size // 2, size // 2),  # EmbeddingGemma's type
    "gemma4_text": lambda size: (size // 2 + 1, size // 2 + 1),
    "gemma4_unified_text": lambda size: (size // 2 + 1, size // 2 + 1),
    "t5gemma2_text": lambda size: ((size + 1) // 2 - 1, size // 2),
}
# Kind of layers -> why their mask does not follow from a configuration.
OF_KINDS = {
    "reference_sliding_attention": "generated tokens attend the prompt and a window, the prompt is causal",
    "indexed_attention": "an indexer chooses the keys of each query",
    "minimax_m3_sparse": "an indexer chooses the keys of each query",
    "compressed_sparse_attention": "queries attend compressed keys",
    "heavily_compressed_attention": "queries attend compressed keys",
    "linear_attention": "layers of linear_attention have no softmax",
}
# Segmentation models whose queries attend only pixels inside the masks that the previous layer
# predicted: no configuration gives these masks.
_PREDICTED = ("mask2former", "oneformer")
# Model types in which words attend only words of the same phrase, in blocks with prefixes `_OF_WORDS`:
# the mask depends on the text.
_PHRASES = ("grounding-dino", "mm-grounding-dino")
_OF_WORDS = r"text_backbone|text_enhancer"
# Model types whose input begins with an image and a prompt that attend each other; the rest is causal.
_PREFIXED = ("colpali", "paligemma", "pi0")
# Model types whose blocks attend windows of an image; every second block rolls the image first.
ROLLED = frozenset(["clap_audio_model", "clap", "donut-swin", "maskformer-swin", "swin"])
# Prefixes of the blocks of a causal model that are not causal.
_TOWERS = r"(^|[._/])(vision|visual|image|protein|perceiver|resampler)"


def is_causal(model_type: str, prefix: str, own: Mapping[str, Any]) -> bool:
    """True if a query of the block attends no key after it."""
    if own.get("is_causal") is False or own.get("use_bidirectional_attention") in (True, "all"):
        return False
    if model_type in TYPES["causal"]:
        return not re.search(_TOWERS, prefix)
    if model_type in TYPES["decoded"]:
        return re.search(r"decoder", prefix) is not None
    if model_type in ("xlm", "flaubert"):
        return own.get("causal") is True
    return model_type in TYPES["is_decoder"] and own.get("is_decoder") is True


# Keys by which a configuration gives single layers a window.
_PER_LAYER = {"layer_types", "attention_layers", "max_window_layers"}


def ignores_window(own: Mapping[str, Any]) -> bool:
    """True if no layer of a model with these settings has a window by the key sliding_window.

    False for settings of several parts: the key may be that of another model type.
    """
    model_type = own.get("model_type")
    if not isinstance(model_type, str) or model_type not in architectures.KNOWN:
        return False
    if own.get("use_sliding_window") is True or _PER_LAYER & own.keys():
        return False
    if any(key.endswith("_config") and isinstance(x, dict) for key, x in own.items()):
        return False
    by_rule = (
        TYPES["sliding"],
        layer_kinds.EVERY,
        layer_kinds.UNLISTED,
        layer_kinds.SIZES,
        WINDOWS,
    )
    windowed = "window" in architectures.parts(model_type)
    return not (windowed or any(model_type in types for types in by_rule))


def why_unknown(content: Any, model_type: str, prefix: str) -> str | None:
    """The reason why the mask of a block is unknown; None if it can be read.

    `content`: the whole configuration. `model_type`: the model type of the part with the block.
    """
    if model_type in _PREDICTED and re.search(r"decoder\b.*\bcross_attn", prefix):
        return f"{model_type}: queries attend the pixels of the masks that they predicted before"
    outer = content.get("model_type") if isinstance(content, Mapping) else None
    if outer in _PHRASES and re.search(_OF_WORDS, prefix):
        return f"{outer}: words attend those of the same phrase"
    if outer in _PREFIXED and model_type in TYPES["causal"]:
        return f"{outer}: image and prompt attend each other, the rest is causal"
    return None
