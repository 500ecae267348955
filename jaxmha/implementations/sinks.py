"""Sinks: a learned logit per head that takes part in every softmax and has no value.

Source: `transformers`, attention of gpt-oss.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxmha.arrays import Array
from jaxmha.implementations.base import Result


@jax.custom_jvp
def _sigmoid(x: jax.Array) -> jax.Array:
    """The sigmoid, with a derivative that keeps its digits where the sigmoid is near 1.

    The derivative of `jax.nn.sigmoid` has the factor `1 - sigmoid(x)`. Most of its digits cancel if
    many keys leave little weight to the sink.
    """
    return jax.nn.sigmoid(x)


@_sigmoid.defjvp
def _sigmoid_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    found = _sigmoid(x)
    return found, tangent * (found * _sigmoid(-x))


def share_of_keys(lse: Float[jax.Array, "*b"], sink: Float[jax.Array, "*#b"]) -> jax.Array:
    """The factor by which all weights of keys fall when the softmax gets the further logit `sink`.

    It is `exp(lse) / (exp(lse) + exp(sink))`, and 0 where lse is -inf.
    """
    masked = lse == -jnp.inf  # -inf is replaced below, so that no gradient is NaN
    return jnp.where(masked, 0.0, _sigmoid(jnp.where(masked, 0.0, lse) - sink))


def with_sinks(found: Result, lse: Float[jax.Array, "B N T"], sinks: Array) -> Result:
    """Returns the result that `found`, whose log-sum-exp is `lse`, would be if every softmax of head
    n had the further logit `sinks[n]`, without a value."""
    logits = jnp.asarray(sinks).astype(lse.dtype).reshape(1, -1, 1)
    share = share_of_keys(lse, logits)[..., None]
    out = (found.out.astype(lse.dtype) * jnp.swapaxes(share, 1, 2)).astype(found.out.dtype)
    weights = found.weights
    if weights is not None:
        weights = (weights.astype(lse.dtype) * share).astype(weights.dtype)
    masked = lse == -jnp.inf  # -inf is replaced below, so that no gradient is NaN
    with_sink = jnp.where(masked, logits, jnp.logaddexp(jnp.where(masked, 0.0, lse), logits))
    return Result(out, weights, with_sink)
