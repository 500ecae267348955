"""Steps of latent attention over a cache: `prefill`, `extend` and `decode_step`."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from jaxmha import checks, read_tokens
from jaxmha.arrays import Array
from jaxmha.attention import attend
from jaxmha.attention_options import hashable
from jaxmha.cache_arguments import PAGED, check_shapes, clipped_counts
from jaxmha.cached_attention import attend_cache, nan_where, reject_structure
from jaxmha.cached_step import BLOCK
from jaxmha.decoding_checks import (
    checked_counts,
    checked_parts,
    checked_positions,
    checked_prompts,
    counts_of,
    flat_mask,
    prompt_lengths,
    reject_long_prompt,
    reject_mean,
    reject_overflow,
    reject_zigzag,
)
from jaxmha.dims import bind
from jaxmha.explicit_sharding import by_types, step_specs
from jaxmha.latent.cache import LATENTS, LatentCache, LatentT, append, as_heads
from jaxmha.latent.heads import Latent, check_arguments, check_inputs, flat_positions
from jaxmha.latent.layer import with_scale
from jaxmha.latent.params import LatentParams
from jaxmha.latent.rotation import LatentRotate, static_latent_rotation
from jaxmha.mask import Mask
from jaxmha.mask_arguments import as_mask, with_window
from jaxmha.mod_arguments import MaskMod, Mods, ScoreMod, traced_mods
from jaxmha.paged_cache import PagedKVCache
from jaxmha.semantics import Semantics
from jaxmha.window_copy import with_window_copy


def prefill(
    params: LatentParams,
    x: Float[Array, "B T Dq"],
    cache: LatentT,
    *,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    rotate: LatentRotate | None = None,
    positions: Integer[Array, "*#B T"] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[jax.Array, "B T Do"], LatentT]:
    """Causal latent attention over prompts; returns the output and a cache of only these prompts.

    Arguments and errors are those of `jaxmha.prefill`; queries attend the keys and values of every
    head, as in `latent_attention`.

    >>> from jaxmha.latent import init_latent_params
    >>> params = init_latent_params(
    ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
    ... )
    >>> out, cache = prefill(params, jnp.ones((2, 7, 8)), LatentCache.empty(params, 2, 9))
    >>> out.shape, cache.lengths.tolist()
    ((2, 7, 8), [7, 7])
    """
    cache = _checked(params, x, cache, semantics)
    found: tuple[jax.Array, LatentT] = _prefill(
        params,
        x,
        cache,
        checked_prompts(with_window(as_mask(mask), semantics), x),
        semantics,
        _traced(score_mod, mask_mod, params, x),
        checked_positions(positions, rotate, x),
        rotate=static_latent_rotation(rotate),
        implementation=hashable(implementation),
    )
    return found


def extend(
    params: LatentParams,
    x: Float[Array, "B T Dq"],
    cache: LatentT,
    *,
    q_lengths: Integer[Array, "B"] | None = None,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    rotate: LatentRotate | None = None,
    positions: Integer[Array, "*#B T"] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> tuple[Float[jax.Array, "B T Do"], LatentT]:
    """Appends to each sequence its own number of tokens; each token attends to all tokens before it
    and to itself.

    Arguments and errors are those of `jaxmha.extend`. Queries attend the latents themselves, in the
    form of `absorb`: the keys and values of the heads are never computed.

    >>> from jaxmha.latent import init_latent_params
    >>> params = init_latent_params(
    ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
    ... )
    >>> out, cache = prefill(params, jnp.ones((2, 7, 8)), LatentCache.empty(params, 2, 9))
    >>> out, cache = extend(params, jnp.ones((2, 1, 8)), cache)
    >>> out.shape, cache.lengths.tolist()
    ((2, 1, 8), [8, 8])
    """
    cache = _checked(params, x, cache, semantics)
    mask = with_window(as_mask(mask), semantics)
    reject_structure(mask)
    reject_mean(semantics.fully_masked)
    found: tuple[jax.Array, LatentT] = _extend(
        params,
        x,
        cache,
        checked_counts(q_lengths, x),
        mask,
        semantics,
        _traced(score_mod, mask_mod, params, x),
        checked_positions(positions, rotate, x),
        rotate=static_latent_rotation(rotate),
    )
    return found


def decode_step(
    params: LatentParams,
    x: Float[Array, "B T Dq"],
    cache: LatentT,
    *,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    rotate: LatentRotate | None = None,
    positions: Integer[Array, "*#B T"] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> tuple[Float[jax.Array, "B T Do"], LatentT]:
    """Appends T tokens to every sequence: `extend` without `q_lengths`.

    >>> from jaxmha.latent import init_latent_params
    >>> params = init_latent_params(
    ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
    ... )
    >>> out, cache = decode_step(params, jnp.ones((2, 1, 8)), LatentCache.empty(params, 2, 9))
    >>> out.shape, cache.lengths.tolist()
    ((2, 1, 8), [1, 1])
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


@partial(jax.jit, static_argnames=("rotate", "implementation"))
@by_types(step_specs)
def _prefill(
    params: LatentParams,
    x: jax.Array,
    cache: LatentT,
    mask: Mask,
    semantics: Semantics,
    mods: Mods,
    positions: jax.Array | None,
    *,
    rotate: LatentRotate | None,
    implementation: str | tuple[str, ...] | None,
) -> tuple[jax.Array, LatentT]:
    found, dtype = _sizes(params, x, cache)
    B, T = found["B"], found["T"]
    left, _ = mask.window_size or (None, None)
    reject_long_prompt(cache, T, left)
    latent = Latent(params, semantics, dtype, rotate, implementation)
    positions = flat_positions(positions, (B,), B, T)
    causal = checks.flatten_mask(mask & Mask.causal(), (B,), {**found, "S": T})
    read = read_tokens.of_prompts(x, mask, causal, found, mods, semantics.fully_masked)
    keys = latent.keys(x, positions, read.values)
    result = attend(
        *latent.expanded(latent.queries(x, positions, read.queries), keys),
        None,
        causal,
        with_scale(semantics, found),
        None,
        False,
        implementation,
        mods=mods,
    )
    kept, full = append(cache.emptied(), keys, prompt_lengths(mask, found), left)
    out = latent.combined(result.out)
    if isinstance(cache, PagedKVCache):  # the pool may have too few free pages for T <= S tokens
        out = nan_where(full, out)
    return out, kept


@partial(jax.jit, static_argnames=("rotate",))
@by_types(step_specs)
def _extend(
    params: LatentParams,
    x: jax.Array,
    cache: LatentT,
    q_lengths: jax.Array | None,
    mask: Mask,
    semantics: Semantics,
    mods: Mods,
    positions: jax.Array | None,
    *,
    rotate: LatentRotate | None,
) -> tuple[jax.Array, LatentT]:
    found, dtype = _sizes(params, x, cache)
    B, T = found["B"], found["T"]
    left, _ = mask.window_size or (None, None)
    reject_overflow(cache, T, left)
    cache = cache._replace(lengths=jnp.asarray(clipped_counts(cache.lengths)))
    tokens = jnp.arange(T, dtype=np.int32).reshape(1, T)
    places = jnp.asarray(cache.lengths)[:, None] + tokens
    turned = places if positions is None else flat_positions(positions, (B,), B, T)
    mask = flat_mask(mask, cache, found)
    counts = counts_of(q_lengths, found)
    given = None if q_lengths is None else counts
    read = read_tokens.of_step(x, mask.key_value_padding, places, given)
    latent = Latent(params, semantics, dtype, rotate)
    queries = latent.absorbed(latent.queries(x, turned, read.queries))
    keys = latent.keys(x, turned, read.keys)
    longer, full = append(cache, keys, counts, left)
    pair = keys[:, :, None], keys[:, :, None]
    attended, mask = with_window_copy(as_heads(cache), as_heads(longer), *pair, counts, mask)
    heads = attend_cache(
        None, queries, attended, places, mask, with_scale(semantics, found), BLOCK, mods
    )
    heads = latent.values(heads[..., : found["L"]])
    out = nan_where(full, latent.combined(heads))
    if q_lengths is not None:
        out = jnp.where((tokens < counts[:, None])[..., None], out, 0.0)
    return out, longer


def _traced(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, params: LatentParams, x: Array
) -> Mods:
    if score_mod is None and mask_mod is None:
        return Mods()
    return traced_mods(score_mod, mask_mod, check_inputs(params, x=x).dtype)


def _checked(params: LatentParams, x: Array, cache: LatentT, semantics: Semantics) -> LatentT:
    """Checks the arguments and returns the cache; NumPy lengths become int32, since jit would
    truncate them."""
    if not isinstance(cache, LatentCache | PagedKVCache):
        raise TypeError(
            "cache must be a jaxmha.LatentCache, or a jaxmha.PagedKVCache from "
            f"jaxmha.latent.paged_cache, got {type(cache).__name__}"
        )
    check_arguments(params, semantics, {"x": x})
    paged = isinstance(cache, PagedKVCache)
    parts = checked_parts(cache._asdict(), paged=paged)
    if isinstance(cache, PagedKVCache) and cache.value.shape[-1:] not in ((0,), ()):
        raise ValueError(
            f"cache.value: expected axes (P, K, page, h) with h=0, got shape {cache.value.shape}: "
            "pages of latents store keys alone; make the cache by jaxmha.latent.paged_cache"
        )
    return cache._replace(**parts)


def _sizes(
    params: LatentParams, x: jax.Array, cache: LatentT
) -> tuple[dict[str, int], np.dtype[np.floating]]:
    """Checks every shape of a call; returns the sizes by letter (S: slots of the cache), and the
    dtype of the computation."""
    found, dtype = check_inputs(params, x=x)
    bind("x", x.shape, "B T Dq", found)
    C = found["L"] + found["R"]
    of_cache = {"B": found["B"], "C": C, "K": 1, "H": C, "h": 0}
    axes = PAGED if isinstance(cache, PagedKVCache) else LATENTS  # pages: one head of C features
    check_shapes(cache._asdict(), axes, of_cache)
    found["S"] = cache.slots
    reject_zigzag(found["T"])
    return found, dtype
