"""Factors of queries that grow with the position (Llama 4, Ministral 3)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxmha.arrays import Array
from jaxmha.static_checks import number

_FLOOR = "original_max_position_embeddings"


class QueryScale(NamedTuple):
    """A factor of the queries that grows with the position: `1 + beta * log(1 + steps)`.

    `steps` is the number of whole `floor` in `position + first`.
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


def of(own: Mapping[str, Any], layer: int | None) -> QueryScale | None:
    """The factor of queries by position that a configuration gives to a layer."""
    if own.get("attn_temperature_tuning"):
        rotated = own.get("no_rope_layers")
        if isinstance(rotated, list) and layer is not None and not rotated[layer]:
            return QueryScale(float(own["attn_scale"]), float(own["floor_scale"]), 1)
        return None
    rope_ = own.get("rope_parameters") or {}
    beta = rope_.get("llama_4_scaling_beta") if isinstance(rope_, Mapping) else None
    if beta is None:
        return None
    floor = number(_FLOOR, rope_.get(_FLOOR))
    if not floor > 0:
        raise ValueError(f"{_FLOOR} must be positive, got {floor}")
    return QueryScale(number("llama_4_scaling_beta", beta), floor, 0)
