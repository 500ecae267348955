"""Decoding in flax modules: projects new tokens and attends over flax's cache."""

import math
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxmha import bias_kv, checks, read_tokens, sharding
from jaxmha.arrays import Array
from jaxmha.cached_attention import nan_where, reject_structure
from jaxmha.explicit_sharding import by_types, sharding_of_features, spec_of
from jaxmha.flax.heads import (
    CallSettings,
    Inputs,
    attend_projected,
    check_arrays,
    check_positions,
    hashable_settings,
    sizes_of,
    widen,
)
from jaxmha.implementations import forward_mode
from jaxmha.layer import Attended, check_batch, policy_of
from jaxmha.mask import Mask
from jaxmha.mod_arguments import ModFunctions, Mods, after, of_cached, traced_mods, without_extras
from jaxmha.params import MHAParams
from jaxmha.projections import check_inputs, combine_checked, compute_dtype, project_checked
from jaxmha.rotary import Rotate, apply_rotation, static_rotation
from jaxmha.semantics import Semantics

# Cached keys `*B S K H`, values `*B S K h`, and the index of the next free slot.
Cache: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def attend_cached(
    params: MHAParams,
    inputs: Inputs,
    cached: Cache,
    bias: Array | None,
    mask: Mask,
    rotate: Rotate | None,
    settings: CallSettings,
    positions: Array | None = None,
    functions: ModFunctions = ModFunctions(),
) -> tuple[jax.Array, jax.Array | None, Cache]:
    """Appends T tokens to flax's cache and attends to all tokens in it.

    `mask` and `bias` cover the S slots; a window counts tokens. Outputs are NaN if no slots are
    left, since a compiled program cannot raise. `positions`: positions of the new tokens for
    `rotate`, default their slots. `functions`: of queries and keys in their slots.

    Returns:
      out `*B T Do`, weights, and the updated cache.
    """
    if isinstance(mask.causal_offset, int) and mask.causal_offset == 0:
        mask = replace(mask, causal_offset=None)  # every step is causal
    reject_structure(mask)
    check_positions(positions, rotate, *inputs[:2])
    check_arrays(params, inputs, bias)
    heads = {"cached_key": cached[0], "cached_value": cached[1]}
    checks.reject_rounding(**heads)
    for name, x in heads.items():
        checks.floating_dtype(x.dtype, f"the dtype of {name}")
    settings = replace(settings, mods=_mods(params, inputs, cached, settings, functions))
    with forward_mode():
        out, weights, cached = _attend_cached(
            params,
            inputs,
            cached,
            bias,
            mask,
            hashable_settings(settings),
            positions,
            rotate=static_rotation(rotate),
        )
    return out, weights, cached


def _mods(
    params: MHAParams,
    inputs: Inputs,
    cached: Cache,
    settings: CallSettings,
    functions: ModFunctions,
) -> Mods:
    """Traces score and mask functions of slots; neither applies to extra positions."""
    if not functions.given:
        return Mods()
    sizes, dtype = check_inputs(params, *map(jnp.asarray, inputs))
    sizes["B"], sizes["S"] = math.prod(inputs[0].shape[:-2]), cached[0].shape[-3]
    mods = of_cached(traced_mods(*functions, dtype), sizes)
    return without_extras(mods, sizes, bias_kv.count(params, settings.semantics), dtype)


def _output_specs(
    params: MHAParams, inputs: tuple[jax.Array, ...], cached: Cache, *_: object, **__: object
) -> tuple[sharding.Axes, object] | None:
    """Mesh axes and partition specs of the outputs; None: unknown. The cache keeps its sharding."""
    found = sharding_of_features(inputs[0], params.query)
    specs = tuple(sharding.spec(*spec_of(x)) for x in cached)
    return found and (found.axes, (found.features, found.scores, specs))


@partial(jax.jit, static_argnames="rotate")
@by_types(_output_specs)
def _attend_cached(
    params: MHAParams,
    inputs: tuple[jax.Array, jax.Array, jax.Array],
    cached: Cache,
    bias: jax.Array | None,
    mask: Mask,
    settings: CallSettings,
    positions: jax.Array | None,
    *,
    rotate: Rotate | None,
) -> tuple[jax.Array, jax.Array | None, Cache]:
    sizes, dtype = check_inputs(params, *inputs)
    check_batch(*inputs)
    semantics = settings.semantics
    implementation = settings.implementation
    keys, values, index = cached
    *batch, T, _ = inputs[0].shape
    S = keys.shape[-3]
    tokens = index + jnp.arange(T, dtype=index.dtype)
    read = _read(params, inputs, mask, tokens, {**sizes, "S": S}, semantics)
    query, key, value = project_checked(params, *inputs, semantics, dtype, read[:3], implementation)
    for name, new, old in (("key", key, keys), ("value", value, values)):
        expected = (*old.shape[:-3], T, *old.shape[-2:])
        if new.shape != expected:
            raise ValueError(
                f"cached_{name} has room for {old.shape} (*B, S, K, H): expected {expected} of "
                f"{T} new tokens, got {new.shape}"
            )
    if T > S:
        raise ValueError(f"T={T} new tokens are more than the S={S} slots of the cache")
    if rotate is not None:
        at = jnp.broadcast_to(tokens, (*batch, T)) if positions is None else positions
        query, key = (apply_rotation(rotate, x, at) for x in (query, key))
    start = (jnp.zeros_like(index),) * len(batch) + (index,) + (jnp.zeros_like(index),) * 2
    keys, values = (
        jax.lax.dynamic_update_slice(old, new.astype(old.dtype), start)
        for old, new in ((keys, key), (values, value))
    )
    slots, rows = jnp.arange(S, dtype=index.dtype).reshape(1, S), tokens.reshape(T, 1)
    visible = slots <= rows
    left, _ = mask.window_size or (None, None)
    if left is not None:
        visible &= slots >= rows - left
    mask = replace(mask, window_size=None) & Mask(array=visible)
    wide = widen(params, bias, mask, batch, sizes_of(query, keys), semantics)
    heads = keys.astype(query.dtype), values.astype(query.dtype)
    settings = replace(settings, mods=after(settings.mods, index))
    out, weights = attend_projected(params, query, *heads, wide, settings)
    dtype = compute_dtype(params, heads=out)
    out = combine_checked(params, out, semantics, dtype, inputs[0], read.gates, implementation)
    out = nan_where(index > S - T, out)  # index + T > S may overflow
    return out, weights, (keys, values, index + T)


def _read(
    params: MHAParams,
    inputs: tuple[jax.Array, jax.Array, jax.Array],
    mask: Mask,
    tokens: jax.Array,
    sizes: dict[str, int],
    semantics: Semantics,
) -> Attended:
    """The new tokens that can affect an output."""
    batch, T = inputs[0].shape[:-2], len(tokens)
    if mask.key_value_padding is None or any(x.shape[:-1] != (*batch, T) for x in inputs):
        return Attended(None, None, None, None)  # other shapes are reported with those of the cache
    B = math.prod(batch)
    padding = checks.flatten_mask(mask, batch, sizes).key_value_padding
    slots = jnp.broadcast_to(tokens, (B, T))
    query, key, value = (
        read_tokens.of_step(x.reshape(B, T, x.shape[-1]), padding, slots) for x in inputs
    )
    if policy_of(params, semantics) == "mean":  # fully masked rows read every value
        return Attended(query.queries, key.keys, None, None)
    return query._replace(keys=key.keys, values=value.values)
