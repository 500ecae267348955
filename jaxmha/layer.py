"""Multi-head attention: project, attend, combine."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray

from jaxmha import bias_kv, checks, sharding
from jaxmha.arrays import Array, are_arrays, none_foreign
from jaxmha.attention import as_mask, attend, hashable
from jaxmha.dims import bind
from jaxmha.implementations import forward_mode, shard_map
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.implementations.tiled.block_mask import attended_positions
from jaxmha.mask import Mask
from jaxmha.matmul import matmul, resolved
from jaxmha.params import MHAParams, Projection, check, leaves
from jaxmha.semantics import ReturnWeights, Semantics


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
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
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
    return_weights: ReturnWeights = False,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """A whole attention layer: `combine(params, attend(project(params, query, key, value)))`.

    Args:
      params: the weights; all sizes are read from their shapes.
      query: `(*B, T, Dq)` with any number of leading batch axes, also none.
      key: `(*B, S, Dk)`, default `query`.
      value: `(*B, S, Dv)`, default `key`.
      bias: added to the logits, broadcastable to `(*B, N, T, S)`; -inf excludes the pair.
      mask: Boolean, broadcastable to `(*B, N, T, S)`, True = attend; or a `Mask`.
      is_causal: query i attends keys j <= i.
      semantics: scale, soft cap, policy of fully masked rows, dropout and the like.
      dropout_key: a PRNG key; None: no dropout.
      return_weights: also return the weights `(*B, N, T, S)`, `"before_dropout"` (= True) or
        `"after_dropout"`.
      implementation: name, or names in order of preference; None: the first that supports the call.

    Extra positions (`params.bias_k`, then `semantics.add_zero_attn`) follow the S given ones. If
    the last axis of `mask` or `bias` is S, they are visible to every query; if it is S plus their
    number, `mask` or `bias` applies to them too. Returned weights include them.

    Returns:
      `out` or `(out, weights)`; out is `(*B, T, Do)` in the promoted dtype of inputs and
      parameters, or `(*B, T, N*h)` where `params.out` is None.

    Raises:
      ValueError: a shape does not fit; names the argument, the axes and the shape received.
      TypeError: a dtype does not fit, or float64 would be rounded because x64 is off.

    >>> import jax.numpy as jnp
    >>> kernel = jnp.ones((6, 2, 3))
    >>> params = MHAParams(*[Projection(kernel)] * 3, Projection(jnp.ones((2, 3, 6))))
    >>> multi_head_attention(params, jnp.ones((4, 5, 6)), is_causal=True).shape
    (4, 5, 6)
    """
    key = query if key is None else key
    value = key if value is None else value
    checks.are_of(MHAParams, params=params)
    checks.are_of(Semantics, semantics=semantics)
    are_arrays(query=query, key=key, value=value, bias=bias)
    none_foreign("dropout_key", dropout_key)
    checks.no_silent_rounding(params=params, query=query, key=key, value=value, bias=bias)
    is_causal = checks.flag("is_causal", is_causal)
    mask = as_mask(mask)
    with forward_mode():
        found: jax.Array | tuple[jax.Array, jax.Array] = _multi_head_attention(
            params,
            *_distinct(query, key, value),
            bias,
            mask,
            dropout_key,
            semantics,
            is_causal=is_causal,
            return_weights=checks.weights_kind(return_weights),
            implementation=hashable(implementation),
        )
    return found


def _places(params: Any, query: Any, *_: Any, return_weights: Any, **__: Any) -> Any:
    spread = sharding.of_features(query, params.query.kernel)
    if spread is None:
        return None
    return spread.axes, (spread.features, spread.pairs) if return_weights else spread.features


@partial(jax.jit, static_argnames=("is_causal", "return_weights", "implementation"))
@sharding.by_types(_places)
def _multi_head_attention(
    params: MHAParams,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Mask,
    dropout_key: Any,
    semantics: Semantics,
    *,
    is_causal: bool,
    return_weights: ReturnWeights,
    implementation: str | tuple[str, ...] | None,
) -> Any:
    sizes = check(params)
    query, key, value = _all_three(query, key, value)
    for name, x, axes in (("query", query, "T Dq"), ("key", key, "S Dk"), ("value", value, "S Dv")):
        bind(name, x.shape, f"*B {axes}", sizes)
        if x.shape[:-2] != query.shape[:-2]:
            raise ValueError(
                f"{name}: expected axes (*B, {', '.join(axes.split())}) with "
                f"*B={query.shape[:-2]} as in query, got shape {x.shape}"
            )
    batch = query.shape[:-2]
    inputs = [
        None if x is None else x.reshape(math.prod(batch), *x.shape[-2:])
        for x in _distinct(query, key, value)
    ]
    extra = bias_kv.count(params, semantics)
    structure = mask & (Mask.causal() if is_causal else Mask())
    mask = bias_kv.widen_mask(structure, extra, batch, sizes)
    bias = bias_kv.widen_bias(bias, extra, batch, sizes)
    live = live_features(math.prod(batch), bias, mask, sizes, extra, semantics.fully_masked)
    q, k, v = project_live(params, *inputs, semantics, live)
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
    )
    out = _combine(params, result.out, semantics)
    out = out.reshape(*batch, *out.shape[1:])
    if result.weights is None:
        return out
    return out, result.weights.reshape(*batch, *result.weights.shape[1:])


def project(
    params: MHAParams,
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"] | None = None,
    value: Float[Array, "*B S Dv"] | None = None,
    *,
    semantics: Semantics = Semantics(),
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K H"], Float[Array, "*B S K h"]]:
    """Projects features to heads, and normalises queries and keys if `semantics.qk_norm` is set.

    Returns:
      query `(*B, T, N, H)`, key `(*B, S, K, H)` and value `(*B, S, K, h)`, in the promoted dtype
      of inputs and parameters, without extra positions.

    >>> import jax.numpy as jnp
    >>> params = MHAParams(*[Projection(jnp.ones((6, 2, 3)))] * 3)
    >>> [x.shape for x in project(params, jnp.ones((4, 5, 6)))]
    [(4, 5, 2, 3), (4, 5, 2, 3), (4, 5, 2, 3)]
    """
    key = query if key is None else key
    value = key if value is None else value
    checks.are_of(MHAParams, params=params)
    checks.are_of(Semantics, semantics=semantics)
    are_arrays(query=query, key=key, value=value)
    checks.no_silent_rounding(params=params, query=query, key=key, value=value)
    query, key, value = project_live(params, *_distinct(query, key, value), semantics)
    return query, key, value


def _distinct(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """The inputs, with None for an input identical to the previous one: jit would see copies."""
    return query, None if key is query else key, None if value is key else value


def _all_three(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """The inverse of `_distinct`."""
    key = query if key is None else key
    return query, key, key if value is None else value


def _places_of_heads(params: MHAParams, query: Any, key: Any, value: Any, *_: Any) -> Any:
    found = [
        sharding.of_features(x, projection.kernel)
        for projection, x in zip(params[:3], _all_three(query, key, value), strict=True)
    ]
    if found[0] is None:
        return None
    return found[0].axes, tuple(sharding.spec() if x is None else x.heads for x in found)


@jax.jit
@sharding.by_types(_places_of_heads)
def project_live(
    params: MHAParams,
    query: Any,
    key: Any,
    value: Any,
    semantics: Semantics,
    live: tuple[Any, Any, Any] = (None, None, None),
) -> tuple[jax.Array, ...]:
    """`project` on inputs deduplicated by `_distinct`; positions outside `live` are zeroed first.

    `live`: masks `b T`, `b S` and `b S` of the query, key and value positions to keep; None: all.
    """
    query, key, value = _all_three(query, key, value)
    sizes = check(params)
    for name, x, width in (("query", query, "Dq"), ("key", key, "Dk"), ("value", value, "Dv")):
        bind(name, x.shape, f"*B {'T' if name == 'query' else 'S'} {width}", sizes)
    dtype = _compute_dtype(params, query=query, key=key, value=value)

    def affine(projections: Any, inputs: Any, live: Any) -> list[jax.Array]:
        return [
            _affine(_zeroed(x, there), 1, projection, dtype, semantics.precision)
            for x, there, projection in zip(inputs, live, projections, strict=True)
        ]

    heads = shard_map.project(affine, params[:3], (query, key, value), live)
    for index, scale in enumerate((params.query_norm, params.key_norm)):
        if (semantics.qk_norm is None) != (scale is None):
            raise ValueError(
                f"semantics.qk_norm is {semantics.qk_norm!r}, and params has "
                f"{'no ' if scale is None else ''}query_norm and key_norm: one needs the other"
            )
        if scale is not None:
            heads[index] = _normalise(heads[index], jnp.asarray(scale), semantics)
    return tuple(x.astype(dtype) for x in heads)


def combine(
    params: MHAParams, heads: Float[Array, "*B T N h"], *, semantics: Semantics = Semantics()
) -> Float[Array, "*B T Do"]:
    """Combines heads with the output projection, or concatenates them if `params.out` is None.

    >>> import jax.numpy as jnp
    >>> params = MHAParams(*[Projection(jnp.ones((6, 2, 3)))] * 3)
    >>> combine(params, jnp.ones((4, 5, 2, 3))).shape
    (4, 5, 6)
    """
    checks.are_of(MHAParams, params=params)
    checks.are_of(Semantics, semantics=semantics)
    are_arrays(heads=heads)
    checks.no_silent_rounding(params=params, heads=heads)
    out: jax.Array = _combine(params, heads, semantics)
    return out


def _places_of_features(_: MHAParams, heads: Any, *__: Any) -> Any:
    spread = sharding.of_heads(heads)
    return spread and (spread.axes, spread.features)


@jax.jit
@sharding.by_types(_places_of_features)
def _combine(params: MHAParams, heads: Any, semantics: Semantics) -> jax.Array:
    sizes = check(params)
    bind("heads", heads.shape, "*B T N h", sizes)
    dtype = _compute_dtype(params, heads=heads)
    if params.out is None:
        *batch, N, h = heads.shape
        return jnp.reshape(heads, (*batch, N * h)).astype(dtype)
    return _affine(heads, 2, params.out, dtype, semantics.precision).astype(dtype)


def _compute_dtype(params: MHAParams, **inputs: Any) -> np.dtype[Any]:
    return checks.promoted(**inputs, **{f"params.{k}": x for k, x in leaves(params).items()})


def _affine(
    x: Any, contracted: int, projection: Projection, dtype: np.dtype[Any], precision: Any
) -> jax.Array:
    """Contracts the last `contracted` axes of x with the first of the kernel, in one matmul.

    Product and bias are in the accumulation dtype, so that their sum is rounded once.
    """
    accumulate = accumulation_dtype(dtype)
    kernel = jnp.asarray(projection.kernel).astype(dtype)
    inside, outside = kernel.shape[:contracted], kernel.shape[contracted:]
    lead = x.shape[: x.ndim - contracted]
    bias = projection.bias
    if sharding.current() is not None:  # a sharded axis cannot be merged with others
        last = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
        y = jax.lax.dot_general(
            jnp.asarray(x, dtype),
            kernel,
            (last, ((), ())),
            precision=resolved(precision),
            preferred_element_type=accumulate,
        )
        if bias is not None:
            y += jnp.asarray(bias).astype(accumulate).reshape((1,) * len(lead) + outside)
        return y
    y = matmul(
        jnp.asarray(x, dtype).reshape(math.prod(lead), math.prod(inside)),
        kernel.reshape(math.prod(inside), math.prod(outside)),
        precision=precision,
        dtype=accumulate,
    )
    if bias is not None:
        y += jnp.asarray(bias).astype(accumulate).reshape(1, math.prod(outside))
    return y.reshape(*lead, *outside)


def _normalise(x: jax.Array, scale: jax.Array, semantics: Semantics) -> jax.Array:
    """Normalises over H. Sources: Ba et al., "Layer Normalization" (2016); Zhang and Sennrich,
    "Root Mean Square Layer Normalization" (2019)."""
    if semantics.qk_norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True)
    scale = scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + scale.shape)
    return x * jax.lax.rsqrt(variance + semantics.qk_norm_epsilon) * scale


def live_features(
    B: int, bias: jax.Array | None, mask: Mask, sizes: dict[str, int], extra: int, fully_masked: str
) -> tuple[Any, Any, Any]:
    """Query, key and value positions with an allowed pair, `B T`, `B S` and `B S`; None: all.

    Other positions must be zeroed: 0 * NaN would reach the gradients of the kernels. Mask and bias
    have one batch axis and cover S and the `extra` positions.
    """
    T, S = sizes["T"], sizes["S"]
    live = attended_positions(mask, bias, B, sizes["N"], T, S + extra)
    rows, keys = (
        None if x is None else jnp.broadcast_to(x[:, :size], (B, size))
        for x, size in zip((sharding.in_order(x, 1) for x in live), (T, S), strict=True)
    )
    return rows, keys, None if fully_masked == "mean" else keys  # the mean reads every value


def _zeroed(x: Any, live: Any) -> Any:
    return x if live is None else jnp.where(live.reshape(*x.shape[:-1], 1), x, 0.0)
