"""Frequencies of rotary positions, from the RoPE parameters of a model's configuration.

Sources: Su et al., "RoFormer" (2021); Chen et al., "Position Interpolation" (2023); bloc97, "NTK-aware
scaled RoPE" (2023); Peng et al., "YaRN" (2023); Ding et al., "LongRoPE" (2024); the Llama 3 report
(2024); `transformers/modeling_rope_utils.py` of version 5.23. Its float32 operations are computed
in the same order, so that frequencies agree bit by bit, except for powers: here powers are rounded
correctly; in torch they depend on the vector instructions of the machine, and a few are off by one
unit in the last place.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxmha.integers import require_sizes
from jaxmha.static_checks import number

Values = NDArray[np.float32]
ONE = np.float32(1)


class Frequencies(NamedTuple):
    """Angles per position, for `rope(frequencies=)`; hashable, so that `rotate` can be static.

    Attributes:
      values: the angle per position of every rotated pair of features, float32 numbers.
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
        rotate all keys of a cache with the frequencies of the longest sequence that it will hold.

    Returns:
      Frequencies of the first `partial_rotary_factor * H` features. The kind is `rope_type`:
      `default`, `linear`, `dynamic`, `yarn`, `llama3`, `longrope` or `proportional`.

    Raises:
      ValueError: an unknown kind, a parameter that is missing or out of its range, or an odd number
        of rotated features. TypeError: `config` is not a mapping.

    >>> rope_frequencies({"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}, 4).values
    (0.5, 0.05000000074505806)
    """
    _require_mapping("config", config)
    require_sizes(head_dim=head_dim)
    require_sizes(least=0, length=length)
    rope = {"rope_theta": 10000.0} | parameters_of(config)
    if kinds := _kinds_of_layers(config):
        raise ValueError(
            f"config has rope parameters per kind of layer: give those of one of {kinds}"
        )
    share = _positive(rope, "partial_rotary_factor", 1.0)
    if share > 1:
        raise ValueError(f"rope parameters: partial_rotary_factor must be at most 1, got {share}")
    dims = head_dim if rope["rope_type"] == "proportional" else int(head_dim * share)
    if dims < 2 or dims % 2:
        raise ValueError(
            f"head_dim={head_dim} with partial_rotary_factor={share} rotates {dims} features: the "
            "number must be even and at least 2"
        )
    given = config.get("max_position_embeddings") is not None
    most = _positive(config, "max_position_embeddings") if given else 0.0
    try:
        return of(rope, dims, most, length)
    except KeyError as error:
        kind = rope.get("rope_type", "default")
        raise ValueError(f"rope parameters of the kind {kind!r} lack {error}") from error


def parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters of a configuration of any version of `transformers`.

    >>> parameters_of({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    {'rope_theta': 500000.0, 'type': 'linear', 'factor': 2.0, 'rope_type': 'linear'}
    """
    own = config.get("rope_scaling") or config.get("rope_parameters")
    if own is None:
        own = config if "rope_type" in config or "type" in config else {}
    _require_mapping("rope_parameters", own)
    keys = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    found = {key: config[key] for key in keys if config.get(key) is not None}
    theta = config.get("rotary_emb_base")
    found |= {} if theta is None else {"rope_theta": theta}
    if config.get("rotary_pct") is not None:
        found["partial_rotary_factor"] = config["rotary_pct"]
    found |= {key: value for key, value in own.items() if value is not None}
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    # If both have the key, that of the configuration itself counts, as in `transformers`.
    before = config.get("original_max_position_embeddings")
    if before is not None:
        found["original_max_position_embeddings"] = before
    elif config.get("max_position_embeddings") is not None:
        found.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return found


def _require_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, got {type(value).__name__}")


def _kinds_of_layers(config: Mapping[str, Any]) -> list[str]:
    """The kinds of layers with rope parameters of their own; empty if all layers share theirs."""
    own = config.get("rope_scaling") or config.get("rope_parameters")
    if own is None and all(isinstance(x, Mapping) for x in config.values()):
        return list(config)
    return [key for key, value in (own or {}).items() if isinstance(value, Mapping)]


def _positive(rope: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A parameter as a float; KeyError without it, ValueError unless it is above 0."""
    value = rope[key] if default is None else rope.get(key, default)
    try:
        found = number(key, value)
    except TypeError:
        found = 0.0
    if not found > 0:
        raise ValueError(f"rope parameters: {key} must be a number above 0, got {value!r}")
    return found


def _or_default(rope: Mapping[str, Any], key: str, default: float) -> float:
    """A parameter as a float; the default where it is absent or 0, as in `transformers`."""
    return _positive({key: rope.get(key) or default}, key)


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def of(rope: Mapping[str, Any], dims: int, most: float, length: int = 0) -> Frequencies:
    """The frequencies of `dims` features. `most`: max_position_embeddings; `length`: the longest
    sequence that will be rotated.

    Raises:
      ValueError: an unknown rope type, or a parameter out of its range.
      KeyError: a parameter of the type is missing.

    >>> of({"rope_type": "default", "rope_theta": 100.0}, 4, 64.0).values
    (1.0, 0.10000000149011612)
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"rope type {kind!r} is not known here: known are {', '.join(_KINDS)}")
    try:
        with np.errstate(all="ignore"):
            values, factor = _KINDS[kind](_Given(rope, dims, most, length))
    except ArithmeticError:
        values, factor = np.full(1, np.nan, np.float32), math.nan
    if not (np.isfinite(values).all() and 0 < factor < math.inf):
        raise ValueError(
            f"rope parameters of the kind {kind!r} must give finite frequencies and a finite factor "
            f"above 0: one of them is out of its range, got {dict(rope)}"
        )
    return Frequencies(tuple(float(x) for x in values), float(factor))


def powers(base: float, dims: int) -> Values:
    """`base ** (2 p / dims)` of every pair p of `dims` features, in float32.

    >>> powers(100.0, 4).tolist()
    [1.0, 10.0]
    """
    exponents = np.arange(0, dims, 2).astype(np.float32) / np.float32(dims)
    found: Values = (np.float64(np.float32(base)) ** exponents.astype(np.float64)).astype(
        np.float32
    )
    return found


class _Given(NamedTuple):
    rope: Mapping[str, Any]
    dims: int
    most: float
    length: int

    @property
    def plain(self) -> Values:
        """The frequencies before the positions are scaled: `base ** (-2 p / dims)`."""
        found: Values = ONE / self.powers
        return found

    @property
    def powers(self) -> Values:
        """The reciprocals of `plain`: `base ** (2 p / dims)`."""
        return powers(_positive(self.rope, "rope_theta"), self.dims)

    @property
    def before(self) -> float:
        """The sequence length of the original training, before the positions were scaled."""
        return _positive(self.rope, "original_max_position_embeddings")

    @property
    def factor(self) -> float:
        """The ratio of the sequence length after scaling to the length before it."""
        if self.rope.get("factor") is None and self.most:
            return self.most / self.before
        return _positive(self.rope, "factor")


def _default(given: _Given) -> tuple[Values, float]:
    return given.plain, 1.0


def _linear(given: _Given) -> tuple[Values, float]:
    return given.plain / np.float32(_positive(given.rope, "factor")), 1.0


def _dynamic(given: _Given) -> tuple[Values, float]:
    """Equal to `default` up to the length that the model was trained for."""
    if given.length <= given.most:
        return given.plain, 1.0
    if not given.most:
        raise KeyError("max_position_embeddings")
    factor, dims = _positive(given.rope, "factor"), given.dims
    if dims < 4:
        raise ValueError(f"rope type 'dynamic' rotates at least 4 features, got {dims}")
    stretch = (factor * given.length / given.most - (factor - 1)) ** (dims / (dims - 2))
    return ONE / powers(_positive(given.rope, "rope_theta") * stretch, dims), 1.0


def _proportional(given: _Given) -> tuple[Values, float]:
    """The first `partial_rotary_factor` of the pairs rotate; the others have frequency 0."""
    share = given.rope.get("partial_rotary_factor", 1.0)
    factor, found = np.float32(_positive(given.rope, "factor", 1.0)), given.plain
    found[int(share * given.dims // 2) :] = 0
    return found / factor, 1.0


def _llama3(given: _Given) -> tuple[Values, float]:
    rope, plain = given.rope, given.plain
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    if not low < high:
        raise ValueError(
            f"rope parameters: low_freq_factor={low} must be below high_freq_factor={high}"
        )
    factor = np.float32(_positive(rope, "factor"))
    wavelength = ONE / plain * np.float32(2 * math.pi)
    longest, shortest = (np.float32(given.before / x) for x in (low, high))
    found: Values = np.where(wavelength > longest, plain / factor, plain)
    turns = ONE / wavelength * np.float32(given.before)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return np.where(between, (ONE - smooth) * found / factor + smooth * found, found), 1.0


def _yarn(given: _Given) -> tuple[Values, float]:
    rope, dims, factor = given.rope, given.dims, given.factor

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def pair(turns: float) -> float:
        turns_of_first = given.before / (turns * 2 * math.pi)
        return dims * _log(turns_of_first) / (2 * _log(_positive(rope, "rope_theta")))

    low, high = pair(_or_default(rope, "beta_fast", 32)), pair(_or_default(rope, "beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    steps = np.arange(dims // 2, dtype=np.float32) - np.float32(low)
    ramp = np.clip(steps / np.float32(high - low or 0.001), np.float32(0), np.float32(1))
    if rope.get("attention_factor") is not None:
        attention = _positive(rope, "attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = magnitude(_positive(rope, "mscale"))
        attention /= magnitude(_positive(rope, "mscale_all_dim"))
    else:
        attention = magnitude(1.0)
    kept = ONE - ramp
    slowed = ONE / (np.float32(factor) * given.powers)
    return slowed * (ONE - kept) + given.plain * kept, attention


def _longrope(given: _Given) -> tuple[Values, float]:
    rope, factor = given.rope, given.factor
    if rope.get("attention_factor") is not None:
        attention = _positive(rope, "attention_factor")
    else:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(given.before))
    long = given.length > given.before
    key = "long_factor" if long else "short_factor"
    steps = given.powers
    try:
        factors = np.asarray(rope[key], np.float32)
    except (TypeError, ValueError, OverflowError):
        factors = np.zeros(0, np.float32)
    if factors.shape != steps.shape or not (factors > 0).all():
        raise ValueError(
            f"rope parameters: {key} must be {steps.size} numbers above 0, one per rotated pair, "
            f"got {rope[key]!r}"
        )
    return ONE / (factors * steps), attention


_KINDS: dict[str, Callable[[_Given], tuple[Values, float]]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
