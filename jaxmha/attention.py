"""Scaled dot-product attention."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Integer, PRNGKeyArray

from jaxmha import checks, implementations, limits, sharding, traced_scale
from jaxmha.arrays import Array, DTypeLike, require_arrays
from jaxmha.attention_options import Options, hashable, retraced
from jaxmha.dims import bind
from jaxmha.explicit_sharding import by_types, sharding_of_heads
from jaxmha.implementations.base import Request, Result, simplified
from jaxmha.implementations.sinks import with_sinks
from jaxmha.mask import Mask
from jaxmha.mask_arguments import KEYWORDS, as_mask, mask_of_keywords
from jaxmha.mod_arguments import MaskMod, Mods, ScoreMod, checked, traced_mods
from jaxmha.semantics import FullyMasked, Precision, ReturnWeights, Semantics
from jaxmha.static_checks import flag


@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K h"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K h"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    *,
    return_weights: Literal[True, "before_dropout", "after_dropout"],
    return_lse: Literal[False] = False,
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K h"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    *,
    return_weights: Literal[True, "before_dropout", "after_dropout"],
    return_lse: Literal[True],
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K h"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[True],
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K h"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K h"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    *,
    return_weights: ReturnWeights = False,
    return_lse: bool = False,
    return_residual: bool = False,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, ...]: ...
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K h"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Integer[Array, "*B"] | None = None,
    key_value_seq_lengths: Integer[Array, "*B"] | None = None,
    local_window_size: int | Sequence[int | None] | None = None,
    segment_ids: Integer[Array, "*B T"]
    | tuple[Integer[Array, "*B T"], Integer[Array, "*B S"]]
    | None = None,
    logits_soft_cap: float | None = None,
    fully_masked: FullyMasked = "zero",
    softmax_dtype: DTypeLike | None = None,
    precision: Precision = None,
    dropout_rate: float = 0.0,
    dropout_broadcast: tuple[str, ...] = (),
    dropout_key: PRNGKeyArray | None = None,
    sinks: Float[Array, "N"] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    return_weights: ReturnWeights = False,
    return_lse: bool = False,
    return_residual: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Softmax-weighted values: `softmax(scale * query @ key + bias) @ value`, per head.

    It takes the arguments of `jax.nn.dot_product_attention` in the same order and layout, and more;
    see [the differences](../how_to/jax_nn.md). `fully_masked` defines the output of fully
    masked rows. Unattended keys do not affect any result, even if they hold NaN, except under
    `fully_masked="mean"`, which reads all values.

    Args:
      query: `(B, T, N, H)` or `(T, N, H)`.
      key: `(B, S, K, H)`; query head n reads key/value head `n // (N // K)`.
      value: `(B, S, K, h)`; sums of S values must fit float32 (float64 for float64 inputs), except
        in `reference` and `few_queries`.
      bias: added to the logits, broadcastable to `(B, N, T, S)`; -inf excludes the pair.
      mask: Boolean, broadcastable to `(B, N, T, S)`, True = attend; or a `Mask`.
      scale: factor of the logits, default `H ** -0.5`. An array of shape (), such as a learned
        temperature, may be traced and has a gradient; half precision is then computed in float32.
      is_causal: query i attends keys j <= i (aligned top-left; `Mask.causal(offset)` otherwise).
      query_seq_lengths: `(B,)`, number of valid queries; output rows beyond it are 0.
      key_value_seq_lengths: `(B,)`, number of valid keys; keys beyond it are excluded. Lengths are
        clipped to `[0, S]`, those of queries to `[0, T]`.
      local_window_size: w or (left, right): `i - left <= j <= i + right`.
      segment_ids: `(B, T)` for all positions, or a pair `(B, T)`, `(B, S)`; only equal ids attend.
      logits_soft_cap: c: scaled logits x become `c * tanh(x / c)`, before the bias.
      fully_masked: output of a fully masked row: `zero`, `nan` or `mean` of the values.
      softmax_dtype: dtype of the softmax, default float32, or float64 for float64 inputs.
      precision: precision of both matmuls; None: `jax_default_matmul_precision` if that is set,
        else `highest`.
      dropout_rate: probability that a weight is dropped; has no effect without a `dropout_key`.
      dropout_broadcast: axes of BNTS along which the dropout mask is the same.
      dropout_key: a PRNG key.
      sinks: `(N,)`, a learned logit per head that takes part in the softmax of every query and has
        no value: weights sum to less than 1, a fully masked row is 0, and lse and residual include
        the sink.
      score_mod: `score_mod(score, b, n, i, j)` returns the score of query i and key j in head n of
        batch row b, after scale, soft cap and bias, before the masks. See
        [score and mask functions](../how_to/mods.md).
      mask_mod: `mask_mod(b, n, i, j)` returns True where query i may attend key j.
      return_weights: also return the weights `(B, N, T, S)`: `"before_dropout"` (= True) or
        `"after_dropout"`.
      return_lse: also return the log-sum-exp of the logits `(B, N, T)` in float32 (float64 for
        float64 inputs), -inf on fully masked rows. It has a gradient.
      return_residual: also return the log-sum-exp as `jax.nn` does: `(B, T, N)`, in the dtype of
        out, without a gradient, and -2.38e38 on fully masked rows (-inf in float16, if a bias alone
        excludes their keys, and in calls without a mask if `mask_mod` or `score_mod` does).
      implementation: name, or names in order of preference; None: the first that supports the call.

    Returns:
      `out[, weights][, lse][, residual]`; out is `(B, T, N, h)` in the promoted dtype of the
      inputs.

    Raises:
      ValueError: a shape or value does not fit; names the argument, the axes and the shape.
      TypeError: a dtype does not fit, or float64 would be rounded because x64 is off.

    >>> import jax.numpy as jnp
    >>> q, k, v = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 7, 2, 8)), jnp.ones((2, 7, 2, 3))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (2, 5, 4, 3)
    >>> _, residual = dot_product_attention(q, k, v, return_residual=True)
    >>> residual.shape
    (2, 5, 4)
    """
    require_arrays(query=query, key=key, value=value)
    require_arrays(optional=True, bias=bias, sinks=sinks)
    if dropout_key is not None:
        checks.prng_key("dropout_key", dropout_key)
    checks.reject_rounding(query=query, key=key, value=value, bias=bias, sinks=sinks)
    known_scale, traced = traced_scale.split(scale)
    semantics = Semantics(
        scale=known_scale,
        logits_soft_cap=logits_soft_cap,
        fully_masked=fully_masked,
        softmax_dtype=softmax_dtype,
        precision=precision,
        dropout_rate=dropout_rate,
        dropout_broadcast=dropout_broadcast,
    )
    returned = Returned(
        checks.weights_kind(return_weights),
        flag("return_lse", return_lse),
        flag("return_residual", return_residual),
    )
    keywords = mask_of_keywords(
        flag("is_causal", is_causal),
        query_seq_lengths,
        key_value_seq_lengths,
        local_window_size,
        segment_ids,
    )
    mods = Mods()
    if score_mod is not None or mask_mod is not None:
        dtype = checks.promoted(query=query, key=key, value=value)
        mods = traced_mods(score_mod, mask_mod, dtype)
    attention = retraced(
        _dot_product_attention, returned=returned, implementation=hashable(implementation)
    )
    with implementations.forward_mode():
        found: jax.Array | tuple[jax.Array, ...] = attention(
            query,
            key,
            value,
            bias,
            as_mask(mask),
            keywords,
            traced,
            dropout_key,
            semantics,
            sinks,
            mods,
        )
    return found


class Returned(NamedTuple):
    """Results requested in addition to the output; fields are named as the `return_` arguments."""

    weights: ReturnWeights
    lse: bool
    residual: bool


def _output_specs(
    query: jax.Array, *_: object, returned: Returned, **__: object
) -> tuple[sharding.Axes, object] | None:
    found = sharding_of_heads(query)
    if found is None:
        return None
    more = [found.scores] * (bool(returned.weights) + returned.lse)
    more += [found.heads] * returned.residual
    return found.axes, (found.heads, *more) if more else found.heads


@partial(jax.jit, static_argnames=("returned", "implementation"))
@by_types(_output_specs)
def _dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: Mask,
    keywords: Mask,
    scale: jax.Array | None,
    dropout_key: PRNGKeyArray | None,
    semantics: Semantics,
    sinks: jax.Array | None,
    mods: Mods,
    *,
    returned: Returned,
    implementation: str | tuple[str, ...] | None,
) -> jax.Array | tuple[jax.Array, ...]:
    if query.ndim not in (3, 4):
        raise ValueError(f"query: expected axes (B, T, N, H) or (T, N, H), got {query.shape}")
    lead = "B " * (query.ndim - 3)
    sizes: dict[str, int] = {}
    bind("query", query.shape, f"{lead}T N H", sizes)
    bind("key", key.shape, f"{lead}S K H", sizes)
    bind("value", value.shape, f"{lead}S K h", sizes)
    if sinks is not None:
        bind("sinks", sinks.shape, "N", sizes)
        checks.promoted(sinks=sinks)
    batch = query.shape[:-3]
    dtype = checks.promoted(query=query, key=key, value=value)
    query, key, value = (
        x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value)
    )
    merged = checks.flatten_mask(mask, batch, sizes) & checks.flatten_mask(
        keywords, batch, sizes, KEYWORDS
    )
    bias = None if bias is None else checks.flatten_bias(bias, batch, sizes)
    if scale is not None:
        query, key, value = traced_scale.scaled(scale, (query, key, value), bias, merged, mods.mask)
    out, weights, lse = attend(
        query,
        key,
        value,
        bias,
        merged,
        semantics,
        dropout_key,
        returned.weights,
        implementation,
        return_lse=returned.lse or returned.residual,
        sinks=sinks,
        mods=mods,
    )
    found = [out.astype(dtype)]
    if weights is not None:
        found.append(weights.astype(dtype))
    if returned.lse and lse is not None:
        found.append(lse)
    if returned.residual and lse is not None:
        found.append(_residual(lse, bias, merged, sizes, dtype))
    found = [x.reshape(*batch, *x.shape[1:]) for x in found]
    return tuple(found) if len(found) > 1 else found[0]


def _residual(
    lse: jax.Array,
    bias: jax.Array | None,
    mask: Mask,
    sizes: dict[str, int],
    dtype: np.dtype[np.floating],
) -> jax.Array:
    """The lse as `jax.nn` returns it, where masks set logits to a finite float32 constant, not -inf."""
    if not mask.empty:
        masked = lse == -jnp.inf
        if bias is not None:  # rows that only a bias of -inf masks are -inf in jax.nn too
            some = ~jnp.asarray(mask.to_array(sizes["T"], sizes["S"])).all(-1)
            masked &= sharding.in_order(some, 2)
        lse = jnp.where(masked, -0.7 * float(np.finfo(np.float32).max), lse)
    return jax.lax.stop_gradient(jnp.moveaxis(lse, 1, 2).astype(dtype))


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: Mask,
    semantics: Semantics,
    dropout_key: PRNGKeyArray | None,
    return_weights: ReturnWeights,
    implementation: str | Sequence[str] | None,
    *,
    return_lse: bool = False,
    sinks: Array | None = None,
    mods: Mods = Mods(),
) -> Result:
    """Attention on checked arrays with one batch axis, computed by the selected implementation.

    `sinks`: `(N,)`, one logit per head that takes part in the softmax of every query and has no
    value.
    """
    N = query.shape[2]
    checks.check_groups(query, key)
    if query.shape[3] == 0:
        raise ValueError(f"head size H must be at least 1: query is (B, T, N, H) = {query.shape}")
    limits.check(semantics, query.dtype)
    if sinks is not None:  # a row without keys has all its weight on the sink: its output is 0
        semantics = replace(semantics, fully_masked="zero")
    B, T, S = *query.shape[:2], key.shape[1]
    score_mod, mask_mod = checked(mods, {"B": B, "T": T, "N": N, "S": S})
    if mask_mod is not None:
        from jaxmha.implementations.structure import as_structure  # its imports take time

        mask, mask_mod = as_structure(mask, mask_mod, query.shape, S)
    request = Request(
        query,
        key,
        value,
        limits.clipped(bias, query.dtype),
        simplified(mask),
        semantics,
        dropout_key,
        return_weights,
        return_lse or sinks is not None,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    out, weights, lse = implementations.attend(request, implementation)
    if sinks is not None:
        assert lse is not None
        out, weights, lse = with_sinks(Result(out, weights, lse), lse, sinks)
    out = checkpoint_name(out, "attention_out")  # type: ignore[no-untyped-call]
    if lse is not None:
        lse = checkpoint_name(lse, "attention_lse")  # type: ignore[no-untyped-call]
    return Result(out, weights, lse)
