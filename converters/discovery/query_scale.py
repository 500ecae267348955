"""Factors of queries that grow with the position (Llama 4, Ministral 3, Beam)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxmha.arrays import Array
from jaxmha.converters.discovery import layer_kinds
from jaxmha.rotary_frequencies import parameters_of
from jaxmha.static_checks import number

# Model type -> length and exponent of `QueryPower`, which no configuration has.
_POWERS = {"beam": (2048.0, 0.1)}


class QueryScale(NamedTuple):
    """A factor of the queries that grows with the position: `1 + beta * log(1 + steps)`.

    `steps` is `(position + first) // floor`.
    """

    beta: float
    floor: float
    first: int

    def __call__(
        self, query: Float[Array, "*B T N H"], positions: Int[Array, " T"]
    ) -> Float[Array, "*B T N H"]:
        """Multiplies projected queries by the factors of their positions.

        >>> QueryScale(1.0, 4.0, 1)(np.ones((1, 2, 1, 2)), np.arange(2)).shape
        (1, 2, 1, 2)
        """
        steps = np.floor((np.asarray(positions) + self.first) / self.floor)
        factors = 1 + self.beta * np.log1p(steps)
        return query * factors[:, None, None].astype(query.dtype)


class QueryPower(NamedTuple):
    """A factor of the queries that grows with the position: `(1 + (position + 1) / length) ** exponent`."""

    length: float
    exponent: float

    def __call__(
        self, query: Float[Array, "*B T N H"], positions: Int[Array, " T"]
    ) -> Float[Array, "*B T N H"]:
        """Multiplies projected queries by the factors of their positions.

        >>> QueryPower(2.0, 2.0)(np.ones((1, 2, 1, 1)), np.arange(2)).ravel().tolist()
        [2.25, 4.0]
        """
        factors = (1 + (np.asarray(positions) + 1) / self.length) ** self.exponent
        return query * factors[:, None, None].astype(query.dtype)


def of(own: Mapping[str, Any], layer: int | None) -> QueryScale | QueryPower | None:
    """The factor of queries by position that a configuration gives to a layer; None: no factor.

    Raises:
      TypeError: a value is not a number, or the RoPE parameters are not a mapping.
      ValueError: a value is missing or out of its range, or there is no setting for the layer.
    """
    if (power := _POWERS.get(str(own.get("model_type")))) and layer is not None:
        return None if _rotated(own, layer) else QueryPower(*power)
    return by_setting(own, layer)


def _rotated(own: Mapping[str, Any], layer: int) -> bool:
    """True if a layer of Beam has RoPE parameters, by its kind: such layers have no factor.

    By default, layers of sliding attention have them.
    """
    kind, parameters = layer_kinds.of(own, "beam", layer), own.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        return kind == layer_kinds.SLIDING
    return bool(parameters.get(kind))


def by_setting(own: Mapping[str, Any], layer: int | None) -> QueryScale | None:
    """The factor that keys of a configuration give to a layer, without the fixed ones of `_POWERS`.

    Returns and raises as `of`.
    """
    model_type = str(own.get("model_type"))
    if own.get("attn_temperature_tuning"):
        rotated = layer_kinds.rotated(own, model_type, layer)
        return None if rotated else _scale(own, "attn_scale", "floor_scale", 1)
    parameters = parameters_of(own)
    if parameters.get("llama_4_scaling_beta") is None:
        return None
    return _scale(parameters, "llama_4_scaling_beta", "original_max_position_embeddings", 0)


def _scale(settings: Mapping[str, Any], beta: str, floor: str, first: int) -> QueryScale:
    """The factor from the settings named `beta` and `floor`; ValueError if one is missing."""
    for name in (beta, floor):
        if settings.get(name) is None:
            raise ValueError(f"{name} is missing, on which factors of queries depend")
    found = QueryScale(number(beta, settings[beta]), number(floor, settings[floor]), first)
    if not found.floor > 0:
        raise ValueError(f"{floor} must be above 0, got {found.floor}")
    return found
