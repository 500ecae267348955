"""Behaviour of latent attention from a model's configuration."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from jaxmha import Semantics, rope, rope_frequencies
from jaxmha.converters.discovery import architectures, query_scale
from jaxmha.integers import FAR
from jaxmha.latent.rotation import LatentRotate, ScaledQueries
from jaxmha.rotary_frequencies import parameters_of
from jaxmha.static_checks import number

# Model type -> whether it rotates pairs of neighbouring features; None: by `rope_interleave`.
_INTERLEAVED: dict[str, bool | None] = {
    "axk1": None,
    "deepseek_v2": True,
    "deepseek_v3": None,
    "glm4_moe_lite": None,
    "minicpm3": False,
    "mistral4": None,
    "youtu": None,
}
# Keys that limit the rotation to a part of a head.
_PART = ("partial_rotary_factor", "head_dim")


class LatentBehaviour(NamedTuple):
    """Semantics of latent attention, and the rotation of its queries and of its shared key.

    `rotate` is `jaxmha.latent.ScaledQueries` if it also multiplies queries by factors that depend
    on their positions.
    """

    semantics: Semantics
    rotate: LatentRotate


def latent_behaviour(config: Mapping[str, Any], *, length: int = 0) -> LatentBehaviour:
    """Semantics and rotation of latent attention by the configuration of a model of transformers.

    Args:
      config: `json.load` of config.json, or `model.config.to_dict()`.
      length: the longest sequence, on which some rotations depend; see `rope_frequencies`.

    Raises:
      TypeError: config is not a mapping, or a value is not a number.
      ValueError: the model type is not known to have this attention, a key is missing, or a value
        is out of its range.

    >>> sizes = {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4}
    >>> found = latent_behaviour({"model_type": "deepseek_v2", **sizes})
    >>> found.semantics.scale
    0.25
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping, got {type(config).__name__}")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _INTERLEAVED:
        raise ValueError(
            f"model_type {kind!r}: known latent attention is that of {', '.join(_INTERLEAVED)}; for "
            "another model give the scale and the rotation yourself"
        )
    interleaved = _INTERLEAVED[kind]
    if interleaved is None:
        interleaved = bool(config.get("rope_interleave", True))
    H, R = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    if not (isinstance(H, int) and isinstance(R, int) and 0 < H < FAR and 0 < R < FAR):
        raise ValueError(
            f"config: expected sizes qk_nope_head_dim and qk_rope_head_dim, got {H!r} and {R!r}"
        )
    frequencies = rope_frequencies(rotary_settings(config), R, length=length)
    factor = _yarn(parameters_of(config))
    rate = number("attention_dropout", config.get("attention_dropout") or 0.0)
    turned = partial(rope, frequencies=frequencies, interleaved=interleaved)
    scaled = "query_scale" in architectures.parts(kind)
    factors = query_scale.by_setting(config, None) if scaled else None
    return LatentBehaviour(
        Semantics(scale=(H + R) ** -0.5 * factor * factor, dropout_rate=rate),
        ScaledQueries(turned, *factors) if factors else turned,
    )


def rotary_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without `_PART`: latent attention keeps rotary features apart, and rotates
    all of them."""
    kept = {k: v for k, v in config.items() if k not in _PART}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(own := kept.get(name), Mapping):
            kept[name] = {k: v for k, v in own.items() if k not in _PART}
    return kept


def _yarn(parameters: Mapping[str, Any]) -> float:
    """The factor by which YaRN multiplies queries and keys for a longer context; 1 without YaRN.

    Source: `yarn_apply_mscale` of `DeepseekV3Attention`.
    """
    most, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if parameters["rope_type"] == "default" or not most or factor is None:
        return 1.0
    stretch = max(number("factor", factor), 1.0)
    return 0.1 * number("mscale_all_dim", most) * math.log(stretch) + 1.0
