"""Attention that materialises every score: the definition of correct.

Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2; grouped queries:
Ainslie et al., "GQA" (2023).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import dropout
from jaxmha.implementations.base import Request, Result, accumulation_dtype, allowed_pairs
from jaxmha.mask import Mask
from jaxmha.matmul import matmul, pairwise_sum


def supports(request: Request) -> str | None:
    """None: the reference supports everything."""
    return None


class Products(NamedTuple):
    """The two matmuls of attention; the last argument is the precision.

    Attributes:
      logits: queries `B T N H` and keys `B S K H` to `B N T S`.
      out: weights `B N T S` and values `B S K h` to `B T N h`.
    """

    logits: Callable[[jax.Array, jax.Array, Any], jax.Array]
    out: Callable[[jax.Array, jax.Array, Any], jax.Array]


def _logits(query: jax.Array, key: jax.Array, precision: Any) -> jax.Array:
    """The query heads of a group are rows of one matmul."""
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    rows = jnp.moveaxis(query.reshape(B, T, K, N // K, H), 1, 3).reshape(B, K, N // K * T, H)
    logits = matmul(rows, jnp.transpose(key, (0, 2, 3, 1)), precision=precision)
    return logits.reshape(B, N, T, S)


def _out(weights: jax.Array, value: jax.Array, precision: Any) -> jax.Array:
    (B, N, T, S), (K, h) = weights.shape, value.shape[2:]
    rows = weights.reshape(B, K, N // K * T, S)
    out = matmul(rows, jnp.moveaxis(value, 1, 2), precision=precision)
    return jnp.moveaxis(out.reshape(B, N, T, h), 1, 2)


HEAD_BY_HEAD = Products(_logits, _out)


def attend(
    request: Request, products: Products = HEAD_BY_HEAD, *, all_finite: bool = False
) -> Result:
    """Computes the request; intermediates are float32, or float64 for float64 inputs.

    `all_finite`: all operands are finite, so unattended keys and values need no zeroing: their
    weight of 0 suffices.
    """
    semantics = request.semantics
    (B, T, N, H), S = request.query.shape, request.value.shape[1]
    accumulate = accumulation_dtype(request.query.dtype)
    query, key, value = (x.astype(accumulate) for x in request[:3])
    bias = None if request.bias is None else request.bias.astype(accumulate)
    allowed = allowed_pairs(request.mask, bias, T, S)
    if allowed is not None and not all_finite:
        query, key, value = _drop_dead(query, key, value, allowed, semantics.fully_masked)

    precision = semantics.precision
    scale = H**-0.5 if semantics.scale is None else semantics.scale
    logits = products.logits(query * scale, key, precision)
    if semantics.logits_soft_cap is not None:
        logits = semantics.logits_soft_cap * jnp.tanh(logits / semantics.logits_soft_cap)
    if bias is not None:
        logits += bias
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    logits = logits.astype(np.dtype(semantics.softmax_dtype or accumulate))

    # A fully masked row has row max -inf and row sum 0; both are replaced to avoid NaN.
    highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=-jnp.inf))
    exps = jnp.exp(logits - jnp.where(highest == -jnp.inf, 0.0, highest).astype(logits.dtype))
    exps, highest = exps.astype(accumulate), highest.astype(accumulate)
    total = pairwise_sum(exps)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, highest + jnp.log(total))[..., 0]
    weights = exps / total
    if request.mask.query_lengths is not None:  # rows beyond a length are 0 under every policy
        there = Mask(query_lengths=request.mask.query_lengths).to_array(T, 1)
        empty &= there
    if semantics.fully_masked == "mean" and S:
        weights = jnp.where(empty, 1 / S, weights)

    kept = weights
    if request.dropout_key is not None and semantics.dropout_rate > 0:
        rate = semantics.dropout_rate
        draws = dropout.keep(
            request.dropout_key, rate, (B, N, T, S), semantics.dropout_broadcast, request.part
        )
        kept = jnp.where(draws, weights / (1 - rate), 0.0)
    out = products.out(kept, value, precision)
    if semantics.fully_masked == "nan":  # last, so that no gradient passes through a NaN
        out = jnp.where(jnp.swapaxes(empty, 1, 2), jnp.nan, out)
        weights, kept = (jnp.where(empty, jnp.nan, w) for w in (weights, kept))
    shown = {False: None, "before_dropout": weights, "after_dropout": kept}[request.return_weights]
    if shown is not None:
        shown = shown.astype(request.query.dtype)
    return Result(out.astype(request.query.dtype), shown, lse)


def _drop_dead(
    query: jax.Array, key: jax.Array, value: jax.Array, allowed: jax.Array, fully_masked: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Zeroes queries, keys and values without any allowed pair: 0 * NaN would reach outputs and
    gradients."""
    (_, T, N, _), (_, S, K, _) = query.shape, key.shape
    b, n = allowed.shape[:2]
    groups = allowed.reshape(b, *((K, N // K) if n == N else (1, 1)), T, S)
    query_lives = jnp.moveaxis(allowed.any(-1), 1, 2)[..., None]
    key_lives = jnp.moveaxis(groups.any((2, 3)), 1, 2)[..., None]
    query = jnp.where(query_lives, query, 0.0)
    key = jnp.where(key_lives, key, 0.0)
    if fully_masked != "mean":  # the mean reads every value
        value = jnp.where(key_lives, value, 0.0)
    return query, key, value
