"""The contract of every implementation: `Request` in, `Result` out."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from jaxmha.arrays import Array
from jaxmha.mask import Mask
from jaxmha.semantics import ReturnWeights, Semantics


class Part(NamedTuple):
    """The position of a request within a larger one, so that dropout draws the same entries.

    Attributes:
      b, n: the first batch row and query head, static or traced.
      N, T: sizes of the larger request.
    """

    b: Any
    n: Any
    N: int
    T: int


class Request(NamedTuple):
    """One call of attention, its shapes, dtypes and arguments checked.

    Attributes:
      query: `B T N H`. key: `B S K H`. value: `B S K h`. All of one floating dtype.
      bias: broadcastable to `B N T S`, four axes; -inf excludes.
      mask: the allowed pairs, `simplified`; its arrays have a batch axis.
      semantics: scale, soft cap, policy, dtypes, dropout.
      dropout_key: None: no dropout.
      return_weights: False, "before_dropout" or "after_dropout".
      return_lse: whether the caller reads lse.
      part: position within a larger request; None: this is the whole.
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
    part: Part | None = None


class Result(NamedTuple):
    """out `B T N h`; weights `B N T S` if requested; lse `B N T`, -inf on fully masked rows.

    lse may be None if it was not requested.
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


def simplified(mask: Mask) -> Mask:
    """Rewrites a dense mask over keys alone, or queries alone, as padding: it needs O(S) memory,
    and implementations can skip whole tiles.

    >>> simplified(Mask.dense(np.ones((2, 1, 1, 7), bool))).key_value_padding.shape
    (2, 7)
    """
    array: Any = mask.array
    if array is None:
        return mask
    array = jnp.reshape(array, (1,) * (4 - array.ndim) + array.shape)
    rest = replace(mask, array=None)
    match [size == 1 for size in array.shape[1:]]:
        case [True, True, False]:
            return rest & Mask.padding(key_value=array[:, 0, 0])
        case [True, False, True]:
            return rest & Mask.padding(query=array[:, 0, :, 0])
    return replace(mask, array=array)
