"""Reads the semantics of attention blocks from configurations of other libraries than transformers."""

from collections.abc import Callable, Mapping
from typing import Any

Values = dict[str, Any]
Reader = Callable[[Mapping[str, Any]], Values]


def of_litgpt(own: Mapping[str, Any]) -> Values:
    """Reads the settings of litgpt, with the keys into which `other_configs` translates them."""
    scalar, cap = own["query_pre_attn_scalar"], own["attn_logit_softcapping"]
    found: Values = {"scale": None if scalar is None else float(scalar) ** -0.5}
    found["logits_soft_cap"] = None if cap is None else float(cap)
    if own["use_qk_norm"]:
        found |= {
            "qk_norm": "rms" if own["norm_class_name"] == "RMSNorm" else "layer",
            "qk_norm_epsilon": float(own["norm_eps"]),
            "qk_norm_scope": "heads" if own["norm_qk_type"] == "olmo2" else "head",
            "qk_norm_offset": float(bool(own["norm_offset"])),
        }
    return found


# Class of diffusers -> its norms of queries and keys, which only the code of the class determines.
_OF_CLASSES: dict[str, Values] = {
    "CogVideoXTransformer3DModel": {"qk_norm": "layer", "qk_norm_epsilon": 1e-6},
    "HunyuanDiT2DModel": {"qk_norm": "layer", "qk_norm_epsilon": 1e-6},
    "LTXVideoTransformer3DModel": {
        "qk_norm": "rms", "qk_norm_scope": "heads", "qk_norm_epsilon": 1e-5},
    "CogView3PlusTransformer2DModel": {
        "qk_norm": "layer", "qk_norm_epsilon": 1e-6, "qk_norm_learned": False,
    },
    "AuraFlowTransformer2DModel": {
        "qk_norm": "layer", "qk_norm_epsilon": 1e-5, "qk_norm_learned": False,
    },
}  # fmt: skip


def _of_diffusers(own: Mapping[str, Any]) -> Values:
    return _OF_CLASSES[own["_class_name"]]


def _of_wan(own: Mapping[str, Any]) -> Values:
    return {"qk_norm": "rms", "qk_norm_scope": "heads", "qk_norm_epsilon": float(own["eps"])}


# Model types, or classes of diffusers, and their readers; see `behaviour_readers.READERS`.
READERS: tuple[tuple[str, Reader], ...] = (
    ("litgpt", of_litgpt),
    (" ".join(_OF_CLASSES), _of_diffusers),
    ("WanTransformer3DModel", _of_wan),
)
