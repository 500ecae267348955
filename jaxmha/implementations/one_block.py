"""One block of scores: products, softmax and what lies between, forward and backward."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.products import matmul, pairwise_sum

LOWEST = {name: float(np.finfo(name).min) for name in ("float32", "float64")}


class Rules(NamedTuple):
    """What is static beside the cut.

    Attributes:
      window, above: conditions that are numbers.
      lse: whether anyone reads it.
      platform: for which blocks are cut.
      whole: N and T, where the arrays are a part of something larger.
      sizes: of blocks, where they are not those of the rule.
      operands: dtype of what is multiplied, which loses nothing of rows, keys and values; None:
        their own.
      scale: of the logits, beside what the rows have of it.
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


class Running(NamedTuple):
    """Of the keys visited so far: weighted values, highest logit, and sum of exponentials."""

    out: jax.Array
    highest: jax.Array
    total: jax.Array


def nothing_yet(rows: jax.Array, h: int) -> Running:
    *lead, _ = rows.shape
    out, zeros = (jnp.zeros_like(rows, shape=(*lead, d)) for d in (h, 1))
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
    """One block more: rows `[c] r H`, keys `[c] H s`, values `[c] s h`."""
    logits = _scaled(rules, _product(rules, rows, keys))
    if rules.soft_cap is not None:
        logits = rules.soft_cap * jnp.tanh(logits / rules.soft_cap)
    if mask_or_bias is not None:
        logits = _masked(logits, mask_or_bias)
    # Never -inf: a row without keys so far would be -inf - -inf, which is NaN.
    lowest = LOWEST[rows.dtype.name] if before is None else before.highest
    highest = jnp.maximum(logits.max(-1, keepdims=True), lowest)
    exps = jnp.exp(logits - highest)
    total = _sum(exps)
    if keep is not None:
        exps = jnp.where(keep, exps, 0.0)
    out = _product(rules, exps, values)
    if before is None:
        return Running(out, highest, total)
    shrink = jnp.exp(before.highest - highest)
    return Running(before.out * shrink + out, highest, before.total * shrink + total)


def _product(rules: Rules, a: jax.Array, b: jax.Array) -> jax.Array:
    if rules.operands is None:
        return matmul(a, b, precision=rules.precision)
    x, y = (x.astype(rules.operands) for x in (a, b))
    return matmul(x, y, precision="default", dtype=a.dtype)


def _scaled(rules: Rules, x: jax.Array) -> jax.Array:
    return x if rules.scale == 1.0 else x * rules.scale


def _masked(logits: jax.Array, mask_or_bias: jax.Array) -> jax.Array:
    # XLA takes longer to add what it must first make of a mask.
    if mask_or_bias.dtype == bool:
        return jnp.where(mask_or_bias, logits, -jnp.inf)
    return logits + mask_or_bias


def _sum(exps: jax.Array) -> jax.Array:
    """Pairwise while the block is small, as products are."""
    if exps.size <= SMALL_SUM:
        return pairwise_sum(exps)
    return exps.sum(-1, keepdims=True)


SMALL_SUM = 2**14


def backward(
    rules: Rules,
    per_row: tuple[jax.Array, ...],
    per_key: tuple[jax.Array, ...],
    mask_or_bias: jax.Array | None,
    keep: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Slopes of rows, keys, values and added logits; scores are `[c] s r` in here.

    Rows and their slopes come and go as `[c] H r`, so that each product has row-major operands; the
    slopes of the output are `[c] r h`.
    """
    rows, slope, lse, shift = per_row
    keys, values, flipped = per_key
    product = partial(_product, rules)
    logits = _scaled(rules, product(keys, rows))
    bent = None
    if rules.soft_cap is not None:
        bent = jnp.tanh(logits / rules.soft_cap)
        logits = rules.soft_cap * bent
    if mask_or_bias is not None:
        logits = _masked(logits, jnp.swapaxes(mask_or_bias, -1, -2))
    weights = jnp.exp(logits - jnp.swapaxes(lse, -1, -2))
    slopes = product(values, jnp.swapaxes(slope, -1, -2))
    dropped = weights
    if keep is not None:
        factor = jnp.where(jnp.swapaxes(keep, -1, -2), 1 / (1 - rules.dropout_rate), 0.0)
        factor = factor.astype(rows.dtype)
        dropped, slopes = weights * factor, slopes * factor
    value_slope = product(dropped, slope)
    d_added = weights * (slopes + jnp.swapaxes(shift, -1, -2))
    d_logits = _scaled(rules, d_added if bent is None else d_added * (1 - bent * bent))
    key_slope = product(d_logits, jnp.swapaxes(rows, -1, -2))
    row_slope = product(flipped, d_logits)
    return row_slope, key_slope, value_slope, jnp.swapaxes(d_added, -1, -2)
