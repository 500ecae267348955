"""Logits to softmax-weighted values, one tile of keys at a time.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

# Dtype -> the row max before the first key. It is finite: -inf - -inf would be NaN.
LOWEST = {name: float(np.finfo(name).min) for name in ("float32", "float64")}


def rounded(product: jax.Array) -> jax.Array:
    """Keeps compilers from fusing a product (logits) with the later subtraction of the row max.

    A fused multiply-add does not round the product, whereas the row max is rounded: huge logits
    would differ so much from their own maximum that exp overflows. The minimum with the largest
    finite number changes only +inf, and makes compilers round the product.
    """
    return jnp.minimum(product, -LOWEST[product.dtype.name])


def cap_and_mask(
    logits: Float[jax.Array, "*b r s"],
    soft_cap: float | None,
    *masks_or_biases: Bool[jax.Array, "*#b #r #s"] | Float[jax.Array, "*#b #r #s"] | None,
) -> tuple[Float[jax.Array, "*b r s"], Float[jax.Array, "*b r s"] | None]:
    """Caps the logits, then adds biases and sets logits to -inf where a bias is -inf or a Boolean
    mask False. Also returns the tanh of the soft cap, for gradients (None without a cap)."""
    tanh = None
    if soft_cap is not None:
        tanh = jnp.tanh(logits / soft_cap)
        logits = rounded(soft_cap * tanh)
    for x in masks_or_biases:
        if x is None:
            continue
        if x.dtype == bool:  # faster than adding: XLA would first materialise an additive mask
            logits = jnp.where(x, logits, -jnp.inf)
        else:  # not a sum where the bias excludes a pair: the logit may be NaN or infinite
            logits = jnp.where(x == -jnp.inf, -jnp.inf, logits + x)
    return logits, tanh


class State(NamedTuple):
    """Online-softmax state over the keys visited so far: output accumulator, row max and row sum.

    The last two axes are swapped, `h r` and `1 r`, if those of the logits are `s r`.
    """

    out: Float[jax.Array, "*b r h"]
    row_max: Float[jax.Array, "*b r 1"]
    row_sum: Float[jax.Array, "*b r 1"]


class Softmax(NamedTuple):
    """Normalised output with row max and row sum; output and row sum are 0 on fully masked rows.

    The backward pass reads row max and row sum instead of the lse: the rounding error of a large
    lse would be a relative error of the weights.
    """

    out: Float[jax.Array, "*b r h"]
    row_max: Float[jax.Array, "*b r 1"]
    row_sum: Float[jax.Array, "*b r 1"]

    @property
    def lse(self) -> Float[jax.Array, "*b r"]:
        """Log-sum-exp of the logits, -inf on fully masked rows."""
        return (self.row_max + jnp.log(self.row_sum))[..., 0]


def empty_state(out: jax.Array, per_row: jax.Array) -> State:
    """The state before the first key. `out`, `per_row`: zeros of the shapes of output and row sum."""
    return State(out, jnp.full_like(per_row, LOWEST[per_row.dtype.name]), per_row)


def of_output(
    out: Float[jax.Array, "*b r h"], lse: Float[jax.Array, "*b r"], valid: Bool[jax.Array, "*#b #r"]
) -> State:
    """The float32 state of a normalized output over some keys: row max is the lse, and row sum is 1.
    Where `valid` is False, it is that before the first key, whatever output and lse are."""
    some = valid[..., None]
    wide = jnp.where(some, out.astype(np.float32), 0.0)
    row_max = jnp.where(some, lse[..., None], LOWEST["float32"])
    return State(wide, row_max, jnp.broadcast_to(some, row_max.shape).astype(np.float32))


def row_sum(exps: Float[jax.Array, "*b r s"]) -> Float[jax.Array, "*b r 1"]:
    """Sum of the exponentials of each row over the keys, the last axis, which is kept with size 1."""
    return exps.sum(-1, keepdims=True)


def fold(
    logits: jax.Array,
    weigh: Callable[[jax.Array], jax.Array],
    before: State | None,
    *,
    axis: int = -1,
    sum_keys: Callable[[jax.Array], jax.Array] = row_sum,
) -> State:
    """Returns the state over the keys of one tile and of the tiles before it.

    Args:
      logits: `*b r s`, or `*b s r` if `axis`, the axis of keys, is -2.
      weigh: multiplies `exp(logits - row_max)` by the values of the tile.
      before: the state over the keys of earlier tiles; None: there are none.
      axis: the axis of keys.
      sum_keys: sums exponentials over that axis, and keeps it with size 1.
    """
    lowest = LOWEST[logits.dtype.name] if before is None else before.row_max
    # Output and lse do not depend on the row max. The derivative of a maximum would divide by the
    # number of logits that equal it, which is 0 if XLA rounds recomputed logits in another way.
    row_max = jax.lax.stop_gradient(jnp.maximum(logits.max(axis, keepdims=True), lowest))
    exps = jnp.exp(logits - row_max)
    row_sum = sum_keys(exps)
    out = weigh(exps)
    if before is None:
        return State(out, row_max, row_sum)
    alpha = jnp.exp(before.row_max - row_max)
    return State(before.out * alpha + out, row_max, before.row_sum * alpha + row_sum)


def joined(a: State, b: State) -> State:
    """Joins the states over two sets of keys into the state over both sets."""
    row_max = jnp.maximum(a.row_max, b.row_max)
    alpha, beta = (jnp.exp(x.row_max - row_max) for x in (a, b))
    return State(a.out * alpha + b.out * beta, row_max, a.row_sum * alpha + b.row_sum * beta)


def divisor_of(row_sum: jax.Array) -> jax.Array:
    """The row sum, or 1/2 in fully masked rows, where it is 0.

    In other rows the row sum is at least about 1. It may be slightly less than 1 if a compiler
    fuses the scaling of logits with the subtraction of the rounded row max. After a `where`
    instead of this maximum, XLA:CPU takes up to 1.4 times as long for a tile.
    """
    return jnp.maximum(row_sum, 0.5)


def normalize(state: State, keep_rate: float | None = None) -> Softmax:
    """Divides the output by the row sum and, under dropout, by `keep_rate`, the probability that a
    weight is kept (None: no dropout)."""
    divisor = divisor_of(state.row_sum)
    out = state.out / (divisor if keep_rate is None else divisor * keep_rate)
    return Softmax(out, state.row_max, state.row_sum)
