"""Rotations of latent attention, which may also multiply queries by factors."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer

from jaxmha.rotary import Rotate, static_rotation
from jaxmha.static_checks import number


class ScaledQueries(NamedTuple):
    """A `rotate` for latent attention that also multiplies each query by a factor of its position.

    The factor is `1 + beta * log(1 + n)`, where n is `(position + first) / floor`, rounded down. It
    multiplies all features of a query, rotated or not. The numbers are static.

    Attributes:
      rotate: `rotate(heads, positions)`, such as `jaxmha.rope`; None: no rotation.
      beta: a finite number; 0: no factor.
      floor: the number of consecutive positions that share a factor, above 0.
      first: added to positions, at least 0.

    Raises:
      TypeError, ValueError: a number is of another type or out of its range; not the constructor
        raises, but the call that gets the rotation.

    Source: `get_llama_4_attn_scale` of `Mistral4Attention` in transformers.

    >>> import jax.numpy as jnp
    >>> from jaxmha import rope
    >>> factors = ScaledQueries(rope, beta=1.0, floor=2.0).factors(jnp.arange(4))
    >>> [round(x, 2) for x in factors.tolist()]
    [1.0, 1.0, 1.69, 1.69]
    """

    rotate: Rotate | None
    beta: float
    floor: float
    first: int = 0

    def factors(self, positions: Integer[jax.Array, "*B T"]) -> Float[jax.Array, "*B T"]:
        """The factor of the query at each position, in JAX's default dtype."""
        wide = positions.astype(jnp.result_type(float))
        return 1 + self.beta * jnp.log1p(jnp.floor((wide + self.first) / self.floor))


LatentRotate: TypeAlias = Rotate | ScaledQueries


def static_latent_rotation(rotate: LatentRotate | None) -> LatentRotate | None:
    """Applies `static_rotation`, also inside `ScaledQueries`, and checks the numbers of these."""
    if not isinstance(rotate, ScaledQueries):
        return static_rotation(rotate)
    for name in ("beta", "floor", "first"):
        number(f"ScaledQueries.{name}", getattr(rotate, name))
    if not (rotate.floor > 0 and rotate.first >= 0):
        raise ValueError(f"ScaledQueries must have floor > 0 and first >= 0, got {rotate}")
    return rotate._replace(rotate=static_rotation(rotate.rotate))
