"""Attention that materialises every score; tests compare the other implementations with it.

Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2; grouped queries:
Ainslie et al., "GQA" (2023).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxmha import dropout
from jaxmha.arrays import to_dtype
from jaxmha.implementations import fully_masked, mods
from jaxmha.implementations.base import Request, Result, accumulation_dtype, allowed_pairs
from jaxmha.implementations.mods import Extent
from jaxmha.implementations.online_softmax import cap_and_mask, rounded
from jaxmha.mask import Mask
from jaxmha.matmul import matmul, pairwise_sum
from jaxmha.semantics import Precision


def unsupported_reason(request: Request) -> str | None:
    """Returns None: the reference supports every request."""
    return None


class Matmuls(NamedTuple):
    """The two matmuls of attention, as functions of two arrays and a precision.

    Attributes:
      query_key: queries `B T N H` and keys `B S K H` to `B N T S`.
      weights_value: weights `B N T S` and values `B S K h` to `B T N h`.
    """

    query_key: Callable[[jax.Array, jax.Array, Precision], jax.Array]
    weights_value: Callable[[jax.Array, jax.Array, Precision], jax.Array]


def _query_key(
    query: Float[jax.Array, "B T N H"], key: Float[jax.Array, "B S K H"], precision: Precision
) -> Float[jax.Array, "B N T S"]:
    """Multiplies queries and keys; all queries of a group of heads are rows of one matmul."""
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    rows = jnp.moveaxis(query.reshape(B, T, K, N // K, H), 1, 3).reshape(B, K, N // K * T, H)
    logits = matmul(rows, jnp.transpose(key, (0, 2, 3, 1)), precision=precision)
    return logits.reshape(B, N, T, S)


def _weights_value(
    weights: Float[jax.Array, "B N T S"], value: Float[jax.Array, "B S K h"], precision: Precision
) -> Float[jax.Array, "B T N h"]:
    (B, N, T, S), (K, h) = weights.shape, value.shape[2:]
    rows = weights.reshape(B, K, N // K * T, S)
    out = matmul(rows, jnp.moveaxis(value, 1, 2), precision=precision)
    return jnp.moveaxis(out.reshape(B, N, T, h), 1, 2)


HEAD_BY_HEAD = Matmuls(_query_key, _weights_value)


def attend(
    request: Request, matmuls: Matmuls = HEAD_BY_HEAD, *, all_finite: bool = False
) -> Result:
    """Computes the request.

    Intermediates are float32, or float64 for float64 queries; the logits and their exponentials are
    in `softmax_dtype` if that is given. `matmuls`: how the two matmuls are computed. `all_finite`:
    assumes that all operands are finite, and so does not zero queries, keys and values without an
    allowed pair: a weight of 0 is enough to exclude them.
    """
    semantics = request.semantics
    (B, T, N, _), S = request.query.shape, request.value.shape[1]
    accumulate = accumulation_dtype(request.query.dtype)
    query, key, value = (x.astype(accumulate) for x in request[:3])
    bias = None if request.bias is None else request.bias.astype(accumulate)
    allowed = allowed_pairs(request.mask, bias, T, S, request.mask_mod, (B, N))
    if allowed is not None and not all_finite:
        query, key, value = _zero_unattended(query, key, value, allowed)

    logits = matmuls.query_key(query * request.scale, key, semantics.precision)
    if request.score_mod is None:
        logits, _ = cap_and_mask(logits, semantics.logits_soft_cap, bias, allowed)
    else:
        logits, _ = cap_and_mask(logits, semantics.logits_soft_cap, bias)
        logits = _modified(request, logits, allowed)
    logits = logits.astype(to_dtype(semantics.softmax_dtype or accumulate))
    weights, lse, masked = _softmax(logits, accumulate)
    if request.mask.query_lengths is not None:  # rows beyond a length are 0 under every policy
        masked &= Mask(query_lengths=request.mask.query_lengths).to_array(T, 1)
    mean = semantics.fully_masked == "mean" and S
    if mean:
        weights = jnp.where(masked, 1 / S, weights)

    kept = _drop(request, weights)
    out = matmuls.weights_value(kept, value, semantics.precision)
    if mean and allowed is not None and not all_finite:
        out = _with_means(request, matmuls, kept, masked, out)
    if semantics.fully_masked == "nan":  # NaN is put in last, so that no gradient passes through it
        out = jnp.where(jnp.swapaxes(masked, 1, 2), jnp.nan, out)
        weights, kept = (jnp.where(masked, jnp.nan, w) for w in (weights, kept))
    returned = {False: None, "before_dropout": weights, "after_dropout": kept}
    shown = returned[request.return_weights]
    if shown is not None:
        shown = shown.astype(request.query.dtype)
    return Result(out.astype(request.query.dtype), shown, lse)


def _with_means(
    request: Request,
    matmuls: Matmuls,
    kept: Float[jax.Array, "B N T S"],
    masked: Bool[jax.Array, "B N T 1"],
    out: Float[jax.Array, "B T N h"],
) -> Float[jax.Array, "B T N h"]:
    """Replaces the rows of `out` where `masked` is True by means over the original values: `out` was
    computed with unattended values set to 0. Other rows keep `out`, so that a NaN in an unattended
    value does not reach them. `kept`: weights after dropout, which weigh these means."""
    rows = jnp.swapaxes(masked, 1, 2)
    if not request.drops:
        return fully_masked.apply(request, out, rows[..., 0])
    weights, value = jnp.where(masked, kept, 0.0), request.value.astype(out.dtype)
    return jnp.where(rows, matmuls.weights_value(weights, value, request.semantics.precision), out)


def _modified(
    request: Request, logits: Float[jax.Array, "B N T S"], allowed: Bool[jax.Array, "..."] | None
) -> Float[jax.Array, "B N T S"]:
    """Applies `score_mod`, and sets the result to -inf where `allowed` is False (None: nowhere). The
    function gets 0 for these pairs, since NaN or -inf, times a cotangent of 0, would make gradients
    NaN."""
    mod = request.score_mod
    assert mod is not None
    B, N, T, S = logits.shape
    extent = Extent((0, 0, 0, 0), (B, N, T, S), T, S)
    if allowed is None:
        return rounded(mods.scores(mod, extent, logits, mod.floats))
    found = mods.scores(mod, extent, jnp.where(allowed, logits, 0.0), mod.floats)
    return jnp.where(allowed, rounded(found), -jnp.inf)


def _softmax(
    logits: Float[jax.Array, "B N T S"], accumulate: np.dtype[np.floating]
) -> tuple[Float[jax.Array, "B N T S"], Float[jax.Array, "B N T"], Bool[jax.Array, "B N T 1"]]:
    """Weights, log-sum-exp, and True for fully masked rows, whose weights are 0 and lse -inf. Weights
    and log-sum-exp have the dtype `accumulate`."""
    # A fully masked row has row max -inf and row sum 0; both are replaced to avoid NaN.
    row_max = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=-jnp.inf))
    exps = jnp.exp(logits - jnp.where(row_max == -jnp.inf, 0.0, row_max).astype(logits.dtype))
    exps, row_max = exps.astype(accumulate), row_max.astype(accumulate)
    row_sum = pairwise_sum(exps)
    masked = row_sum == 0
    row_sum = jnp.where(masked, 1.0, row_sum)
    lse = jnp.where(masked, -jnp.inf, row_max + jnp.log(row_sum))[..., 0]
    return exps / row_sum, lse, masked


def _drop(request: Request, weights: Float[jax.Array, "B N T S"]) -> Float[jax.Array, "B N T S"]:
    """Sets dropped weights to 0 and divides the others by the probability that a weight is kept.
    Returns all unchanged if the request has no dropout."""
    if request.dropout_key is None or not request.drops:
        return weights
    B, N, T, S = weights.shape
    rate, broadcast = request.semantics.dropout_rate, request.semantics.dropout_broadcast
    keep = dropout.keep(request.dropout_key, rate, (B, N, T, S), broadcast, request.part)
    return jnp.where(keep, weights / (1 - rate), 0.0)


def _zero_unattended(
    query: Float[jax.Array, "B T N H"],
    key: Float[jax.Array, "B S K H"],
    value: Float[jax.Array, "B S K h"],
    allowed: Bool[jax.Array, "b n T S"],
) -> tuple[Float[jax.Array, "B T N H"], Float[jax.Array, "B S K H"], Float[jax.Array, "B S K h"]]:
    """Zeroes queries, keys and values without any allowed pair: NaN in them, times a weight of 0,
    would reach outputs and gradients."""
    (_, T, N, _), (_, S, K, _) = query.shape, key.shape
    b, n = allowed.shape[:2]
    groups = allowed.reshape(b, *((K, N // K) if n == N else (1, 1)), T, S)
    attended_rows = jnp.moveaxis(allowed.any(-1), 1, 2)[..., None]
    attended_keys = jnp.moveaxis(groups.any((2, 3)), 1, 2)[..., None]
    query = jnp.where(attended_rows, query, 0.0)
    key, value = (jnp.where(attended_keys, x, 0.0) for x in (key, value))
    return query, key, value
