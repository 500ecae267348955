"""Rotations of latent attention, with factors of the queries."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer

from jaxmha.rotary import Rotate, static_rotation


class ScaledQueries(NamedTuple):
    """A rotation for latent attention alone, and factors of whole queries that grow with positions.

    The factor is `1 + beta * log(1 + steps)`, where `steps` is the number of whole `floor` in
    `position + first`. `rotate` is that of `jaxmha.latent_attention`; it takes one of these in its place.

    Source: `get_llama_4_attn_scale` of `Mistral4Attention` in transformers.

    >>> import jax.numpy as jnp
    >>> ScaledQueries(None, beta=0.5, floor=4.0).factors(jnp.arange(3)).tolist()
    [1.0, 1.0, 1.0]
    """

    rotate: Rotate | None
    beta: float
    floor: float
    first: int = 0

    def factors(self, positions: Integer[jax.Array, "B T"]) -> Float[jax.Array, "B T"]:
        """The factor of the query at each position."""
        wide = positions.astype(jnp.result_type(float))
        return 1 + self.beta * jnp.log1p(jnp.floor((wide + self.first) / self.floor))


Turn: TypeAlias = Rotate | ScaledQueries


def static_turn(rotate: Turn | None) -> Turn | None:
    """`static_rotation`, also of `ScaledQueries`."""
    if not isinstance(rotate, ScaledQueries):
        return static_rotation(rotate)
    return rotate._replace(rotate=static_rotation(rotate.rotate))
