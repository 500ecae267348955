"""`Request` and `Result`: the arguments and results of every implementation."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray
from numpy.typing import DTypeLike

from jaxmha.implementations import mods
from jaxmha.implementations.mods import Extent, Mod
from jaxmha.mask import Mask
from jaxmha.semantics import ReturnWeights, Semantics, logit_scale


class Part(NamedTuple):
    """The position of a request within a larger one that is split over devices, for dropout.

    Dropout keeps or drops a weight by its position in the larger request.

    Attributes:
      b, n: the first batch row and query head, static or traced.
      N, T: sizes of the larger request.
    """

    b: jax.Array | int
    n: jax.Array | int
    N: int
    T: int


class Request(NamedTuple):
    """One call of attention, its shapes, dtypes and arguments checked.

    Attributes:
      query, key, value: of floating dtypes; only `reference` lets them differ.
      bias: added to the logits; -inf excludes a pair.
      mask: the allowed pairs, rewritten by `simplified`; its arrays have a batch axis.
      semantics: scale, soft cap, policy of fully masked rows, dtypes and dropout.
      dropout_key: None: no dropout.
      return_weights: False, "before_dropout" or "after_dropout".
      return_lse: whether the caller reads lse.
      part: position within a larger request; None: this request is the whole.
      score_mod: changes the scores after the bias, before the masks.
      mask_mod: excludes further pairs.
    """

    query: Float[jax.Array, "B T N H"]
    key: Float[jax.Array, "B S K H"]
    value: Float[jax.Array, "B S K h"]
    bias: Float[jax.Array, "#B #N #T #S"] | None
    mask: Mask
    semantics: Semantics
    dropout_key: PRNGKeyArray | None
    return_weights: ReturnWeights
    return_lse: bool = False
    part: Part | None = None
    score_mod: Mod | None = None
    mask_mod: Mod | None = None

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return logit_scale(self.semantics, self.query.shape[3])

    @property
    def drops(self) -> bool:
        """True if there is a dropout key and the dropout rate is above 0."""
        return self.dropout_key is not None and self.semantics.dropout_rate > 0


class Result(NamedTuple):
    """Output, weights if requested, and lse, -inf on fully masked rows; lse may be None if it was
    not requested."""

    out: Float[jax.Array, "B T N h"]
    weights: Float[jax.Array, "B N T S"] | None
    lse: Float[jax.Array, "B N T"] | None


class Leaks(NamedTuple):
    """Which keys and values reach a kernel's results although no query attends them: NaN in them,
    times a weight of 0, is NaN. They are zeroed before a call.

    Attributes:
      output: 0: neither, 1: values, 2: keys and values affect the output.
      gradients: the same levels for the gradients.
    """

    output: int = 0
    gradients: int = 0


EVERYTHING_LEAKS = Leaks(2, 2)


def mixed_dtypes(request: Request) -> str | None:
    """Returns the reason why a request is unsupported if its query, key and value differ in dtype.

    Returns None if they have one dtype. Kernels read all three arrays with the dtype of the query,
    and would read beyond the end of an array of a narrower dtype.
    """
    dtypes = [x.dtype.name for x in (request.query, request.key, request.value)]
    if len(set(dtypes)) == 1:
        return None
    return f"query, key and value must have one dtype, got {', '.join(dtypes)}"


def accumulation_dtype(dtype: DTypeLike) -> np.dtype[np.floating]:
    """The dtype in which sums accumulate: float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def allowed_pairs(
    mask: Mask,
    bias: Float[jax.Array, "b n t s"] | None,
    T: int,
    S: int,
    mask_mod: Mod | None = None,
    heads: tuple[int, int] = (1, 1),
) -> Bool[jax.Array, "_ _ _ _"] | None:
    """Pairs that no mask and no bias of -inf excludes, broadcastable to BNTS; None: all.

    `heads`: B and N, over which `mask_mod` is evaluated.
    """
    allowed = None if mask.empty else jnp.asarray(mask.to_array(T, S))
    if bias is not None:
        finite = jnp.broadcast_to(jnp.asarray(bias) != -jnp.inf, (*bias.shape[:2], T, S))
        allowed = finite if allowed is None else allowed & finite
    if mask_mod is not None:
        found = mods.allowed(mask_mod, Extent((0, 0, 0, 0), (*heads, T, S), T, S))
        found = jnp.broadcast_to(found, (*found.shape[:2], T, S))
        allowed = found if allowed is None else allowed & found
    return allowed


def simplified(mask: Mask) -> Mask:
    """Rewrites a dense mask that depends only on keys, or only on queries, as padding, which needs
    O(S) or O(T) memory and lets implementations skip whole tiles.

    >>> simplified(Mask.dense(np.ones((2, 1, 1, 7), bool))).key_value_padding.shape
    (2, 7)
    """
    array = mask.array
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
