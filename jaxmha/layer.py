"""Multi-head attention: project, attend, combine."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, PRNGKeyArray

from jaxmha import bias_kv, checks, sharding
from jaxmha.arrays import Array, require_arrays
from jaxmha.attention import attend
from jaxmha.attention_axes import axes_of
from jaxmha.attention_options import hashable, retraced
from jaxmha.explicit_sharding import by_types, layer_specs
from jaxmha.implementations import forward_mode
from jaxmha.implementations.mods import Mod
from jaxmha.implementations.tiled.attended import attended_positions
from jaxmha.mask import Mask
from jaxmha.mask_arguments import as_mask, with_window
from jaxmha.mod_arguments import (
    MaskMod,
    ModFunctions,
    Mods,
    ScoreMod,
    checked,
    traced_mods,
    without_extras,
)
from jaxmha.params import MHAParams
from jaxmha.projections import check_inputs, combine_checked, distinct, project_checked
from jaxmha.semantics import FullyMasked, ReturnWeights, Semantics
from jaxmha.static_checks import flag


@overload
def multi_head_attention(
    params: MHAParams,
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"] | None = None,
    value: Float[Array, "*B S Dv"] | None = None,
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    is_causal: bool = False,
    semantics: Semantics = Semantics(),
    dropout_key: PRNGKeyArray | None = None,
    return_weights: Literal[False] = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array: ...
@overload
def multi_head_attention(
    params: MHAParams,
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"] | None = None,
    value: Float[Array, "*B S Dv"] | None = None,
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    is_causal: bool = False,
    semantics: Semantics = Semantics(),
    dropout_key: PRNGKeyArray | None = None,
    return_weights: Literal[True, "before_dropout", "after_dropout"],
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def multi_head_attention(
    params: MHAParams,
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"] | None = None,
    value: Float[Array, "*B S Dv"] | None = None,
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    is_causal: bool = False,
    semantics: Semantics = Semantics(),
    dropout_key: PRNGKeyArray | None = None,
    return_weights: ReturnWeights,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def multi_head_attention(
    params: MHAParams,
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*Bk S Dk"] | None = None,
    value: Float[Array, "*Bk S Dv"] | None = None,
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    is_causal: bool = False,
    semantics: Semantics = Semantics(),
    dropout_key: PRNGKeyArray | None = None,
    return_weights: ReturnWeights = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """A whole attention layer: `combine(params, attend(project(params, query, key, value)))`.

    `params.sinks` and `params.gate` are applied unless they are None.

    Args:
      params: the weights; all sizes are read from their shapes.
      query: `(*B, T, Dq)` with any number of leading batch axes, including none.
      key: `(*B, S, Dk)`, default `query`.
      value: `(*B, S, Dv)`, default `key`.
      bias: added to the logits, broadcastable to `(*B, N, T, S)`; -inf excludes the pair.
      mask: Boolean, broadcastable to `(*B, N, T, S)`, True = attend; or a `Mask`.
      is_causal: query i attends keys j <= i.
      semantics: scale, soft cap, output of fully masked rows, dropout rate and others.
      dropout_key: a PRNG key; None: no dropout.
      return_weights: also return the weights `(*B, N, T, S)`, `"before_dropout"` (= True) or
        `"after_dropout"`.
      score_mod, mask_mod: score and mask functions, as in `dot_product_attention`; b is the index
        into all batch axes, flattened.
      implementation: name, or names in order of preference; None: the first that supports the call.

    Extra positions (`params.bias_k`, then `semantics.add_zero_attn`) follow the S given ones. If
    the last axis of `mask` or `bias` is S, they are visible to every query; if it is S plus their
    number, `mask` or `bias` applies to them too. Returned weights include the extra positions, but
    not the sinks.

    With `semantics.attention_axes`, inputs have any number of axes: *T and *S are the attended axes
    of queries and of keys, in the order given, and *B the other axes. T and S are products of the
    attended sizes; `mask`, `bias` and weights have the axes `(*B, N, *T, *S)`.

    Returns:
      `out` or `(out, weights)`; out is `(*B, T, Do)` in the promoted dtype of inputs and
      parameters, or `(*B, T, N*h)` where `params.out` is None.

    Raises:
      ValueError: a shape does not fit; names the argument, the axes and the shape received.
      TypeError: a dtype does not fit, or float64 would be rounded because x64 is off.

    >>> import jax.numpy as jnp
    >>> from jaxmha import Projection
    >>> kernel = jnp.ones((6, 2, 3))
    >>> params = MHAParams(*[Projection(kernel)] * 3, Projection(jnp.ones((2, 3, 6))))
    >>> multi_head_attention(params, jnp.ones((4, 5, 6)), is_causal=True).shape
    (4, 5, 6)
    """
    key = query if key is None else key
    value = key if value is None else value
    checks.require_type(MHAParams, params=params)
    checks.require_type(Semantics, semantics=semantics)
    require_arrays(query=query, key=key, value=value)
    require_arrays(optional=True, bias=bias)
    if dropout_key is not None:
        checks.prng_key("dropout_key", dropout_key)
    checks.reject_rounding(params=params, query=query, key=key, value=value, bias=bias)
    is_causal = flag("is_causal", is_causal)
    mask = as_mask(mask)
    if semantics.attention_axes is not None:
        axes = axes_of(semantics.attention_axes, query, key, value)
        flat = multi_head_attention(
            params,
            *axes.flat_inputs(query, key, value),
            bias=None if bias is None else axes.pairs("bias", bias),
            mask=axes.mask(mask),
            is_causal=is_causal,
            semantics=replace(semantics, attention_axes=None),
            dropout_key=dropout_key,
            return_weights=return_weights,
            score_mod=score_mod,
            mask_mod=mask_mod,
            implementation=implementation,
        )
        if isinstance(flat, tuple):
            return axes.restored(flat[0]), axes.split(flat[1])
        return axes.restored(flat)
    mods = layer_mods(params, (query, key, value), semantics, ModFunctions(score_mod, mask_mod))
    layer = retraced(
        _multi_head_attention,
        is_causal=is_causal,
        return_weights=checks.weights_kind(return_weights),
        implementation=hashable(implementation),
    )
    with forward_mode():
        found: jax.Array | tuple[jax.Array, jax.Array] = layer(
            params,
            *distinct(query, key, value),
            bias,
            mask,
            dropout_key,
            semantics,
            mods,
        )
    return found


def layer_mods(
    params: MHAParams,
    inputs: tuple[Array, Array, Array],
    semantics: Semantics,
    functions: ModFunctions,
) -> Mods:
    """Traces score and mask functions for query, key and value features; neither function applies
    to extra positions."""
    if not functions.given:
        return Mods()
    sizes, dtype = check_inputs(params, *map(jnp.asarray, inputs))
    sizes["B"] = math.prod(inputs[0].shape[:-2])
    mods = traced_mods(*functions, dtype)
    return without_extras(mods, sizes, bias_kv.count(params, semantics), dtype)


@partial(jax.jit, static_argnames=("is_causal", "return_weights", "implementation"))
@by_types(layer_specs)
def _multi_head_attention(
    params: MHAParams,
    query: jax.Array,
    key: jax.Array | None,
    value: jax.Array | None,
    bias: jax.Array | None,
    mask: Mask,
    dropout_key: PRNGKeyArray | None,
    semantics: Semantics,
    mods: Mods,
    *,
    is_causal: bool,
    return_weights: ReturnWeights,
    implementation: str | tuple[str, ...] | None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    sizes, dtype = check_inputs(params, query, key, value)
    check_batch(query, key, value)
    batch = query.shape[:-2]
    extra = bias_kv.count(params, semantics)
    structure = with_window(mask & (Mask.causal() if is_causal else Mask()), semantics)
    mask = bias_kv.widen_mask(structure, extra, batch, sizes)
    bias = bias_kv.widen_bias(bias, extra, batch, sizes)
    attended = attended_features(
        math.prod(batch), bias, mask, sizes, extra, policy_of(params, semantics), mods.mask
    )
    rows, keys, values = (
        None if x is None else x.reshape(math.prod(batch), *x.shape[-2:])
        for x in (query, key, value)
    )
    assert rows is not None
    q, k, v = project_checked(
        params, rows, keys, values, semantics, dtype, attended[:3], implementation
    )
    result = attend(
        q,
        bias_kv.append(k, params.bias_k, semantics),
        bias_kv.append(v, params.bias_v, semantics),
        bias,
        mask,
        semantics,
        dropout_key,
        return_weights,
        implementation,
        sinks=params.sinks,
        mods=mods,
    )
    out = combine_checked(
        params, result.out, semantics, dtype, rows, attended.gates, implementation
    )
    out = out.reshape(*batch, *out.shape[1:])
    if result.weights is None:
        return out
    return out, result.weights.reshape(*batch, *result.weights.shape[1:])


def check_batch(query: jax.Array, key: jax.Array | None, value: jax.Array | None) -> None:
    """Raises ValueError unless key and value, where given, have the batch axes of query."""
    batch = query.shape[:-2]
    for name, x, axes in (("key", key, "S, Dk"), ("value", value, "S, Dv")):
        if x is not None and x.shape[:-2] != batch:
            raise ValueError(
                f"{name}: expected axes (*B, {axes}) with *B={batch} as in query, "
                f"got shape {x.shape}"
            )


def policy_of(params: MHAParams, semantics: Semantics) -> FullyMasked:
    """The output of fully masked rows: "zero" with sinks, since such a row attends its sink."""
    return semantics.fully_masked if params.sinks is None else "zero"


class Attended(NamedTuple):
    """Masks of the positions that can affect the output, for each use: `B T` of queries and of the
    features that `params.gate` reads, `B S` of keys and of values; None: all positions can."""

    queries: jax.Array | None
    keys: jax.Array | None
    values: jax.Array | None
    gates: jax.Array | None


def attended_features(
    B: int,
    bias: jax.Array | None,
    mask: Mask,
    sizes: dict[str, int],
    extra: int,
    policy: FullyMasked,
    mask_mod: Mod | None = None,
) -> Attended:
    """Returns the positions of features that can affect the output.

    Other positions must be zeroed: if they hold NaN, gradients of the kernels would be 0 * NaN.
    Mask and bias have one batch axis and cover S and the `extra` positions.
    """
    T, S, N = sizes["T"], sizes["S"], sizes["N"]
    checked(Mods(mask=mask_mod), {"B": B, "T": T, "N": N, "S": S + extra})
    attended = attended_positions(mask, bias, B, N, T, S + extra, mask_mod)
    rows, keys = (
        None if x is None else jnp.broadcast_to(x[:, :size], (B, size))
        for x, size in zip((sharding.in_order(x, 1) for x in attended), (T, S), strict=True)
    )
    if policy == "mean":  # fully masked rows return the mean of all values, times their gates
        return Attended(rows, keys, None, None)
    return Attended(rows, keys, keys, rows)
