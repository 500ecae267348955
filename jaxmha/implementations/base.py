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
    """The batch rows and heads of a larger request, split over devices, that a request computes.

    Dropout keeps or drops a weight by its indices in the larger request.

    Attributes:
      b, n: indices of the first batch row and query head in it, static or traced.
      N, T: its query heads and queries.
    """

    b: jax.Array | int
    n: jax.Array | int
    N: int
    T: int


class Request(NamedTuple):
    """One call of attention, its shapes, dtypes and arguments checked.

    Attributes:
      query, key, value: of floating dtypes; only `reference` lets them differ.
      bias: added to the logits after the soft cap; -inf excludes a pair.
      mask: the pairs that may attend, rewritten by `simplified`; its arrays have a batch axis.
      semantics: scale, soft cap, policy of fully masked rows, dtypes and dropout.
      dropout_key: None: no dropout.
      return_weights: False, "before_dropout" or "after_dropout".
      return_lse: whether the caller reads lse.
      part: its batch rows and heads within a larger request; None: this request is the whole.
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
        """The factor of the products of queries and keys."""
        return logit_scale(self.semantics, self.query.shape[3])

    @property
    def drops(self) -> bool:
        """True if there is a dropout key and the dropout rate is above 0."""
        return self.dropout_key is not None and self.semantics.dropout_rate > 0


class Result(NamedTuple):
    """Output, weights (None: not requested) and lse, the log-sum-exp of the logits of each row, which
    may be None if it was not requested. On fully masked rows it is -inf, or the logit of a sink."""

    out: Float[jax.Array, "B T N h"]
    weights: Float[jax.Array, "B N T S"] | None
    lse: Float[jax.Array, "B N T"] | None


class Leaks(NamedTuple):
    """The unattended keys and values that reach a kernel's results: NaN in them, times a weight of 0,
    is NaN. They are zeroed before the kernel runs.

    Attributes:
      output: 0: neither, 1: values, 2: keys and values affect the output.
      gradients: the same levels for the gradients.
    """

    output: int = 0
    gradients: int = 0


EVERYTHING_LEAKS = Leaks(2, 2)


def mixed_dtypes(request: Request) -> str | None:
    """Returns the reason why a request is unsupported if its query, key and value differ in dtype.

    Returns None if they have one dtype. A kernel may read all three arrays with the dtype of the
    query, and so read beyond the end of an array of a narrower dtype.
    """
    dtypes = [x.dtype.name for x in (request.query, request.key, request.value)]
    if len(set(dtypes)) == 1:
        return None
    return f"query, key and value must have one dtype, got {', '.join(dtypes)}"


def accumulation_dtype(dtype: DTypeLike) -> np.dtype[np.floating]:
    """The dtype in which sums of an array of `dtype` accumulate: float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def allowed_pairs(
    mask: Mask,
    bias: Float[jax.Array, "b n t s"] | None,
    T: int,
    S: int,
    mask_mod: Mod | None = None,
    rows_and_heads: tuple[int, int] = (1, 1),
) -> Bool[jax.Array, "_ _ _ _"] | None:
    """True for pairs that no mask and no bias of -inf excludes, broadcastable to `B N T S`; None:
    there are neither masks nor a bias.

    `rows_and_heads`: B and N, for which `mask_mod` is evaluated.
    """
    allowed = None if mask.empty else jnp.asarray(mask.to_array(T, S))
    if bias is not None:
        finite = jnp.broadcast_to(jnp.asarray(bias) != -jnp.inf, (*bias.shape[:2], T, S))
        allowed = finite if allowed is None else allowed & finite
    if mask_mod is not None:
        found = mods.allowed(mask_mod, Extent((0, 0, 0, 0), (*rows_and_heads, T, S), T, S))
        found = jnp.broadcast_to(found, (*found.shape[:2], T, S))
        allowed = found if allowed is None else allowed & found
    return allowed


def simplified(mask: Mask) -> Mask:
    """Gives a dense mask four axes. If they are `b 1 1 S` or `b 1 T 1`, with S or T above 1, rewrites
    it as padding, which lets implementations skip whole tiles.

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
