"""Decoding with a cache of keys and values: `prefill`, `decode_step` and `extend`."""

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from jaxmha import bias_kv, read_tokens
from jaxmha.arrays import Array
from jaxmha.attention import attend
from jaxmha.attention_options import hashable
from jaxmha.cache_arguments import clipped_counts
from jaxmha.cached_attention import nan_where, reject_structure
from jaxmha.cached_step import BLOCK
from jaxmha.decoding_checks import (
    CacheT,
    checked_cache,
    checked_counts,
    checked_positions,
    checked_prompts,
    counts_of,
    flat_mask,
    prompt_lengths,
    reject_long_prompt,
    reject_mean,
    sizes_of,
)
from jaxmha.explicit_sharding import by_types, step_specs
from jaxmha.extend_heads import append_and_attend
from jaxmha.layer import Attended, policy_of
from jaxmha.mask import Mask
from jaxmha.mask_arguments import as_mask, with_window
from jaxmha.mod_arguments import MaskMod, Mods, ScoreMod, traced_mods, without_extras
from jaxmha.paged_cache import PagedKVCache
from jaxmha.params import MHAParams
from jaxmha.projections import combine_checked, compute_dtype, project_checked
from jaxmha.rotary import Rotate, apply_rotation, static_rotation
from jaxmha.semantics import Semantics

# Positions that `rotate` gets: of every row, or of all rows alike.
Positions: TypeAlias = Integer[Array, "T"] | Integer[Array, "*n #B T"]


def prefill(
    params: MHAParams,
    x: Float[Array, "B T Dq"],
    cache: CacheT,
    *,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    rotate: Rotate | None = None,
    positions: Positions | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[jax.Array, "B T Do"], CacheT]:
    """Causal self-attention over prompts; returns the output and a cache of only these prompts.

    Args:
      params: parameters of the layer; Dq = Dk = Dv.
      x: prompts, `(B, T, Dq)`; shorter prompts are padded on the right.
      cache: a `KVCache` or `PagedKVCache`; its previous contents are discarded.
      semantics: as in `multi_head_attention`; its dropout has no effect.
      mask: combined with the causal mask; `Mask.lengths(key_value=lengths)` gives the lengths of
        the prompts, in [0, T]. JAX arrays are clipped: a check would wait for the device. The cache
        keeps lengths alone: repeat key/value padding, such as that of prompts that are padded on
        the left, in every step, with a column for every slot. If a ring buffer has fewer slots than
        the prompts have tokens, give a column for every token.
      rotate: `rotate(heads, positions)` for projected queries and keys, such as `rope`; the result
        is cast to the dtype of the heads. It is a static argument: give the same function in every
        call, or a `functools.partial` of the same function with equal arguments. Every new lambda
        triggers a compilation. The values that a function captures are read during compilation,
        and must not change afterwards.
      positions: the second argument of `rotate`, `(T,)`, `(B, T)` or `(n, B, T)` (`rope` with
        `sections`); None: positions in the sequence, 0 to T - 1. Causality, windows and slots do
        not depend on them.
      score_mod, mask_mod: score and mask functions, as in `dot_product_attention`; i and j are
        positions in the sequence.
      implementation: as in `multi_head_attention`.

    Returns:
      `(out, cache)`; out is `(B, T, Do)`.

    Raises:
      ValueError: T exceeds the slots of the cache (allowed for a ring buffer), a shape does not
        fit, a NumPy array of prompt lengths is not in [0, T], the mask has segments, query
        lengths alone, or a causal offset that is negative or a JAX array; or tokens are in zig-zag order.
      TypeError: keys or values of the cache are of a wrong dtype, its lengths are not integers, or
        rotate is not callable.

    >>> from jaxmha import KVCache, init_params
    >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
    >>> out, cache = prefill(params, jnp.ones((1, 3, 6)), KVCache.empty(params, 1, 8))
    >>> out.shape, cache.lengths.tolist()
    ((1, 3, 6), [3])
    """
    cache = checked_cache(params, x, cache, semantics)
    out, kept = _prefill(
        params,
        x,
        cache,
        checked_prompts(with_window(as_mask(mask), semantics), x),
        semantics,
        _traced(score_mod, mask_mod, params, x, cache, semantics),
        checked_positions(positions, rotate, x),
        rotate=static_rotation(rotate),
        implementation=hashable(implementation),
    )
    return out, kept


def _traced(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    params: MHAParams,
    x: Array,
    cache: CacheT,
    semantics: Semantics | None,
) -> Mods:
    """Traces `score_mod` and `mask_mod`.

    `semantics`: for `prefill`, whose keys are the T tokens of x and the extra positions, to which
    neither function applies; None: for a step over a cache, which adds extra positions itself.
    """
    if score_mod is None and mask_mod is None:
        return Mods()
    dtype = compute_dtype(params, x=x)
    mods = traced_mods(score_mod, mask_mod, dtype)
    if semantics is None:
        return mods
    sizes = sizes_of(params, jnp.asarray(x), cache)
    sizes["S"] = sizes["T"]
    return without_extras(mods, sizes, bias_kv.count(params, semantics), dtype)


@partial(jax.jit, static_argnames=("rotate", "implementation"))
@by_types(step_specs)
def _prefill(
    params: MHAParams,
    x: jax.Array,
    cache: CacheT,
    mask: Mask,
    semantics: Semantics,
    mods: Mods,
    positions: jax.Array | None,
    *,
    rotate: Rotate | None,
    implementation: str | tuple[str, ...] | None,
) -> tuple[jax.Array, CacheT]:
    sizes = sizes_of(params, x, cache)
    B, T = sizes["B"], sizes["T"]
    left, _ = mask.window_size or (None, None)
    reject_long_prompt(cache, T, left)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(T, dtype=np.int32).reshape(1, T), (B, T))
    extra = bias_kv.count(params, semantics)
    wide = bias_kv.widen_mask(mask & Mask.causal(), extra, (B,), {**sizes, "S": T})
    policy = policy_of(params, semantics)
    read = read_tokens.of_prompts(x, mask, wide, sizes, mods, policy, extra)
    query, key, value = _heads(params, x, semantics, positions, rotate, read, implementation)
    result = attend(
        query,
        bias_kv.append(key, params.bias_k, semantics),
        bias_kv.append(value, params.bias_v, semantics),
        None,
        wide,
        semantics,
        None,
        False,
        implementation,
        mods=mods,
        sinks=params.sinks,
    )
    kept, full = cache.emptied().append(key, value, prompt_lengths(mask, sizes), left)
    out = _combine(params, result.out, semantics, x, read, implementation)
    if isinstance(cache, PagedKVCache):  # the pool may have too few free pages for T <= S tokens
        out = nan_where(full, out)
    return out, kept


def decode_step(
    params: MHAParams,
    x: Float[Array, "B T Dq"],
    cache: CacheT,
    *,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    rotate: Rotate | None = None,
    positions: Positions | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> tuple[Float[jax.Array, "B T Do"], CacheT]:
    """Appends tokens to the cache; each attends to all tokens before it and to itself.

    The cost of a step grows with the longest sequence. On GPUs, it grows with the window if there
    is one, and with the slots of the cache if cuDNN's kernel does not support the step. Each
    sequence has its own length. If a sequence has no free slots left, or more than 2**30 tokens,
    its outputs are NaN (and its cache is unusable), since a compiled program cannot raise. The
    derivatives of a step read all slots, and none passes tokens that are stored in 8 bits: train
    with `multi_head_attention` on whole sequences.

    Args:
      params: parameters of the layer; Dq = Dk = Dv.
      x: new tokens, `(B, T, Dq)`; T is 1 in plain decoding.
      cache: a `KVCache` or `PagedKVCache`; updated in place if donated
        (`jax.jit(..., donate_argnums=...)`).
      semantics: as in `multi_head_attention`; its dropout has no effect.
      mask: combined with the causal mask. With `Mask.window(left, ...)`, a `KVCache` of more
        than left slots is a ring buffer, and a `PagedKVCache` frees pages to the left of the window.
        A step with T > 1 copies the window of a ring buffer of fewer than left + T slots.
        `Mask.padding(key_value=...)`, `(B, S)`, gives the valid ones of the first S positions (for
        prompts padded on the left), `(B, P)` with P > S those of P positions of a ring buffer. Later
        tokens are valid, which take the slots of earlier ones; in a row that is all padding, none
        is. A Boolean array is over slots, whichever tokens they hold, broadcastable to
        `(B, N, T, S)`.
      rotate: as in `prefill`.
      positions: as in `prefill`, of the new tokens; None: they go on from `cache.lengths`. Give
        other ones in every step where these differ, as for prompts that are padded on the left.
      score_mod, mask_mod: as in `prefill`.

    Returns:
      `(out, cache)`; out is `(B, T, Do)`.

    Raises:
      ValueError: a shape does not fit, the mask has a condition that a step does not support, or
        tokens are in zig-zag order.
      TypeError: as in `prefill`.

    >>> from jaxmha import KVCache, init_params
    >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
    >>> out, cache = prefill(params, jnp.ones((1, 3, 6)), KVCache.empty(params, 1, 8))
    >>> out, cache = decode_step(params, jnp.ones((1, 1, 6)), cache)
    >>> out.shape, cache.lengths.tolist()
    ((1, 1, 6), [4])
    """
    return extend(
        params,
        x,
        cache,
        semantics=semantics,
        mask=mask,
        rotate=rotate,
        positions=positions,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )


def extend(
    params: MHAParams,
    x: Float[Array, "B T Dq"],
    cache: CacheT,
    *,
    q_lengths: Array | None = None,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    rotate: Rotate | None = None,
    positions: Positions | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> tuple[Float[jax.Array, "B T Do"], CacheT]:
    """Appends to each sequence its own number of tokens, which attend as in `decode_step`.

    One call serves a ragged batch: the prompt of a new sequence, a chunk of a long prompt, one
    token of a sequence that decodes, several draft tokens to verify, and no token of an idle row.

    Args:
      params: parameters of the layer; Dq = Dk = Dv.
      x: new tokens, `(B, T, Dq)`, padded on the right.
      cache: as in `decode_step`.
      q_lengths: `(B,)`, the number of tokens of each sequence, in [0, T]; None: all T. JAX arrays
        are clipped: a check would wait for the device.
      semantics: as in `decode_step`.
      mask: as in `decode_step`.
      rotate: as in `prefill`.
      positions: as in `decode_step`.
      score_mod, mask_mod: as in `prefill`.

    Returns:
      `(out, cache)`; out is `(B, T, Do)`, 0 beyond the tokens of a sequence.

    Raises:
      ValueError: as in `decode_step`, or a NumPy array of q_lengths is not in [0, T].
      TypeError: as in `prefill`, or q_lengths are not integers.

    >>> from jaxmha import PagedKVCache, init_params
    >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
    >>> cache = PagedKVCache.empty(params, 3, 32, pages=8, page_size=4)
    >>> counts = np.asarray([5, 1, 0])
    >>> out, cache = extend(params, jnp.ones((3, 5, 6)), cache, q_lengths=counts)
    >>> cache.lengths.tolist(), int(cache.free_pages())
    ([5, 1, 0], 5)
    """
    cache = checked_cache(params, x, cache, semantics)
    mask = with_window(as_mask(mask), semantics)
    reject_structure(mask)
    reject_mean(policy_of(params, semantics))
    found: tuple[jax.Array, CacheT] = _extend(
        params,
        x,
        cache,
        checked_counts(q_lengths, x),
        mask,
        semantics,
        _traced(score_mod, mask_mod, params, x, cache, None),
        checked_positions(positions, rotate, x),
        rotate=static_rotation(rotate),
        block=BLOCK,
    )
    return found


@partial(jax.jit, static_argnames=("rotate", "block"))
@by_types(step_specs)
def _extend(
    params: MHAParams,
    x: jax.Array,
    cache: CacheT,
    q_lengths: jax.Array | None,
    mask: Mask,
    semantics: Semantics,
    mods: Mods,
    positions: jax.Array | None,
    *,
    rotate: Rotate | None,
    block: int,
) -> tuple[jax.Array, CacheT]:
    sizes = sizes_of(params, x, cache)
    mask = flat_mask(mask, cache, sizes)
    tokens = jnp.arange(sizes["T"], dtype=np.int32)[None]
    slots = clipped_counts(jnp.asarray(cache.lengths))[:, None] + tokens
    counts = counts_of(q_lengths, sizes)
    read = read_tokens.of_step(
        x,
        mask.key_value_padding,
        slots,
        None if q_lengths is None else counts,
    )
    at = slots if positions is None else positions
    heads = _heads(params, x, semantics, at, rotate, read)
    out, cache, full = append_and_attend(
        *heads, cache, counts, mask, semantics, mods, sizes, params=params, block=block
    )
    out = nan_where(full, _combine(params, out, semantics, x, read))
    if q_lengths is not None:
        out = jnp.where((tokens < counts[:, None])[..., None], out, 0.0)
    return out, cache


def _heads(
    params: MHAParams,
    x: jax.Array,
    semantics: Semantics,
    positions: jax.Array,
    rotate: Rotate | None,
    read: Attended,
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects inputs to heads, and rotates queries and keys if `rotate` is given.

    `read`: the tokens that affect the output; the others are zeroed, because they may hold NaN.
    """
    dtype = compute_dtype(params, x=x)
    query, key, value = project_checked(
        params, x, None, None, semantics, dtype, read[:3], implementation
    )
    if rotate is not None:
        query, key = (apply_rotation(rotate, x, positions) for x in (query, key))
    return query, key, value


def _combine(
    params: MHAParams,
    heads: jax.Array,
    semantics: Semantics,
    x: jax.Array,
    read: Attended,
    implementation: str | tuple[str, ...] | None = None,
) -> jax.Array:
    dtype = compute_dtype(params, heads=heads)
    return combine_checked(params, heads, semantics, dtype, x, read.gates, implementation)
