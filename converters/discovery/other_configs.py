"""Translates configurations of diffusers, litgpt and timm into the keys of transformers.

Sources: `UNet2DConditionModel.__init__` of diffusers 0.42; `Config`, `CausalSelfAttention` and
`build_rope_cache` of litgpt 0.5.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Classes of diffusers whose head count, or list with one per stage, is `num_attention_heads`, or else
# `attention_head_dim`, which is no width in them.
COUNTED = frozenset((
    "ControlNetModel", "UNet2DConditionModel", "UNetMotionModel", "UNetSpatioTemporalConditionModel",
))  # fmt: skip
# Classes whose `attention_head_dim` is the width of a head, in stages of different widths: the head
# count of each stage follows.
_WIDE = frozenset(("I2VGenXLUNet", "UNet2DModel", "UNet3DConditionModel"))
# Class -> pairs of a prefix pattern and a head count that no configuration changes.
_FIXED = {
    "UNet3DConditionModel": ((r"^transformer_in", 8),),
    "I2VGenXLUNet": ((r"^transformer_in", 8), (r"^image_latents_temporal_encoder", 2)),
}
_MOTION = "motion_num_attention_heads"  # head count of layers over frames
# Classes whose attention has one head, as wide as the block.
_SINGLE = frozenset(["AutoencoderKL", "AutoencoderKLTemporalDecoder", "VQModel"])
# Class -> pairs of a prefix pattern and the key of its head count.
_ROWS = {
    "SanaTransformer2DModel": (
        (r"attn1", "num_attention_heads"), (r"attn2", "num_cross_attention_heads"),
    ),
}  # fmt: skip
_HEADS, _WIDTH, _CHANNELS = "num_attention_heads", "attention_head_dim", "block_out_channels"
# Architectures of timm whose queries and keys are rotated.
_ROTATED = re.compile(
    r"eva02(?!_enormous)|_rope(_|$)|dinov3|(deepseek|qwen3|gemma4)_vit|vit_pe_|sapiens2|lingbot"
)
# Architectures of timm whose pool has a head count of its own.
_POOLED = r"vit_pe_core_"
# Key of litgpt -> key of transformers.
_LITGPT = {
    "n_head": _HEADS,
    "n_query_groups": "num_key_value_heads",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "head_size": "head_dim",
    "block_size": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
}


def translated(content: Any) -> Any:
    """Returns the content of a configuration with the keys of transformers.

    >>> translated({"_class_name": "UNet2DConditionModel", "attention_head_dim": 8})["num_attention_heads"]
    8
    """
    if not isinstance(content, Mapping):
        return content
    if isinstance(content.get("_class_name"), str):
        return _diffusers(dict(content))
    if {"n_query_groups", "rotary_percentage", "norm_class_name"} <= content.keys():
        return _litgpt(content)
    if "pretrained_cfg" in content and _ROTATED.search(str(content.get("architecture"))):
        own = content.get("model_args")
        own = {**(own if isinstance(own, Mapping) else {}), "architecture": content["architecture"]}
        return {"model_type": "timm_rotated", **content, "model_args": own}
    return content


def _diffusers(content: dict[str, Any]) -> dict[str, Any]:
    """Sets the model type to the class, and moves head counts to the key of transformers."""
    kind = content["_class_name"]
    content.setdefault("model_type", kind)
    if kind in COUNTED:
        counts = content.pop(_WIDTH, None)
        if content.get(_HEADS) is None:
            content[_HEADS] = counts
    if kind in _WIDE or content.get(f"reverse_{_MOTION}") is not None:
        content.pop(_HEADS, None)
    return content


def _litgpt(content: Mapping[str, Any]) -> dict[str, Any]:
    found = {new: content[old] for old, new in _LITGPT.items() if content.get(old) is not None}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": content.get("rope_base", 10000)}
    scaling = content.get("rope_adjustments")
    if isinstance(scaling, Mapping):
        kind = "llama3" if "low_freq_factor" in scaling else "linear"
        if {"beta_fast", "beta_slow"} & scaling.keys():
            kind = "yarn of litgpt"
        rope |= {"rope_type": kind, **scaling}
        rope["original_max_position_embeddings"] = scaling.get("original_max_seq_len")
    if content.get("rope_condense_ratio", 1) != 1:
        rope |= {"rope_type": "linear", "factor": content["rope_condense_ratio"]}
    heads, width = content.get("n_head"), content.get("n_embd")
    if "head_dim" not in found and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        found["head_dim"] = width // heads
    windows = content.get("sliding_window_indices")
    if content.get("sliding_window_size"):
        found["sliding_window"] = content["sliding_window_size"]
    return {
        **found,
        "model_type": "litgpt",
        "rope_parameters": rope,
        "rope_interleave": bool(content.get("rope_interleave")),
        "rope_local_base": content.get("rope_local_base_freq"),
        "partial_rotary_factor": content.get("rotary_percentage", 1.0),
        "query_pre_attn_scalar": content.get("attention_scores_scalar"),
        "attn_logit_softcapping": content.get("attention_logit_softcapping"),
        "use_qk_norm": bool(content.get("norm_qk")),
        "norm_qk_type": content.get("norm_qk_type", "default"),
        "norm_class_name": content["norm_class_name"],
        "norm_eps": content.get("norm_eps", 1e-5),
        "norm_offset": "Gemma" in str(content.get("name", "")),
        **({"layer_windows": windows} if isinstance(windows, list) else {}),
    }


def rows(content: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yields prefix pattern, keys and head count of blocks, for models with several counts."""
    kind = content.get("_class_name")
    if re.match(_POOLED, str(content.get("architecture"))):
        own = content.get("model_args")
        own = own if isinstance(own, Mapping) else {}
        yield (
            r"attn_pool$",
            ("model_args", "attn_pool_num_heads"),
            own.get("attn_pool_num_heads", 8),
        )
        if "num_heads" in own:
            yield r"blocks\.\d+\.attn$", ("model_args", "num_heads"), own["num_heads"]
    if kind in _SINGLE:
        yield r"", ("_class_name",), 1
    for pattern, key in _ROWS.get(str(kind), ()):
        yield pattern, (key,), content.get(key)
    for pattern, count in _FIXED.get(str(kind), ()):
        yield pattern, ("_class_name",), count
    counts, key = content.get(_HEADS), _HEADS
    if kind in _WIDE:
        width, channels = content.get(_WIDTH), content.get(_CHANNELS)
        widths = width if isinstance(width, list) else [width] * len(channels or ())
        if not isinstance(channels, list) or len(widths) != len(channels):
            return
        if not all(type(n) is int and n > 0 for n in (*channels, *widths)):
            return
        counts = [max(n // w, 1) for n, w in zip(channels, widths, strict=True)]
        key = _WIDTH
    if kind == "UNetMotionModel" and counts is not None:
        yield from _stages(content.get(_MOTION, 8), _MOTION, r"(.*\.)?motion_modules\.")
    if kind in COUNTED | _WIDE and isinstance(counts, list):
        yield from _stages(counts, key)
    elif kind == "UNetMotionModel":
        yield r"", (key,), counts


def _stages(
    counts: object, key: str, inside: str = ""
) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yields (prefix pattern, keys, head count) for one head count, or for a list with one per stage.

    `inside`: pattern of the blocks' prefixes inside a stage.
    """
    if not isinstance(counts, list):
        yield rf"^{inside}", (key,), counts
        return
    for i, count in enumerate(counts):
        yield rf"^down_blocks\.{i}\.{inside}", (key,), count
        yield rf"^up_blocks\.{len(counts) - 1 - i}\.{inside}", (key,), count
    if counts:
        yield rf"^mid_block\.{inside}", (key,), counts[-1]
