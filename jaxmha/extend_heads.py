"""`extend_heads`: appends projected heads to a cache, and attends to all tokens in it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from jaxmha import checks
from jaxmha.arrays import Array, require_arrays
from jaxmha.cache_arguments import DENSE, PAGED, check_shapes, clipped_counts
from jaxmha.cached_attention import attend_cache, nan_where, reject_structure
from jaxmha.cached_step import BLOCK
from jaxmha.decoding_checks import (
    CacheT,
    checked_counts,
    checked_parts,
    counts_of,
    flat_mask,
    reject_latent_pages,
    reject_mean,
    reject_overflow,
    reject_zigzag,
    require_cache,
)
from jaxmha.dims import bind
from jaxmha.explicit_sharding import by_types, sharding_of_heads, specs_of_leaves
from jaxmha.mask import Mask
from jaxmha.mask_arguments import as_mask, with_window
from jaxmha.mod_arguments import MaskMod, Mods, ScoreMod, traced_mods
from jaxmha.paged_cache import PagedKVCache
from jaxmha.params import MHAParams
from jaxmha.semantics import Semantics, reject_axes
from jaxmha.sharding import Axes
from jaxmha.window_copy import with_window_copy


def extend_heads(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K h"],
    cache: CacheT,
    *,
    q_lengths: Integer[Array, "B"] | None = None,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> tuple[Float[jax.Array, "B T N h"], CacheT]:
    """`extend` without the projections: for a layer with projections or rotations of its own.

    Appends keys and values to the cache; each query attends to all tokens before it and to itself.
    With `project`, a rotation and `combine` it is `extend` of a layer without extra positions
    (`bias_k`, `bias_v`, `add_zero_attn`).

    Args:
      query: projected and rotated queries of the new tokens, padded on the right.
      key: projected and rotated keys of the same tokens.
      value: projected values of the same tokens.
      cache: as in `extend`.
      q_lengths: as in `extend`.
      semantics: scale, soft cap, window, precision and fully masked rows; other settings have no
        effect.
      mask: as in `decode_step`.
      score_mod, mask_mod: as in `prefill`.
      sinks: `(N,)`, a learned logit per head without a value, as in `MHAParams`.

    Returns:
      `(out, cache)`; out is `(B, T, N, h)`, 0 beyond the tokens of a sequence, and NaN as in
      `decode_step`.

    Raises:
      ValueError: a shape does not fit, N is not a multiple of K, `semantics` adds positions, or as
        in `extend`.
      TypeError: heads are not floating, or JAX does not promote their dtypes, or as in `extend`.

    >>> from jaxmha import KVCache, combine, init_params, project, rope
    >>> params = init_params(jax.random.key(0), num_heads=3, features=12)
    >>> x, cache = jnp.ones((2, 1, 12)), KVCache.empty(params, 2, 8)
    >>> query, key, value = project(params, x)
    >>> at = cache.lengths[:, None] + 5  # positions of your own
    >>> heads, cache = extend_heads(rope(query, at), rope(key, at), value, cache)
    >>> combine(params, heads).shape, cache.lengths.tolist()
    ((2, 1, 12), [1, 1])
    """
    require_cache(cache)
    checks.require_type(Semantics, semantics=semantics)
    reject_axes(semantics)
    heads = {"query": query, "key": key, "value": value}
    require_arrays(optional=False, **heads)
    require_arrays(optional=True, sinks=sinks)
    checks.reject_rounding(**heads, sinks=sinks)
    checks.promoted(sinks=sinks, **heads)
    if semantics.add_zero_attn:
        raise ValueError(
            "semantics.add_zero_attn: heads are attended without extra positions: use jaxmha.extend"
        )
    mask = with_window(as_mask(mask), semantics)
    reject_structure(mask)
    reject_mean("zero" if sinks is not None else semantics.fully_masked)
    paged = isinstance(cache, PagedKVCache)
    parts = checked_parts(cache._asdict(), paged=paged)
    reject_latent_pages(cache, lambda: value.shape[-1] if value.ndim else 0)
    found: tuple[jax.Array, CacheT] = _extend_heads(
        query,
        (key, value),
        cache._replace(**parts),
        checked_counts(q_lengths, query, "query"),
        mask,
        semantics,
        traced_mods(score_mod, mask_mod, checks.promoted(**heads)),
        sinks,
    )
    return found


def _specs(query: Array, _: object, cache: object, *__: object) -> tuple[Axes, object] | None:
    """Partition specs of the outputs: heads as the queries, and the cache as it is sharded."""
    found = sharding_of_heads(query)
    return found and (found.axes, (found.heads, specs_of_leaves(cache)))


@jax.jit
@by_types(_specs)
def _extend_heads(
    query: jax.Array,
    pair: tuple[jax.Array, jax.Array],
    cache: CacheT,
    q_lengths: jax.Array | None,
    mask: Mask,
    semantics: Semantics,
    mods: Mods,
    sinks: jax.Array | None,
) -> tuple[jax.Array, CacheT]:
    heads = {"query": query, "key": pair[0], "value": pair[1]}
    sizes: dict[str, int] = {}
    for name, axes in (("query", "B T N H"), ("key", "B T K H"), ("value", "B T K h")):
        bind(name, heads[name].shape, axes, sizes)
    checks.check_groups(query, pair[0])
    check_shapes(cache._asdict(), PAGED if isinstance(cache, PagedKVCache) else DENSE, sizes)
    if sinks is not None:
        bind("sinks", sinks.shape, "N", sizes)
    reject_zigzag(sizes["T"], "query, key, value")
    sizes["S"] = cache.slots
    dtype = checks.promoted(**heads)
    new = (heads["key"].astype(dtype), heads["value"].astype(dtype))
    counts = counts_of(q_lengths, sizes)
    out, cache, full = append_and_attend(
        query.astype(dtype), *new, cache, counts, mask, semantics, mods, sizes, sinks=sinks
    )
    out = nan_where(full, out)
    if q_lengths is not None:
        tokens = jnp.arange(sizes["T"], dtype=np.int32)[None]
        out = jnp.where((tokens < counts[:, None])[..., None, None], out, 0.0)
    return out, cache


def append_and_attend(
    query: Float[jax.Array, "B T N H"],
    key: Float[jax.Array, "B T K H"],
    value: Float[jax.Array, "B T K h"],
    cache: CacheT,
    counts: Int[jax.Array, "B"],
    mask: Mask,
    semantics: Semantics,
    mods: Mods,
    sizes: dict[str, int],
    *,
    params: MHAParams | None = None,
    sinks: jax.Array | None = None,
    block: int = BLOCK,
) -> tuple[Float[jax.Array, "B T N h"], CacheT, Bool[jax.Array, "B"]]:
    """Appends the first `counts` of T tokens, and attends to all tokens before each of them.

    Args:
      params, sinks, block: as in `attend_cache`.
      sizes: sizes by letter; S counts slots.

    Returns:
      the output, the longer cache, and the rows that had no room: set NaN there after the output
      projection, since the gradient of its kernel would be NaN * 0 otherwise.
    """
    T, (left, _) = query.shape[1], mask.window_size or (None, None)
    reject_overflow(cache, T, left, "query, key, value" if params is None else "x")
    cache = cache._replace(lengths=jnp.asarray(clipped_counts(cache.lengths)))
    longer, full = cache.append(key, value, counts, left)
    mask = flat_mask(mask, cache, sizes)
    attended, mask = with_window_copy(cache, longer, key, value, counts, mask)
    positions = jnp.asarray(cache.lengths)[:, None] + jnp.arange(T, dtype=np.int32)[None]
    out = attend_cache(
        params, query, attended, positions, mask, semantics, block, mods, sinks=sinks
    )
    return out, longer, full
