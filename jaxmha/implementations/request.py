"""What every implementation is asked, and what it answers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from jaxmha.arrays import Array
from jaxmha.mask import Mask
from jaxmha.semantics import ReturnWeights, Semantics


class Request(NamedTuple):
    """One call of attention with shapes, dtypes and arguments checked.

    Attributes:
      query: `B T N H`. key: `B S K H`. value: `B S K h`. All of one floating dtype.
      bias: broadcastable to `B N T S`, four axes; -inf excludes.
      mask: what may attend; arrays in it have a batch axis.
      semantics: scale, soft cap, policy, dtypes, dropout.
      dropout_key: None: no dropout.
      return_weights: False, "before_dropout" or "after_dropout".
      return_lse: whether the caller reads lse.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: Mask
    semantics: Semantics
    dropout_key: Array | None
    return_weights: ReturnWeights
    return_lse: bool = False


class Result(NamedTuple):
    """out `B T N h`; weights `B N T S` where asked for; lse `B N T`, -inf on empty rows.

    lse may be None where it was not asked for.
    """

    out: jax.Array
    weights: jax.Array | None
    lse: jax.Array | None


def accumulation_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def allowed_pairs(mask: Mask, bias: Array | None, T: int, S: int) -> jax.Array | None:
    """Pairs that neither the mask nor a bias of -inf excludes, broadcastable to BNTS; None: all."""
    allowed = None if mask.empty else jnp.asarray(mask.to_array(T, S))
    if bias is not None:
        finite = jnp.broadcast_to(jnp.asarray(bias) != -jnp.inf, (*bias.shape[:2], T, S))
        allowed = finite if allowed is None else allowed & finite
    return allowed
