"""Attention over heads, and a whole layer that can rotate queries and keys before attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxmha import bias_kv, checks, sharding
from jaxmha.arrays import Array, require_arrays
from jaxmha.attention import attend
from jaxmha.attention_options import hashable
from jaxmha.explicit_sharding import by_types, sharding_of_features, sharding_of_heads
from jaxmha.implementations import forward_mode
from jaxmha.layer import (
    attended_features,
    check_batch,
    layer_mods,
    multi_head_attention,
    policy_of,
)
from jaxmha.mask import Mask
from jaxmha.mod_arguments import ModFunctions, Mods
from jaxmha.params import MHAParams
from jaxmha.projections import check_inputs, combine_checked, compute_dtype, project_checked
from jaxmha.rotary import Rotate, apply_rotation, require_rotation, static_rotation
from jaxmha.semantics import ReturnWeights, Semantics

# Query, key and value features.
Inputs: TypeAlias = tuple[Array, Array, Array]
OutAndWeights: TypeAlias = tuple[jax.Array, jax.Array | None]
Implementation: TypeAlias = str | Sequence[str] | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["semantics", "dropout_key", "mods"],
    meta_fields=["return_weights", "implementation"],
)
@dataclass(frozen=True)
class CallSettings:
    """The settings of a call, apart from its arrays; `dropout_key` None: no dropout."""

    semantics: Semantics
    dropout_key: PRNGKeyArray | None = None
    return_weights: bool = False  # returns the weights before dropout
    implementation: Implementation = None
    mods: Mods = field(default_factory=Mods)


def attend_heads(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Mask,
    settings: CallSettings,
) -> OutAndWeights:
    """Attention over `*B T N H`, `*B S K H` and `*B S K h`: out `*B T N h`, and the weights."""
    with forward_mode():
        out, weights = _attend_heads(query, key, value, bias, mask, hashable_settings(settings))
    return out, weights


def attend_layer(
    params: MHAParams,
    inputs: Inputs,
    bias: Array | None,
    mask: Mask,
    rotate: Rotate | None,
    settings: CallSettings,
    positions: Array | None = None,
    functions: ModFunctions = ModFunctions(),
) -> OutAndWeights:
    """A layer over query, key and value features, with `rotate(heads, positions)` before attention.

    `positions`: of queries and keys, default 0, 1, ...
    """
    check_positions(positions, rotate, *inputs[:2])
    if rotate is None:
        result = multi_head_attention(
            params,
            *inputs,
            bias=bias,
            mask=mask,
            semantics=settings.semantics,
            dropout_key=settings.dropout_key,
            return_weights=settings.return_weights,
            score_mod=functions.score_mod,
            mask_mod=functions.mask_mod,
            implementation=settings.implementation,
        )
        return result if isinstance(result, tuple) else (result, None)
    check_arrays(params, inputs, bias)
    mods = layer_mods(params, inputs, settings.semantics, functions)
    with forward_mode():
        out, weights = _attend_layer(
            params,
            inputs,
            bias,
            mask,
            hashable_settings(replace(settings, mods=mods)),
            positions,
            rotate=static_rotation(rotate),
        )
    return out, weights


def hashable_settings(settings: CallSettings) -> CallSettings:
    """Makes the settings hashable for jit: a list of implementations becomes a tuple."""
    return replace(settings, implementation=hashable(settings.implementation))


def check_arrays(params: MHAParams, inputs: Inputs, bias: Array | None) -> None:
    """Raises TypeError for an input that is not an array, or that JAX would silently round."""
    query, key, value = inputs
    require_arrays(query=query, key=key, value=value)
    require_arrays(optional=True, bias=bias)
    checks.reject_rounding(params=params, bias=bias, query=query, key=key, value=value)


def _specs_of_heads(query: jax.Array, *_: object) -> tuple[sharding.Axes, object] | None:
    found = sharding_of_heads(query)
    return found and (found.axes, (found.heads, found.scores))


@jax.jit
@by_types(_specs_of_heads)
def _attend_heads(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: Mask,
    settings: CallSettings,
) -> OutAndWeights:
    batch, sizes = query.shape[:-3], sizes_of(query, key)
    wide = widen(None, bias, mask, batch, sizes, settings.semantics)
    return attend_projected(None, query, key, value, wide, settings)


def _output_specs(
    params: MHAParams, inputs: tuple[jax.Array, ...], *_: object, **__: object
) -> tuple[sharding.Axes, object] | None:
    found = sharding_of_features(inputs[0], params.query)
    return found and (found.axes, (found.features, found.scores))


@partial(jax.jit, static_argnames="rotate")
@by_types(_output_specs)
def _attend_layer(
    params: MHAParams,
    inputs: tuple[jax.Array, jax.Array, jax.Array],
    bias: jax.Array | None,
    mask: Mask,
    settings: CallSettings,
    positions: jax.Array | None,
    *,
    rotate: Rotate,
) -> OutAndWeights:
    batch = inputs[0].shape[:-2]
    T, S = inputs[0].shape[-2], inputs[1].shape[-2]
    sizes, dtype = check_inputs(params, *inputs)
    check_batch(*inputs)
    semantics = settings.semantics
    wide = widen(params, bias, mask, batch, sizes, semantics)
    extra = bias_kv.count(params, semantics)
    policy = policy_of(params, semantics)
    attended = attended_features(math.prod(batch), *wide, sizes, extra, policy, settings.mods.mask)
    query, key, value = project_checked(
        params, *inputs, semantics, dtype, attended[:3], settings.implementation
    )
    query = apply_rotation(rotate, query, _positions(batch, T) if positions is None else positions)
    key = apply_rotation(rotate, key, _positions(batch, S) if positions is None else positions)
    out, weights = attend_projected(params, query, key, value, wide, settings)
    dtype = compute_dtype(params, heads=out)
    out = combine_checked(
        params, out, semantics, dtype, inputs[0], attended.gates, settings.implementation
    )
    return out, weights


def check_positions(
    positions: Array | None,
    rotate: Rotate | None,
    queries: Array,
    keys: Array,
    *,
    features: int = 1,
) -> None:
    """Checks `rotate`, and that positions have the axes `*B T` of queries and the equal axes `*B S`
    of keys. `features`: number of axes of queries and keys after T or S."""
    require_rotation(rotate)
    if positions is None:
        return
    if rotate is None:
        raise ValueError(
            "input_positions: nothing is rotated; give rotate, such as jaxmha.rope, as well"
        )
    require_arrays(input_positions=positions)
    expected, others = queries.shape[:-features], keys.shape[:-features]
    if positions.shape != expected or others != expected:
        raise ValueError(
            "input_positions: expected axes (*B, T) of queries and keys alike, got shape "
            f"{positions.shape} with queries (*B, T) {expected}, keys (*B, S) {others}"
        )


def rotated(
    query: jax.Array, key: jax.Array, rotate: Rotate | None, positions: Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Rotates heads `*B T N H` and `*B S K H` at their positions, default 0, 1, ..."""
    check_positions(positions, rotate, query, key, features=2)
    if rotate is None:
        return query, key
    *batch, T, _, _ = query.shape
    if key.shape[-3] != T:
        raise ValueError(
            f"rotate: the positions of T={T} queries among S={key.shape[-3]} keys are not known "
            "here; rotate in jaxmha.flax.linen or jaxmha.flax.nnx instead, which hold the cache"
        )
    at = _positions(batch, T) if positions is None else jnp.asarray(positions)
    return apply_rotation(rotate, query, at), apply_rotation(rotate, key, at)


def _positions(batch: Sequence[int], size: int) -> jax.Array:
    """Positions 0, 1, ..., in zig-zag order if the features are in that order."""
    positions = sharding.in_order(np.arange(size, dtype=np.int32).reshape(1, size), 1)
    return jnp.broadcast_to(positions[0], (*batch, size))


def sizes_of(query: jax.Array, key: jax.Array) -> dict[str, int]:
    """The sizes T, N and S of heads `*B T N H`, `*B S K H`, for masks and biases."""
    return {"T": query.shape[-3], "N": query.shape[-2], "S": key.shape[-3]}


def widen(
    params: MHAParams | None,
    bias: Array | None,
    mask: Mask,
    batch: Sequence[int],
    sizes: dict[str, int],
    semantics: Semantics,
) -> tuple[jax.Array | None, Mask]:
    """Flattens bias and mask to one batch axis and extends them to the extra key positions (of
    `bias_k` and `add_zero_attn`)."""
    extra = 0 if params is None else bias_kv.count(params, semantics)
    return (
        bias_kv.widen_bias(bias, extra, batch, sizes),
        bias_kv.widen_mask(mask, extra, batch, sizes),
    )


def attend_projected(
    params: MHAParams | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    wide: tuple[jax.Array | None, Mask],
    settings: CallSettings,
) -> OutAndWeights:
    """Attention over heads with any batch axes; with `params`, appends the extra key positions."""
    batch = query.shape[:-3]
    dtype = checks.promoted(query=query, key=key, value=value)
    query, key, value = (
        x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value)
    )
    if params is not None:
        key = bias_kv.append(key, params.bias_k, settings.semantics)
        value = bias_kv.append(value, params.bias_v, settings.semantics)
    kind: ReturnWeights = "before_dropout" if settings.return_weights else False
    result = attend(
        query,
        key,
        value,
        *wide,
        settings.semantics,
        settings.dropout_key,
        kind,
        settings.implementation,
        sinks=None if params is None else params.sinks,
        mods=settings.mods,
    )
    out, weights = result.out, result.weights
    if weights is not None:
        weights = weights.reshape(*batch, *weights.shape[1:])
    return out.reshape(*batch, *out.shape[1:]), weights
