"""The kind of attention of each layer of a model, and whether the layer has rotary positions.

Newer configurations list `layer_types`. Older ones, and nested ones that omit the defaults of their
class, have another setting such as `sliding_window_pattern`, or none. For them, this module has the
rules of the configuration classes of transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
_PATTERN, _GLOBAL = "sliding_window_pattern", "global_attn_every_n_layers"


class Every(NamedTuple):
    """One layer in each group of `number` layers attends all tokens: the last, or the `first`.

    `key`: the setting that replaces `number`. `end`: the last layer of the model attends all tokens
    as well.
    """

    number: int
    key: str = ""
    first: bool = False
    end: bool = False


# Model type -> its layers that attend all tokens; its other layers have a window.
EVERY = {
    "afmoe": Every(4, _GLOBAL),
    "beam": Every(6, end=True),
    "cohere2": Every(4, _PATTERN),
    "cwm": Every(4, first=True),
    "exaone4": Every(4, _PATTERN),
    "exaone_moe": Every(4, _PATTERN),
    "gemma2": Every(2, _PATTERN),
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
# Model types of transformers 5 with rules that are not listed here: `by_rule` raises.
UNLISTED = frozenset((
    "cohere2_moe", "diffusion_gemma_text", "dots3_note_text", "embedding_gemma2_text", "flint",
    "gemma4_text", "gemma4_unified_text", "inkling2_text", "inkling_text", "lfm3", "mimo_v2_flash",
    "muse_glimmer_text", "muse_spark_text", "neomme", "ultrabert", "unlimited_ocr_text",
))  # fmt: skip
# Model type -> the size of its window, or of its chunks, where the configuration has no such key.
SIZES = {
    "afmoe": 1024, "beam": 512, "blt_patcher": 512, "cohere2": 4096, "cwm": 8192, "dots1": 4096,
    "exaone4": 4096, "exaone_moe": 4096, "gemma2": 4096, "gemma3_text": 4096, "gemma3n_text": 512,
    "gpt_oss": 128, "granite_swa": 128, "granitemoe_swa": 128, "kolibri1": 513,
    "llama4_text": 8192, "mimi": 250, "mimi_decoder": 250, "mimi_encoder": 250, "ministral": 4096,
    "mistral": 4096, "modernbert": 128, "modernbert-decoder": 128, "olmo3": 4096,
    "t5_gemma_module": 4096, "t5gemma2_decoder": 4096, "t5gemma2_text": 4096, "vaultgemma": 4096,
}  # fmt: skip
# Model types in which one of no_rope_layer_interval layers (4 by default) has no rotary positions,
# unless no_rope_layers is set.
_INTERVAL = frozenset(["llama4_text", "mistral_large4_text", "smollm3"])
# Model types whose layers of full attention have no rotary positions.
_LOCAL = frozenset(
    ["afmoe", "beam", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"]
)
# Model types whose layers have no rotary positions if layer_rope_theta is 0 for them; without this
# key, `rotated` raises.
_LISTED_BASES = frozenset(["muse_glimmer_text", "muse_spark_text"])


def listed(own: Mapping[str, Any], layer: int | None) -> str | None:
    """The kind of a layer that a configuration lists; None if it lists none."""
    for key in ("layer_types", "attention_layers"):
        kinds = own.get(key)
        if isinstance(kinds, list) and layer is not None and layer < len(kinds):
            return str(kinds[layer])
    return None


def of(own: Mapping[str, Any], model_type: str, layer: int | None) -> str:
    """The kind of a layer, in the words of `layer_types`; "" if all layers are of one kind.

    Raises:
      ValueError: the configuration does not determine the kind.
    """
    found = listed(own, layer)
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


def window(own: Mapping[str, Any], model_type: str) -> Any:
    """`sliding_window` of a configuration, or the default of its class; None: it has no window."""
    return own.get("sliding_window", SIZES.get(model_type))


def rotated(own: Mapping[str, Any], model_type: str, layer: int | None) -> bool:
    """False if the configuration excludes a layer from rotary positions.

    Raises:
      ValueError: the configuration does not determine it.
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
