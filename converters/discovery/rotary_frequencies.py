"""Frequencies of rotary positions, from the rope parameters of a config.json.

Sources: Su et al., "RoFormer" (2021); Chen et al., "Position Interpolation" (2023); Peng et al.,
"YaRN" (2023); Ding et al., "LongRoPE" (2024); the Llama 3 report (2024).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxmha.converters.layout.arrays import NDArray


class Frequencies(NamedTuple):
    """`values`: angle per position of every feature pair; `factor` multiplies cosine and sine."""

    values: tuple[float, ...]
    factor: float = 1.0


def of(rope: Mapping[str, Any], dims: int, most: float) -> Frequencies:
    """The frequencies of `dims` rotated features; `most`: max_position_embeddings.

    Raises:
      ValueError: an unknown rope type. KeyError: a parameter of the type is missing.

    >>> of({"rope_type": "default", "rope_theta": 100.0}, 4, 64.0).values
    (1.0, 0.1)
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _KINDS:
        raise ValueError(f"rope type {kind!r} is not known here: known are {', '.join(_KINDS)}")
    plain = float(rope["rope_theta"]) ** -(np.arange(0, dims, 2) / dims)
    values, factor = _KINDS[kind](plain, rope, dims, most)
    return Frequencies(tuple(float(x) for x in values), float(factor))


def _default(plain: NDArray, *_: Any) -> tuple[NDArray, float]:
    return plain, 1.0


def _linear(plain: NDArray, rope: Mapping[str, Any], *_: Any) -> tuple[NDArray, float]:
    return plain / rope["factor"], 1.0


def _llama3(plain: NDArray, rope: Mapping[str, Any], *_: Any) -> tuple[NDArray, float]:
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return plain * ((1 - smooth) / factor + smooth), 1.0


def _yarn(plain: NDArray, rope: Mapping[str, Any], dims: int, most: float) -> tuple[NDArray, float]:
    before = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or most / before

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def pair(turns: float) -> float:
        return dims * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low = pair(float(rope.get("beta_fast") or 32))
    high = pair(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low or 0.001), 0, 1)
    attention = rope.get("attention_factor")
    if attention is None:
        one, all_ = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = (
            magnitude(float(one)) / magnitude(float(all_)) if one and all_ else magnitude(1.0)
        )
    return plain / factor * ramp + plain * (1 - ramp), attention


def _longrope(
    plain: NDArray, rope: Mapping[str, Any], _: int, most: float
) -> tuple[NDArray, float]:
    before = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or most / before
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(before))
    return plain / np.asarray(rope["short_factor"], np.float64), attention


_Kind = Callable[[NDArray, Mapping[str, Any], int, float], tuple[NDArray, float]]
# Up to the length that the model was trained for, `dynamic` equals `default`.
_KINDS: dict[str, _Kind] = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
