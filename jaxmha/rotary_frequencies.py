"""Frequencies of rotary positions, from the RoPE parameters of a model's configuration.

Sources: Su et al., "RoFormer" (2021); Chen et al., "Position Interpolation" (2023); bloc97, "NTK-aware
scaled RoPE" (2023); Peng et al., "YaRN" (2023); Ding et al., "LongRoPE" (2024); the Llama 3 report
(2024); `transformers/modeling_rope_utils.py` of version 5.23.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class Frequencies(NamedTuple):
    """Angles per position, for `rope(frequencies=)`; hashable, so that `rotate` can be static.

    Attributes:
      values: the angle per position of every rotated pair of features, exact to float64.
      factor: multiplies cosine and sine, and thereby queries and keys.
    """

    values: tuple[float, ...]
    factor: float = 1.0


def rope_frequencies(config: Mapping[str, Any], head_dim: int, *, length: int = 0) -> Frequencies:
    """The frequencies that a configuration of `transformers` gives for heads of this width.

    Args:
      config: a model's configuration (`json.load` of config.json), or its `rope_parameters` or
        `rope_scaling`. If a model has parameters per kind of layer, give `rope_parameters[kind]`.
      head_dim: H.
      length: the longest sequence. Frequencies of the kinds `dynamic` and `longrope` depend on it:
        rotate all keys of a cache with those of the longest sequence that it will hold.

    Returns:
      Frequencies of the first `partial_rotary_factor * H` features. The kind is `rope_type`:
      `default`, `linear`, `dynamic`, `yarn`, `llama3`, `longrope` or `proportional`.

    Raises:
      ValueError: an unknown kind, or a missing parameter.

    >>> rope_frequencies({"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}, 4).values
    (0.5, 0.05)
    """
    rope = parameters_of(config)
    rope = {"rope_theta": 10000.0} | rope
    share = float(rope.get("partial_rotary_factor", 1.0))
    whole = rope.get("rope_type") == "proportional"
    most = float(config.get("max_position_embeddings") or 0)
    try:
        return of(rope, head_dim if whole else int(head_dim * share), most, length)
    except KeyError as error:
        kind = rope.get("rope_type", "default")
        raise ValueError(f"rope parameters of the kind {kind!r} lack {error}") from error


def parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters of a configuration of any version of `transformers`.

    >>> parameters_of({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    {'rope_theta': 500000.0, 'type': 'linear', 'factor': 2.0, 'rope_type': 'linear'}
    """
    own = config.get("rope_parameters") or config.get("rope_scaling")
    if own is None:
        own = config if "rope_type" in config or "type" in config else {}
    keys = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    found = {key: config[key] for key in keys if config.get(key) is not None}
    theta = config.get("rotary_emb_base")
    found |= {} if theta is None else {"rope_theta": theta}
    if config.get("rotary_pct") is not None:
        found["partial_rotary_factor"] = config["rotary_pct"]
    found |= {key: value for key, value in own.items() if value is not None}
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    before = config.get("max_position_embeddings")
    if before is not None:
        found.setdefault("original_max_position_embeddings", before)
    return found


def of(rope: Mapping[str, Any], dims: int, most: float, length: int = 0) -> Frequencies:
    """The frequencies of `dims` features. `most`: max_position_embeddings; `length`: the longest
    sequence.

    Raises:
      ValueError: an unknown rope type. KeyError: a parameter of the type is missing.

    >>> of({"rope_type": "default", "rope_theta": 100.0}, 4, 64.0).values
    (1.0, 0.1)
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _KINDS:
        raise ValueError(f"rope type {kind!r} is not known here: known are {', '.join(_KINDS)}")
    values, factor = _KINDS[kind](_Given(rope, dims, most, length))
    return Frequencies(tuple(float(x) for x in values), float(factor))


class _Given(NamedTuple):
    rope: Mapping[str, Any]
    dims: int
    most: float
    length: int

    @property
    def plain(self) -> Values:
        """The frequencies without scaling."""
        return self.of_base(float(self.rope["rope_theta"]))

    def of_base(self, base: float) -> Values:
        found: Values = base ** -(np.arange(0, self.dims, 2) / self.dims)
        return found

    @property
    def before(self) -> float:
        """The sequence length of the original training, before the positions were scaled."""
        return float(self.rope["original_max_position_embeddings"])

    @property
    def factor(self) -> float:
        """The ratio of the sequence length after scaling to the length before it."""
        return float(self.rope.get("factor") or self.most / self.before)


def _default(given: _Given) -> tuple[Values, float]:
    return given.plain, 1.0


def _linear(given: _Given) -> tuple[Values, float]:
    return given.plain / given.rope["factor"], 1.0


def _dynamic(given: _Given) -> tuple[Values, float]:
    """Equal to `default` up to the length that the model was trained for."""
    if given.length <= given.most:
        return given.plain, 1.0
    factor, dims = given.rope["factor"], given.dims
    stretch = (factor * given.length / given.most - (factor - 1)) ** (dims / (dims - 2))
    return given.of_base(float(given.rope["rope_theta"]) * stretch), 1.0


def _proportional(given: _Given) -> tuple[Values, float]:
    """The first `partial_rotary_factor` of the pairs rotate; the others have frequency 0."""
    share = given.rope.get("partial_rotary_factor", 1.0)
    turned = np.arange(given.dims // 2) < int(share * given.dims // 2)
    return np.where(turned, given.plain, 0.0) / given.rope.get("factor", 1.0), 1.0


def _llama3(given: _Given) -> tuple[Values, float]:
    rope, plain = given.rope, given.plain
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = given.before * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return plain * ((1 - smooth) / rope["factor"] + smooth), 1.0


def _yarn(given: _Given) -> tuple[Values, float]:
    rope, dims, factor = given.rope, given.dims, given.factor

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def pair(turns: float) -> float:
        turns_of_first = given.before / (turns * 2 * math.pi)
        return dims * math.log(turns_of_first) / (2 * math.log(rope["rope_theta"]))

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
    return given.plain / factor * ramp + given.plain * (1 - ramp), attention


def _longrope(given: _Given) -> tuple[Values, float]:
    rope, factor = given.rope, given.factor
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(given.before))
    long = given.length > given.before
    return given.plain / np.asarray(rope["long_factor" if long else "short_factor"]), attention


_KINDS: dict[str, Callable[[_Given], tuple[Values, float]]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
