"""The kind of attention of each layer of a model, and whether the layer has rotary positions.

Newer configurations list `layer_types`. Older ones, and nested ones that omit the defaults of their
class, have another setting such as `sliding_window_pattern`, or none. For them, this module has the
rules of the configuration classes of transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxmha.converters.discovery import architectures

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
_PATTERN, _GLOBAL = "sliding_window_pattern", "global_attn_every_n_layers"


class Every(NamedTuple):
    """One layer in each group of `number` layers attends all tokens: the last, or the `first`.

    `key`: the setting that replaces `number`. `end`: the last layer of the model attends all tokens
    as well. `optional`: all layers attend all tokens if the window is null; without `optional`, such
    a model cannot run.
    """

    number: int
    key: str = ""
    first: bool = False
    end: bool = False
    optional: bool = False


# Model type -> its layers that attend all tokens; its other layers have a window.
EVERY = {
    "afmoe": Every(4, _GLOBAL),
    "beam": Every(6, end=True),
    "cohere2": Every(4, _PATTERN),
    "cwm": Every(4, first=True),
    "exaone4": Every(4, _PATTERN, optional=True),
    "exaone_moe": Every(4, _PATTERN),
    "gemma2": Every(2),
    "gemma3_text": Every(6, _PATTERN),
    "gemma3n_text": Every(5),
    "gpt_oss": Every(2),
    "granite_swa": Every(4, first=True),
    "granitemoe_swa": Every(4, first=True),
    "kolibri1": Every(5),
    "modernbert": Every(3, _GLOBAL, first=True),
    "modernbert-decoder": Every(3, _GLOBAL, first=True),
    "olmo3": Every(4),
    "t5_gemma_module": Every(2),
    "t5gemma2_decoder": Every(6, _PATTERN),
    "t5gemma2_text": Every(6, _PATTERN),
    "vaultgemma": Every(2),
}
# Model types of transformers 5 with rules that are not listed here: `by_rule` raises. In some of them,
# an indexer chooses keys.
UNLISTED = frozenset((
    "axk2", "deepseek_v32", "deepseek_v4", "glm5_next_text", "glm_moe_dsa", "hy_v4",
    "mistral_large4_text", "qwen4_exp_text",
    "cohere2_moe", "diffusion_gemma_text", "dots3_note_text", "embedding_gemma2_text", "flint",
    "gemma4_text", "gemma4_unified_text", "inkling2_text", "inkling_text", "lfm3", "mimo_v2_flash",
    "muse_glimmer_assistant", "muse_glimmer_text", "muse_spark_text", "neomme", "ultrabert", "unlimited_ocr_text",
))  # fmt: skip
# Model type -> the size of its window, or of its chunks, where the configuration has no such key.
SIZES = {
    "afmoe": 1024, "beam": 512, "blt_patcher": 512, "cohere2": 4096, "cohere2_moe": 4096,
    "cwm": 8192, "diffusion_gemma_text": 512, "dots1": 4096, "dots3_note_text": 512,
    "embedding_gemma2_text": 512, "exaone4": 4096, "exaone_moe": 4096, "flint": 513, "gemma2": 4096,
    "gemma3_text": 4096, "gemma3n_text": 512, "gemma4_text": 512, "gemma4_unified_text": 1024,
    "gpt_oss": 128, "granite_swa": 128, "granitemoe_swa": 128, "inkling2_text": 1024,
    "inkling_text": 512, "kolibri1": 513, "lfm3": 256,
    "llama4_text": 8192, "mimi": 250, "mimi_decoder": 250, "mimi_encoder": 250,
    "mimo_v2_flash": 129, "ministral": 4096, "mistral": 4096, "modernbert": 128,
    "modernbert-decoder": 128, "muse_glimmer_assistant": 2048, "muse_glimmer_text": 2048,
    "muse_spark_text": 2048, "neomme": 256, "olmo3": 4096, "openai_privacy_filter": 128,
    "pocket_tts_audio_tokenizer": 250, "pocket_tts_audio_tokenizer_decoder": 250,
    "pocket_tts_audio_tokenizer_encoder": 250, "t5_gemma_module": 4096, "t5gemma2_decoder": 4096,
    "t5gemma2_text": 4096, "ultrabert": 128, "vaultgemma": 4096, "voxtral_realtime_encoder": 750,
    "voxtral_realtime_text": 4096,
}  # fmt: skip
# Model type -> the size of its window where the configuration has no sliding_window, for model types
# that have windows only if use_sliding_window is true. All other types, apart from SmolLM3, ignore
# use_sliding_window.
SWITCHED = {
    "deepseek_ocr2_encoder": 4096, "qwen2": 4096, "qwen2_5_omni_talker": 32768,
    "qwen2_5_omni_text": 32768, "qwen2_5_vl_text": 4096, "qwen2_moe": 4096, "qwen2_vl_text": 4096,
    "qwen3": 4096, "qwen3_moe": 4096,
}  # fmt: skip
# Model types whose layers have a window from layer max_window_layers on; all others ignore this key.
AFTER = frozenset((
    "deepseek_ocr2_encoder", "dots1", "qwen2", "qwen2_5_omni_talker", "qwen2_5_omni_text",
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_omni_moe_talker_code_predictor",
))  # fmt: skip
# Model types whose masks or rotations follow `layer_types`; all others ignore this key.
LISTING = frozenset((
    "afmoe", "axk2", "bailing_hybrid", "beam", "cohere2", "cohere2_moe", "cohere_compass_text",
    "cwm", "deepseek_ocr2_encoder", "deepseek_v32", "deepseek_v4", "diffusion_gemma_text", "dots1",
    "dots3_note_text", "embedding_gemma2_text", "exaone4", "exaone_moe", "flint", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm5_next_text",
    "glm_moe_dsa", "gpt_oss", "granite_swa", "granitemoe_swa", "granitemoehybrid", "hy_v4",
    "inkling2_text", "inkling_text", "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm2_moe",
    "lfm3", "lfm3_vl_vision", "llama4_text", "mellum", "mimo_v2_flash", "minimax_m3_vl_text",
    "ministral", "mistral_large4_text", "modernbert", "modernbert-decoder",
    "muse_glimmer_assistant", "muse_glimmer_text", "muse_glimmer_vision", "muse_spark_text",
    "muse_spark_vision", "neomme", "olmo3", "olmo_hybrid",
    "qwen2", "qwen2_5_omni_talker", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe",
    "qwen2_vl_text", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "qwen3_omni_moe_talker_code_predictor", "qwen4_exp_text", "smollm3", "step3p5",
    "t5_gemma_module", "t5gemma2_decoder", "t5gemma2_text", "ultrabert", "unlimited_ocr_text",
    "vaultgemma", "zaya",
))  # fmt: skip
# Model types whose older lists have full_attention for layers in which an indexer chooses the keys:
# `listed` returns indexed_attention for these layers, as newer lists have it.
_INDEXED = frozenset(["dots3_note_text", "glm5_next_text"])
# Model types in which one of no_rope_layer_interval layers (4 by default) has no rotary positions,
# unless no_rope_layers is set.
_INTERVAL = frozenset(["llama4_text", "mistral_large4_text", "smollm3"])
# Model types whose layers of full attention have no rotary positions, if the model has a window.
_LOCAL = frozenset(
    ["afmoe", "beam", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"]
)
# Model types whose layers have no rotary positions if layer_rope_theta is 0 for them; without this
# key, `rotated` raises.
_LISTED_BASES = frozenset(["muse_glimmer_text", "muse_spark_text"])


def listed(own: Mapping[str, Any], model_type: str, layer: int | None) -> str | None:
    """The kind of a layer in the list of a configuration; None if there is none for this layer."""
    if model_type == "gpt_neo":
        kinds: Any = _of_gpt_neo(own)
    else:
        kinds = None if ignores_list(model_type) else own.get("layer_types")
    if isinstance(kinds, list) and layer is not None and layer < len(kinds):
        kind = str(kinds[layer])
        return "indexed_attention" if model_type in _INDEXED and kind == FULL else kind
    return None


def ignores_list(model_type: object) -> bool:
    """True if the class of a model type is known to ignore the key layer_types."""
    return model_type in architectures.KNOWN and model_type not in LISTING


def _of_gpt_neo(own: Mapping[str, Any]) -> list[str]:
    """The kinds of the layers of GPT-Neo: `attention_types` lists pairs of kinds and their number."""
    given = own.get("attention_types") or [[["global", "local"], 12]]
    return [kind for kinds, number in given for kind in kinds * number]


def of(own: Mapping[str, Any], model_type: str, layer: int | None) -> str:
    """The kind of a layer, in the words of `layer_types`; "" if all layers are of one kind.

    Raises:
      ValueError: the configuration does not determine the kind.
    """
    found = listed(own, model_type, layer)
    return by_rule(own, model_type, layer) if found is None else found


def by_rule(own: Mapping[str, Any], model_type: str, layer: int | None) -> str:
    """The kind of a layer by the rule of its model type; returns and raises as `of`."""
    if model_type in UNLISTED:
        raise ValueError("layer_types of the configuration are missing, or too few")
    if layer is None:
        return ""
    if model_type == "llama4_text":
        return CHUNKED if rotated(own, model_type, layer) else FULL
    if model_type == "smollm3" and own.get("use_sliding_window") is True:
        return FULL if rotated(own, model_type, layer) else SLIDING
    if model_type == "qwen2_moe" and own.get("use_sliding_window") is True:
        last = own.get("max_window_layers", 28)
        return SLIDING if layer % 2 == 0 and layer < last else FULL
    if (every := EVERY.get(model_type)) is None:
        return ""
    stated = own.get(every.key)
    number = stated if type(stated) is int and stated > 0 else every.number
    whole = (layer if every.first else layer + 1) % number == 0
    return FULL if whole or (every.end and layer + 1 == own.get("num_hidden_layers")) else SLIDING


def switched_off(own: Mapping[str, Any], model_type: str) -> bool:
    """True if a model type has windows only by use_sliding_window, and this is not set."""
    return model_type in SWITCHED and not own.get("use_sliding_window")


def window(own: Mapping[str, Any], model_type: str) -> Any:
    """`sliding_window` of a configuration, or the default of its class; None: it has no window."""
    return own.get("sliding_window", default_window(own, model_type))


def default_window(own: Mapping[str, Any], model_type: str) -> int | None:
    """The size of windows, or of chunks, by the class of a configuration; None: it has none."""
    if model_type in SWITCHED and not switched_off(own, model_type):
        return SWITCHED[model_type]
    return SIZES.get(model_type)


def rotated(own: Mapping[str, Any], model_type: str, layer: int | None) -> bool:
    """False if the configuration excludes a layer from rotary positions.

    Raises:
      ValueError: the configuration does not determine whether the layer is rotated.
    """
    if layer is None:
        return True
    if model_type in _LOCAL and window(own, model_type):
        return of(own, model_type, layer) != FULL
    key = "no_rope_layers" if own.get("no_rope_layers") else "layer_rope_theta"
    rows = own.get(key)
    if not rows and model_type in _INTERVAL:
        number = own.get("no_rope_layer_interval", 4)
        if type(number) is not int or number < 1:
            raise ValueError(f"no_rope_layer_interval must be a positive integer, got {number!r}")
        return (layer + 1) % number != 0
    if not isinstance(rows, list):
        if model_type in _LISTED_BASES:
            raise ValueError("layer_rope_theta of the configuration is missing")
        return True
    if layer >= len(rows):
        raise ValueError(f"{key} has {len(rows)} layers, and no layer {layer}")
    return bool(rows[layer])
