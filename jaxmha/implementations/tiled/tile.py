"""One tile of scores: matmuls, masking and online softmax, forward and backward."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.matmul import matmul, pairwise_sum, sum_of_rows

LOWEST = {name: float(np.finfo(name).min) for name in ("float32", "float64")}


class Rules(NamedTuple):
    """Static config of tiled attention, other than the tiling.

    Attributes:
      window, above: static mask conditions.
      lse: whether the lse is returned.
      platform: selects the tile sizes.
      whole: N and T of the larger request that the arrays are a part of; None: they are the whole.
      sizes: overrides of the tile sizes.
      operands: dtype of matmul operands, exact for rows, keys and values; None: their own dtype.
      scale: factor of the logits that the rows do not include yet.
      transposed: whether the scores of `forward` are `[c] s r`, to round like those of `backward`.
    """

    soft_cap: float | None
    precision: Any
    window: tuple[int | None, int | None]
    above: int | None
    dropout_rate: float
    dropout_broadcast: tuple[str, ...]
    lse: bool
    platform: str
    whole: tuple[int, int] | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    operands: np.dtype[Any] | None = None
    scale: float = 1.0
    transposed: bool = False


class Running(NamedTuple):
    """Online-softmax state over the keys visited so far: output accumulator, row max, row sum."""

    out: jax.Array
    row_max: jax.Array
    row_sum: jax.Array


class Softmax(NamedTuple):
    """Output `B N T h`, row max and row sum `B N T 1`; output and row sum are 0 on fully masked
    rows.

    The backward pass reads row max and row sum separately: the lse is rounded to its own spacing,
    which for large logits is much coarser than that of a weight.
    """

    out: jax.Array
    row_max: jax.Array
    row_sum: jax.Array

    @property
    def lse(self) -> jax.Array:
        """`B N T`, -inf on fully masked rows."""
        return (self.row_max + jnp.log(self.row_sum))[..., 0]


def nothing_yet(rules: Rules, rows: jax.Array, h: int) -> Running:
    """The state before the first key, for rows `... r H`, or `... H r` if scores are transposed."""
    *lead, r, _ = jnp.swapaxes(rows, -1, -2).shape if rules.transposed else rows.shape
    shapes = ((*lead, d, r) if rules.transposed else (*lead, r, d) for d in (h, 1))
    out, zeros = (jnp.zeros_like(rows, shape=shape) for shape in shapes)
    return Running(out, jnp.full_like(zeros, LOWEST[rows.dtype.name]), zeros)


def forward(
    rules: Rules,
    rows: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask_or_bias: jax.Array | None,
    keep: jax.Array | None,
    before: Running | None,
) -> Running:
    """Folds one tile into the state `before`; None: there is no state yet.

    Scores are `[c] r s`, of rows `[c] r H`, keys `[c] H s` and values `[c] s h`. If transposed,
    they are `[c] s r`, by the same matmul as in `backward`, of rows `[c] H r`, keys `[c] s H` and
    values `[c] h s`.
    """
    product = partial(_product, rules)
    if rules.transposed:
        axis, keep = -2, None if keep is None else jnp.swapaxes(keep, -1, -2)
        logits, _ = _transposed_logits(rules, keys, rows, mask_or_bias)
    else:
        axis = -1
        logits, _ = _logits(rules, rows, keys, mask_or_bias)
    # The row max is finite even if all keys so far are masked: -inf - -inf would be NaN.
    lowest = LOWEST[rows.dtype.name] if before is None else before.row_max
    row_max = jnp.maximum(logits.max(axis, keepdims=True), lowest)
    exps = jnp.exp(logits - row_max)
    row_sum = sum_of_rows(exps) if rules.transposed else _sum(exps)
    if keep is not None:
        exps = jnp.where(keep, exps, 0.0)
    out = product(values, exps) if rules.transposed else product(exps, values)
    if before is None:
        return Running(out, row_max, row_sum)
    alpha = jnp.exp(before.row_max - row_max)
    return Running(before.out * alpha + out, row_max, before.row_sum * alpha + row_sum)


def _transposed_logits(
    rules: Rules, keys: jax.Array, rows: jax.Array, mask_or_bias: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Transposed logits `[c] s r`; the mask or bias tile is `[c] r s`."""
    if mask_or_bias is not None:
        mask_or_bias = jnp.swapaxes(mask_or_bias, -1, -2)
    return _logits(rules, keys, rows, mask_or_bias)


def _logits(
    rules: Rules, a: jax.Array, b: jax.Array, mask_or_bias: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Masked logits, and the tanh of the soft cap (None without a cap)."""
    logits, bent = _scaled(rules, _product(rules, a, b)), None
    if rules.soft_cap is not None:
        bent = jnp.tanh(logits / rules.soft_cap)
        logits = rules.soft_cap * bent
    if mask_or_bias is not None:
        logits = _masked(logits, mask_or_bias)
    return logits, bent


def _product(rules: Rules, a: jax.Array, b: jax.Array) -> jax.Array:
    if rules.operands is None:
        return matmul(a, b, precision=rules.precision)
    x, y = (x.astype(rules.operands) for x in (a, b))
    return matmul(x, y, precision="default", dtype=a.dtype)


def _scaled(rules: Rules, x: jax.Array) -> jax.Array:
    return x if rules.scale == 1.0 else x * rules.scale


def _masked(logits: jax.Array, mask_or_bias: jax.Array) -> jax.Array:
    # `where` is faster than adding: XLA would first materialise an additive mask.
    if mask_or_bias.dtype == bool:
        return jnp.where(mask_or_bias, logits, -jnp.inf)
    return logits + mask_or_bias


def _sum(exps: jax.Array) -> jax.Array:
    """Row sum; pairwise for small tiles, as in small matmuls."""
    if exps.size <= SMALL_SUM:
        return pairwise_sum(exps)
    return exps.sum(-1, keepdims=True)


SMALL_SUM = 2**14


def backward(
    rules: Rules,
    per_row: tuple[Any, ...],
    per_key: tuple[jax.Array, ...],
    mask_or_bias: jax.Array | None,
    keep: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Gradients of rows, keys, values and the bias tile; scores are transposed here, `[c] s r`.

    Rows and their gradients are `[c] H r`, so that each matmul has row-major operands; the output
    cotangent `slope` is `[c] r h`. If the row max is None, the tile has all keys of its rows; else
    the caller has divided `slope` and `shift` by the row sum and subtracted delta from `shift`.
    """
    rows, slope, row_max, shift = per_row
    keys, values, flipped = per_key
    product = partial(_product, rules)
    logits, bent = _transposed_logits(rules, keys, rows, mask_or_bias)
    whole = row_max is None
    if whole:  # the logits of `forward` may round differently
        row_max = jnp.maximum(logits.max(-2, keepdims=True), LOWEST[rows.dtype.name])
    else:  # bounds weights by 1 even if matmuls of one shape round differently
        row_max = jnp.swapaxes(row_max, -1, -2)
        logits = jnp.minimum(logits, row_max)
    exps = jnp.exp(logits - row_max)
    if whole:
        row_sum = sum_of_rows(exps)
        divisor = jnp.where(row_sum == 0, 1.0, row_sum)
        slope = slope / jnp.swapaxes(divisor, -1, -2)
    slopes = product(values, jnp.swapaxes(slope, -1, -2))
    dropped = exps
    if keep is not None:
        factor = jnp.where(jnp.swapaxes(keep, -1, -2), 1 / (1 - rules.dropout_rate), 0.0)
        factor = factor.astype(rows.dtype)
        dropped, slopes = exps * factor, slopes * factor
    value_slope = product(dropped, slope)
    shift = jnp.swapaxes(shift, -1, -2)
    if whole:  # delta from the same weights: gradients of a row's logits sum to 0
        shift = (shift - sum_of_rows(exps * slopes)) / divisor
    d_added = exps * (slopes + shift)
    d_logits = _scaled(rules, d_added if bent is None else d_added * (1 - bent * bent))
    key_slope = product(d_logits, jnp.swapaxes(rows, -1, -2))
    row_slope = product(flipped, d_logits)
    return row_slope, key_slope, value_slope, jnp.swapaxes(d_added, -1, -2)
