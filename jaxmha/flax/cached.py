"""Decoding in flax modules: projects new tokens and attends over flax's or jaxmha's cache."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmha import checks, sharding
from jaxmha.cached_attention import nan_where, reject_structure
from jaxmha.flax.heads import (
    How,
    between,
    check_arrays,
    check_positions,
    fixed,
    sizes_of,
    widen,
)
from jaxmha.flax.settings import cast, read_mask, widened
from jaxmha.implementations import forward_mode
from jaxmha.kv_cache import KVCache, Rotate
from jaxmha.layer import combine, project
from jaxmha.mask import Mask
from jaxmha.params import MHAParams


def attend_cached(
    params: MHAParams,
    inputs: tuple[Any, Any, Any],
    cached: tuple[Any, Any, Any],
    bias: Any,
    mask: Mask,
    rotate: Rotate | None,
    how: How,
    positions: Any = None,
) -> tuple[jax.Array, Any, tuple[Any, Any, Any]]:
    """Appends T tokens to flax's cache (keys `*B S K H`, values `*B S K h`, an index) and attends.

    `mask` and `bias` cover the S slots; a window counts tokens. Outputs are NaN if no slots are
    left, since a compiled program cannot raise. `positions`: of the new tokens for `rotate`,
    default their slots.

    Returns:
      out `*B T Do`, weights, and the updated cache.
    """
    if isinstance(mask.causal_offset, int) and mask.causal_offset == 0:
        mask = replace(mask, causal_offset=None)  # every step is causal
    reject_structure(mask)
    check_positions(positions, rotate, *inputs[:2])
    check_arrays(params, inputs, bias)
    heads = {"cached_key": cached[0], "cached_value": cached[1]}
    checks.no_silent_rounding(**heads)
    for name, x in heads.items():
        checks.floating_dtype(x.dtype, f"the dtype of {name}")
    with forward_mode():
        out, weights, cached = _attend_cached(
            params, inputs, cached, bias, mask, fixed(how), positions, rotate=rotate
        )
    return out, weights, cached


def with_cache(
    module: Any,
    step: Callable[..., Any],
    inputs: Any,
    cache: KVCache,
    mask: Any,
    force_fp32: bool = False,
    **more: Any,
) -> tuple[jax.Array, KVCache]:
    """Runs `prefill` or `decode_step` of `jaxmha.kv_cache` for a module of linen or nnx."""
    params, semantics = module.to_params()
    params, inputs = cast((params, inputs), module.dtype)
    if force_fp32:
        params, inputs = widened((params, inputs))
    out, longer = step(
        params,
        inputs,
        cache,
        semantics=semantics,
        mask=read_mask(mask, module.local_window_size),
        rotate=module.rotate,
        **more,
    )
    return cast(out, module.dtype), longer


def _places_cached(params: MHAParams, inputs: Any, cached: Any, *_: Any, **__: Any) -> Any:
    """Specs of the outputs: a cache keeps its sharding."""
    spread = sharding.of_features(inputs[0], params.query.kernel)
    specs = tuple(sharding.spec(*sharding.spec_of(x)) for x in cached)
    return spread and (spread.axes, (spread.features, spread.pairs, specs))


@partial(jax.jit, static_argnames="rotate")
@sharding.by_types(_places_cached)
def _attend_cached(
    params: MHAParams,
    inputs: tuple[Any, Any, Any],
    cached: tuple[Any, Any, Any],
    bias: Any,
    mask: Mask,
    how: How,
    positions: Any,
    *,
    rotate: Rotate | None,
) -> tuple[Any, Any, tuple[Any, Any, Any]]:
    query, key, value = project(params, *inputs, semantics=how.semantics)
    keys, values, index = cached
    *batch, T, _, _ = query.shape
    S = keys.shape[-3]
    for name, new, old in (("key", key, keys), ("value", value, values)):
        expected = (*old.shape[:-3], T, *old.shape[-2:])
        if new.shape != expected:
            raise ValueError(
                f"cached_{name} has room for {old.shape} (*B, S, K, H): expected {expected} of "
                f"{T} new tokens, got {new.shape}"
            )
    if T > S:
        raise ValueError(f"T={T} new tokens are more than the S={S} slots of the cache")
    tokens = index + jnp.arange(T, dtype=index.dtype)
    if rotate is not None:
        places = jnp.broadcast_to(tokens, (*batch, T)) if positions is None else positions
        query, key = rotate(query, places), rotate(key, places)
    start = (jnp.zeros_like(index),) * len(batch) + (index,) + (jnp.zeros_like(index),) * 2
    keys, values = (
        jax.lax.dynamic_update_slice(old, new.astype(old.dtype), start)
        for old, new in ((keys, key), (values, value))
    )
    slots, rows = jnp.arange(S, dtype=index.dtype).reshape(1, S), tokens.reshape(T, 1)
    there = slots <= rows
    left, _ = mask.window_size or (None, None)
    if left is not None:
        there &= slots >= rows - left
    mask = replace(mask, window_size=None) & Mask(array=there)
    wide = widen(params, bias, mask, batch, sizes_of(query, keys), how.semantics)
    heads = keys.astype(query.dtype), values.astype(query.dtype)
    out, weights = between(params, query, *heads, wide, how)
    out = nan_where(index > S - T, out)  # index + T may overflow
    return combine(params, out, semantics=how.semantics), weights, (keys, values, index + T)
