"""One tile of scores: matmuls, masking and online softmax, forward and backward.

Axes: `*c` key/value heads of the tile, if several; `r` rows (query positions of every query head of
a group); `s` keys; H and h features.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxmha.implementations import mods, online_softmax
from jaxmha.implementations.mods import Extent, Floats, Mod
from jaxmha.implementations.online_softmax import LOWEST, State, cap_and_mask, rounded
from jaxmha.matmul import add_pairwise, matmul, matmul_of_float16, pairwise_sum, sum_of_rows
from jaxmha.semantics import Precision

# Row sums of tiles with at most so many scores are added pairwise, which rounds less, as in small
# matmuls.
SMALL_SUM = 2**14
# `_weigh` splits a matmul over more than 2 * RUN keys into runs of RUN keys, whose results are
# added pairwise, if its multiplications are at most its argument `most`, by default SPLIT.
RUN, SPLIT = 128, 2**24


class Config(NamedTuple):
    """Static config of tiled attention, other than the tiling.

    Attributes:
      window, above: static mask conditions.
      lse: whether the lse is returned.
      platform: selects the tile sizes.
      whole: N and T of the larger request that the arrays are a part of; None: they are the whole.
      sizes: overrides of the tile sizes.
      operands: dtype of matmul operands, which represents rows, keys and values exactly; float16:
        significand bits of float16 in the range of float32 (`matmul_of_float16`); None: their own dtype.
      scale: factor of the logits by which the rows are not multiplied yet.
      transposed: whether the scores of the forward pass are `s r`, and so round like the scores of
        the backward pass. Without a gradient they are `r s`: XLA:CPU takes up to 1.9 times as long
        for matmuls with the values on the left.
    """

    soft_cap: float | None
    precision: Precision
    window: tuple[int | None, int | None]
    above: int | None
    dropout_rate: float
    dropout_broadcast: tuple[str, ...]
    lse: bool
    platform: str
    whole: tuple[int, int] | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    operands: np.dtype[np.floating] | None = None
    scale: float = 1.0
    transposed: bool = False


class Modifier(NamedTuple):
    """A score function, bound to the tile `extent` whose logits it changes."""

    mod: Mod
    extent: Extent

    def scores(self, transposed: bool, logits: jax.Array, floats: Floats) -> jax.Array:
        """Applies the score function to logits; `floats` are its captured floating arrays."""
        return mods.scores(self.mod, self.extent, logits, floats, transposed=transposed)


def forward(
    config: Config,
    rows: Float[jax.Array, "*c r H"],
    keys: Float[jax.Array, "*c H s"],
    values: Float[jax.Array, "*c s h"],
    mask_or_bias: Bool[jax.Array, "*#c #r s"] | Float[jax.Array, "*#c #r s"] | None,
    keep: Bool[jax.Array, "*c r s"] | None,
    before: State | None,
    modifier: Modifier | None = None,
) -> State:
    """Folds one tile into the online-softmax state `before`, which is None for a first tile."""
    logits = _logits(config, rows, keys, mask_or_bias, modifier)

    def weigh(exps: jax.Array) -> jax.Array:
        return _weigh(config, exps if keep is None else jnp.where(keep, exps, 0.0), values)

    return online_softmax.fold(logits, weigh, before, sum_keys=_row_sum)


def forward_transposed(
    config: Config,
    rows: Float[jax.Array, "*c H r"],
    keys: Float[jax.Array, "*c s H"],
    values: Float[jax.Array, "*c h s"],
    mask_or_bias: Bool[jax.Array, "*#c #r s"] | Float[jax.Array, "*#c #r s"] | None,
    keep: Bool[jax.Array, "*c r s"] | None,
    before: State | None,
    modifier: Modifier | None = None,
) -> State:
    """`forward` with scores `s r` and a transposed state: logits then round as in `backward`, which
    computes them by the same matmul."""
    keep = None if keep is None else jnp.swapaxes(keep, -1, -2)
    logits = _logits(config, keys, rows, _transpose(mask_or_bias), modifier, transposed=True)

    def weigh(exps: jax.Array) -> jax.Array:
        return _weigh(config, values, exps if keep is None else jnp.where(keep, exps, 0.0))

    return online_softmax.fold(logits, weigh, before, axis=-2, sum_keys=sum_of_rows)


def _transpose(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else jnp.swapaxes(x, -1, -2)


def _logits(
    config: Config,
    a: Float[jax.Array, "*c m H"],
    b: Float[jax.Array, "*c H n"],
    mask_or_bias: jax.Array | None,
    modifier: Modifier | None,
    *,
    transposed: bool = False,
) -> Float[jax.Array, "*c m n"]:
    """Masked logits `a @ b`, after the score function if `modifier` is given."""
    if modifier is None:
        return _capped(config, a, b, mask_or_bias)[0]
    logits, _, allowed = _before_modifier(config, a, b, mask_or_bias)
    logits = rounded(modifier.scores(transposed, logits, modifier.mod.floats))
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def _capped(
    config: Config,
    a: Float[jax.Array, "*c m H"],
    b: Float[jax.Array, "*c H n"],
    mask_or_bias: jax.Array | None,
) -> tuple[Float[jax.Array, "*c m n"], Float[jax.Array, "*c m n"] | None]:
    """Masked logits, and the tanh of the soft cap (None without a cap)."""
    logits = _matmul(config, a, b)
    if config.scale != 1.0:
        logits = rounded(logits * config.scale)
    return cap_and_mask(logits, config.soft_cap, mask_or_bias)


def _before_modifier(
    config: Config,
    a: Float[jax.Array, "*c m H"],
    b: Float[jax.Array, "*c H n"],
    mask_or_bias: jax.Array | None,
) -> tuple[
    Float[jax.Array, "*c m n"], Float[jax.Array, "*c m n"] | None, Bool[jax.Array, "..."] | None
]:
    """The logits that a score function reads, tanh of the soft cap, and the allowed pairs.

    The logits of excluded pairs are 0: in the gradient, NaN or -inf times a cotangent of 0 would be
    NaN.
    """
    logits, tanh = _capped(config, a, b, None)
    if mask_or_bias is None:
        return logits, tanh, None
    if mask_or_bias.dtype == bool:
        return jnp.where(mask_or_bias, logits, 0.0), tanh, mask_or_bias
    allowed = mask_or_bias != -jnp.inf
    return jnp.where(allowed, logits + mask_or_bias, 0.0), tanh, allowed


def _without_padding(
    extent: Extent, logits: Float[jax.Array, "*c s r"], allowed: Bool[jax.Array, "..."] | None
) -> tuple[Float[jax.Array, "*c s r"], Bool[jax.Array, "..."] | None]:
    """Excludes the padded rows and keys of a tile, and gives them the logits of the last valid row
    or key. At other logits a score function may have an infinite derivative, and inf times the
    cotangent 0 is NaN."""
    s, r = logits.shape[-2:]
    apart = logits.reshape(*logits.shape[:-1], extent.G, r // extent.G)
    for axis, size, start in ((-1, extent.T, extent.starts[2]), (-3, extent.S, extent.starts[3])):
        count = apart.shape[axis]
        if size % count:
            last = jnp.minimum(size - 1 - start, count - 1)
            shape = [count if n == axis % apart.ndim else 1 for n in range(apart.ndim)]
            inside = (jnp.arange(count, dtype=np.int32) <= last).reshape(shape)
            apart = jnp.where(inside, apart, jax.lax.dynamic_index_in_dim(apart, last, axis))
            *c, _, _, _ = shape
            inside = jnp.broadcast_to(inside, (*c, *apart.shape[-3:])).reshape(*c, s, r)
            allowed = inside if allowed is None else allowed & inside
    return apart.reshape(logits.shape), allowed


def _matmul(
    config: Config, a: Float[jax.Array, "*c m k"], b: Float[jax.Array, "*c k n"]
) -> Float[jax.Array, "*c m n"]:
    if config.operands is None:
        return matmul(a, b, precision=config.precision)
    if config.operands == np.float16:
        return matmul_of_float16(a, b)
    x, y = (x.astype(config.operands) for x in (a, b))
    return matmul(x, y, precision="default", dtype=a.dtype)


def _weigh(
    config: Config,
    a: Float[jax.Array, "*c m s"],
    b: Float[jax.Array, "*c s n"],
    most: int = SPLIT,
) -> Float[jax.Array, "*c m n"]:
    """`a @ b`, summed over keys or rows; `a` or `b` holds weights or their gradients.

    On a CPU, matmuls of at most `most` multiplications are split into runs of keys, whose results
    are added pairwise: XLA:CPU adds the terms of a sum one by one, and rounding errors of a long
    sum do not cancel if its terms have one sign. In small tiles a split costs little time.
    """
    keys, sizes = a.shape[-1], (*a.shape, b.shape[-1])
    split = config.platform == "cpu" and all(isinstance(size, int) for size in sizes)
    if not split or keys <= 2 * RUN or math.prod(sizes) > most:
        return _matmul(config, a, b)
    runs = [slice(start, start + RUN) for start in range(0, keys, RUN)]
    sums = [_matmul(config, a[..., run], b[..., run, :]) for run in runs]
    return add_pairwise(sums)


def _row_sum(exps: Float[jax.Array, "*c r s"]) -> Float[jax.Array, "*c r 1"]:
    return pairwise_sum(exps) if exps.size <= SMALL_SUM else online_softmax.row_sum(exps)


class Cotangents(NamedTuple):
    """Inputs of the backward pass per row, other than the queries.

    Attributes:
      d_out: cotangent of the output.
      row_max: row max of the forward pass. If it is None, the tile holds all keys of its rows, and
        `backward` computes row max, row sum and delta.
      minus_delta: cotangent of the lse minus delta, where delta is the sum of `out * d_out` over
        each row. If `row_max` is None, this is the cotangent of the lse alone. Otherwise this and
        `d_out` are already divided by the row sum.
    """

    d_out: Float[jax.Array, "*c r h"]
    row_max: Float[jax.Array, "*c r 1"] | None
    minus_delta: Float[jax.Array, "*c r 1"]


class Gradients(NamedTuple):
    """Gradients of the rows, keys, values and bias of one tile, and of the floating arrays that a
    score function captures."""

    rows: Float[jax.Array, "*c H r"]
    keys: Float[jax.Array, "*c s H"]
    values: Float[jax.Array, "*c s h"]
    bias: Float[jax.Array, "*c r s"]
    floats: Floats


def backward(
    config: Config,
    rows: Float[jax.Array, "*c H r"],
    cotangents: Cotangents,
    keys: Float[jax.Array, "*c s H"],
    values: Float[jax.Array, "*c s h"],
    keys_transposed: Float[jax.Array, "*c H s"],
    mask_or_bias: Bool[jax.Array, "*#c #r s"] | Float[jax.Array, "*#c #r s"] | None,
    keep: Bool[jax.Array, "*c r s"] | None,
    modifier: Modifier | None = None,
) -> Gradients:
    """Gradients of one tile; scores are `s r` here, so that each matmul has row-major operands."""
    d_out, row_max, minus_delta = cotangents
    product = partial(_matmul, config)
    if modifier is None:
        pull = allowed = None
        logits, tanh = _capped(config, keys, rows, _transpose(mask_or_bias))
    else:
        logits, tanh, allowed = _before_modifier(config, keys, rows, _transpose(mask_or_bias))
        logits, allowed = _without_padding(modifier.extent, logits, allowed)
        scores = partial(modifier.scores, True)
        logits, pull = jax.vjp(scores, logits, modifier.mod.floats)
        logits = rounded(logits)
        logits = logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)
    whole = row_max is None
    if row_max is None:  # computed here: logits of the forward pass may round differently
        row_max = jnp.maximum(logits.max(-2, keepdims=True), LOWEST[rows.dtype.name])
        row_max = jax.lax.stop_gradient(row_max)  # gradients do not depend on it
    else:  # recomputed logits may round above row_max; clipping keeps exps <= 1
        row_max = jnp.swapaxes(row_max, -1, -2)
        logits = jnp.minimum(logits, row_max)
    exps = jnp.exp(logits - row_max)
    if whole:
        row_sum = sum_of_rows(exps)
        divisor = online_softmax.divisor_of(row_sum)
        d_out = d_out / jnp.swapaxes(divisor, -1, -2)
    d_weights = product(values, jnp.swapaxes(d_out, -1, -2))
    dropped = exps
    if keep is not None:
        factor = jnp.where(jnp.swapaxes(keep, -1, -2), 1 / (1 - config.dropout_rate), 0.0)
        factor = factor.astype(rows.dtype)
        dropped, d_weights = exps * factor, d_weights * factor
    d_values = product(dropped, d_out)
    minus_delta = jnp.swapaxes(minus_delta, -1, -2)
    if whole:  # subtracts delta of these weights, so that gradients of a row's logits sum to 0
        d_weights -= sum_of_rows(exps * d_weights) / divisor
        if exps.size <= SMALL_SUM:  # a second time, since the first leaves its rounding error
            d_weights -= sum_of_rows(exps * d_weights) / divisor
        minus_delta /= divisor
    d_bias = exps * (d_weights + minus_delta)
    if mask_or_bias is not None:  # d_weights of an excluded pair may be NaN, and 0 * NaN is NaN
        d_bias = jnp.where(exps == 0.0, 0.0, d_bias)
    floats: Floats = ()
    if pull is not None:
        d_bias, floats = pull(d_bias)
        d_bias = d_bias if allowed is None else jnp.where(allowed, d_bias, 0.0)
    d_logits = d_bias if tanh is None else d_bias * (1 - tanh * tanh)
    d_logits = d_logits if config.scale == 1.0 else d_logits * config.scale
    d_keys = _weigh(config, d_logits, jnp.swapaxes(rows, -1, -2), SPLIT // 2)
    d_rows = product(keys_transposed, d_logits)
    return Gradients(d_rows, d_keys, d_values, jnp.swapaxes(d_bias, -1, -2), floats)
