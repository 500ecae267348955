"""One tile of scores: matmuls, masking and online softmax, forward and backward.

Axes: `*c` key/value heads of all batch rows of the tile, absent if there is one; `r` rows (query
positions of every query head of a group); `s` keys; H and h features.
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

# In tiles with at most SMALL_SUM scores, more exact sums take little time: row sums of scores `r s`
# are added pairwise, and delta is subtracted twice in tiles with all keys.
SMALL_SUM = 2**14
# On CPUs, `_weigh` splits a sum of more than 2 * RUN terms into runs of RUN terms if the matmul has
# at most SPLIT multiplications (half as many for the gradient of keys).
RUN, SPLIT = 128, 2**24


class Config(NamedTuple):
    """Static config of tiled attention, other than the tiling.

    Attributes:
      soft_cap: cap of the logits; None: no cap.
      precision: of matmuls if `operands` is None.
      window, above: static mask conditions, as in `Conditions`.
      dropout_rate: probability of dropping a weight.
      dropout_broadcast: axes of BNTS along which all weights share a draw.
      lse: whether the lse is returned.
      platform: selects the tuning table, and `feature_order` and split sums for CPUs.
      whole: N and T of the request that the arrays are a part of, for dropout; None: their own.
      sizes: values of `target`, `least_rows` and `side` in `choose_tiling`, instead of the table's.
      operands: dtype to which matmul operands are rounded; rows, keys and values lose nothing.
        float16: to its significand in the range of float32 (`matmul_of_float16`). None: they keep
        their dtype.
      scale: factor of the logits by which the rows are not multiplied yet.
      transposed: whether the scores of the forward pass are `s r`, and so round like the scores of
        the backward pass. Without a gradient, or with one KV tile, they are `r s`: XLA:CPU takes up
        to 1.9 times as long for matmuls with the values on the left.
      partition: whether XLA's partitioner may split the program (`partitioned.may_partition`), found
        once: the gradient is traced later, outside of `sharding.use` and `by_types`.
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
    partition: bool = False


class Modifier(NamedTuple):
    """A score function, bound to the tile `extent` whose logits it changes."""

    mod: Mod
    extent: Extent

    def scores(self, transposed: bool, logits: jax.Array, floats: Floats) -> jax.Array:
        """Applies the score function to logits, `*c s r` if `transposed`, else `*c r s`.

        `floats` are its captured floating arrays, given apart to be differentiated.
        """
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
    """Folds one tile into the online-softmax state `before`, which is None for a first tile.

    `keep`: True for weights that dropout keeps; row sums count all weights; None: no dropout.
    """
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
    """`forward` with scores `s r` and a transposed state, but mask and `keep` in `r s`: logits then
    round as in `backward`, which computes them by the same matmul."""
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
    """Logits `a @ b` after scale, soft cap, bias, score function (if any) and mask.

    `transposed`: `a` has the keys and `b` the rows; else `a` has the rows.
    """
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
    """Logits `a @ b` after scale, soft cap, and mask or bias, before any score function; and the
    tanh of the soft cap (None without a cap)."""
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
    """The logits that a score function reads, tanh of the soft cap (None without a cap), and the
    allowed pairs (None: all).

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
    """Excludes the rows and keys of a tile beyond T and S from the allowed pairs (None: all), and
    gives them the logits of the last row or key within. At other logits a score function may have
    an infinite derivative, and inf times the cotangent 0 is NaN."""
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
    """`a @ b`, summed over keys or rows; `a` or `b` holds exponentials or gradients of logits.

    On a CPU, matmuls of at most `most` multiplications are split into runs of terms, whose results
    are added pairwise: XLA:CPU adds the terms of a sum one by one, and rounding errors of a long
    sum do not cancel if its terms have one sign. In small tiles a split costs little time.
    """
    terms, sizes = a.shape[-1], (*a.shape, b.shape[-1])
    split = config.platform == "cpu" and all(isinstance(size, int) for size in sizes)
    if not split or terms <= 2 * RUN or math.prod(sizes) > most:
        return _matmul(config, a, b)
    runs = [slice(start, start + RUN) for start in range(0, terms, RUN)]
    sums = [_matmul(config, a[..., run], b[..., run, :]) for run in runs]
    return add_pairwise(sums)


def _row_sum(exps: Float[jax.Array, "*c r s"]) -> Float[jax.Array, "*c r 1"]:
    return pairwise_sum(exps) if exps.size <= SMALL_SUM else online_softmax.row_sum(exps)


class Cotangents(NamedTuple):
    """Inputs of the backward pass per row, other than the queries.

    Attributes:
      d_out: cotangent of the output.
      row_max: row max of the forward pass, inf in fully masked rows. If it is None, the tile holds
        all keys of its rows, and `backward` computes row max, row sum and delta.
      minus_delta: cotangent of the lse minus delta, where delta is the sum of `out * d_out` over
        each row. If `row_max` is None, this is the cotangent of the lse alone. Otherwise this and
        `d_out` are already divided by the row sum.
    """

    d_out: Float[jax.Array, "*c r h"]
    row_max: Float[jax.Array, "*c r 1"] | None
    minus_delta: Float[jax.Array, "*c r 1"]


class Gradients(NamedTuple):
    """Gradients of one tile: of rows (transposed), keys, values, the bias (a bias of 0 if there is
    none), and the floating arrays that a score function captures."""

    rows: Float[jax.Array, "*c H r"]
    keys: Float[jax.Array, "*c s H"]
    values: Float[jax.Array, "*c s h"]
    bias: Float[jax.Array, "*c r s"]
    floats: Floats


@jax.custom_jvp
def _clip(logits: Float[jax.Array, "*c s r"], row_max: jax.Array) -> Float[jax.Array, "*c s r"]:
    """The smaller of both, with the derivative of the logits: that of `minimum` at equal numbers, as
    of the largest logit, is half of it, and second derivatives would be wrong."""
    return jnp.minimum(logits, row_max)


@_clip.defjvp
def _clip_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _clip(*primals), tangents[0]


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
    """Gradients of one tile. Scores are `s r` here, so that no matmul transposes scores; mask and
    `keep` (True: kept; None: no dropout) are `r s`."""
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
    excluded = logits == -jnp.inf
    whole = row_max is None
    if row_max is None:  # computed here: the forward pass may round logits in another way
        row_max = jnp.maximum(logits.max(-2, keepdims=True), LOWEST[rows.dtype.name])
        row_max = jax.lax.stop_gradient(row_max)  # gradients do not depend on it
    else:  # recomputed logits may round above row_max; clipping keeps exps <= 1
        row_max = jnp.swapaxes(row_max, -1, -2)
        logits = _clip(logits, row_max)
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
    if whole:  # subtracts delta of the recomputed weights: exps * d_weights then sum to 0 in a row
        d_weights -= sum_of_rows(exps * d_weights) / divisor
        if exps.size <= SMALL_SUM:  # delta subtracted once leaves its rounding error
            d_weights -= sum_of_rows(exps * d_weights) / divisor
        minus_delta /= divisor
    d_bias = exps * (d_weights + minus_delta)
    if mask_or_bias is not None:  # weights or d_weights of an excluded pair may be NaN
        d_bias = jnp.where(excluded | (exps == 0.0), 0.0, d_bias)
    floats: Floats = ()
    if pull is not None:
        d_bias, floats = pull(d_bias)
        d_bias = d_bias if allowed is None else jnp.where(allowed, d_bias, 0.0)
    d_logits = d_bias
    if tanh is not None:  # NaN in an excluded pair: 0 * NaN is NaN
        d_logits = jnp.where(d_bias == 0.0, 0.0, d_bias * (1 - tanh * tanh))
    d_logits = d_logits if config.scale == 1.0 else d_logits * config.scale
    d_keys = _weigh(config, d_logits, jnp.swapaxes(rows, -1, -2), SPLIT // 2)
    d_rows = product(keys_transposed, d_logits)
    return Gradients(d_rows, d_keys, d_values, jnp.swapaxes(d_bias, -1, -2), floats)
