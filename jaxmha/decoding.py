"""Decoding with a cache of keys and values: `prefill`, `decode_step` and `extend`."""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxmha import bias_kv, checks, sharding
from jaxmha.arrays import Array, require_arrays
from jaxmha.attention import attend, hashable
from jaxmha.cached_attention import BLOCK, attend_cache, nan_where, reject_structure
from jaxmha.dims import bind
from jaxmha.explicit_sharding import by_types, sharding_of_features, spec_of
from jaxmha.integers import near
from jaxmha.kv_cache import KVCache
from jaxmha.layer import policy_of
from jaxmha.mask import Mask
from jaxmha.mask_arguments import as_mask
from jaxmha.mod_arguments import MaskMod, Mods, ScoreMod, traced_mods, without_extras
from jaxmha.paged_cache import PagedKVCache
from jaxmha.params import MHAParams, check
from jaxmha.projections import combine_checked, compute_dtype, project_checked
from jaxmha.quantized import is_scaled, storage_dtype
from jaxmha.rotary import Rotate, static_rotation
from jaxmha.semantics import Semantics

CacheT = TypeVar("CacheT", KVCache, PagedKVCache)
ArrayT = TypeVar("ArrayT", bound=Array)

# Cache type -> array -> its axes.
AXES: dict[type, dict[str, str]] = {
    KVCache: {"key": "B K S H", "value": "B K S h", "lengths": "B"},
    PagedKVCache: {
        "key": "P K page H",
        "value": "P K page h",
        "table": "B M",
        "lengths": "B",
        "key_scale": "P K page",
        "value_scale": "P K page",
    },
}


def prefill(
    params: MHAParams,
    x: Float[Array, "B T Dq"],
    cache: CacheT,
    *,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    rotate: Rotate | None = None,
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
        the prompts.
      rotate: `rotate(heads, positions)` of projected queries and keys, such as `rope`. It is a
        static argument: give the same function in every call, or a `functools.partial` of the same
        function with equal arguments. Every new lambda triggers a compilation.
      score_mod, mask_mod: score and mask functions, as in `dot_product_attention`; i and j are
        positions in the sequence.
      implementation: as in `multi_head_attention`.

    Returns:
      `(out, cache)`; out is `(B, T, Do)`.

    Raises:
      ValueError: T exceeds the slots of the cache (allowed for a ring buffer), a shape does not
        fit, or tokens are in zig-zag order.
      TypeError: keys or values of the cache are not floating, or its lengths are not integers.

    >>> from jaxmha import init_params
    >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
    >>> out, cache = prefill(params, jnp.ones((1, 3, 6)), KVCache.empty(params, 1, 8))
    >>> out.shape, cache.lengths.tolist()
    ((1, 3, 6), [3])
    """
    cache = _checked(params, x, cache, semantics)
    out, kept = _prefill(
        params,
        x,
        cache,
        as_mask(mask),
        semantics,
        _traced(score_mod, mask_mod, params, x, semantics),
        rotate=static_rotation(rotate),
        implementation=hashable(implementation),
    )
    return out, kept


def _traced(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    params: MHAParams,
    x: Array,
    semantics: Semantics | None,
) -> Mods:
    """Traces `score_mod` and `mask_mod`.

    If `semantics` is given, keys include the extra positions, to which neither function applies.
    """
    if score_mod is None and mask_mod is None:
        return Mods()
    extra = 0 if semantics is None else bias_kv.count(params, semantics)
    functions = without_extras(score_mod, mask_mod, x.shape[1], extra)
    return traced_mods(*functions, compute_dtype(params, x=x))


def _output_specs(
    params: MHAParams, x: jax.Array, cache: CacheT, *_: object, **__: object
) -> tuple[sharding.Axes, object] | None:
    """Specs of the outputs: a cache keeps its sharding."""
    found = sharding_of_features(x, params.query.kernel)
    kept = jax.tree.map(lambda part: sharding.spec(*spec_of(part)), cache)
    return found and (found.axes, (found.features, kept))


@partial(jax.jit, static_argnames=("rotate", "implementation"))
@by_types(_output_specs)
def _prefill(
    params: MHAParams,
    x: jax.Array,
    cache: CacheT,
    mask: Mask,
    semantics: Semantics,
    mods: Mods,
    *,
    rotate: Rotate | None,
    implementation: str | tuple[str, ...] | None,
) -> tuple[jax.Array, CacheT]:
    sizes = _sizes(params, x, cache)
    B, T, S = sizes["B"], sizes["T"], sizes["S"]
    left = None if mask.window_size is None else mask.window_size[0]
    if T > S and (left is None or left >= S or isinstance(cache, PagedKVCache)):
        axes = f"({', '.join(AXES[type(cache)]['key'].split())})"
        raise ValueError(
            f"x: T={T} tokens are more than the S={S} slots of the cache (cache.key is "
            f"{axes} = {cache.key.shape}): make a longer one"
        )
    positions = jnp.broadcast_to(jnp.arange(T, dtype=np.int32).reshape(1, T), (B, T))
    query, key, value = _heads(params, x, semantics, positions, rotate)
    extra = bias_kv.count(params, semantics)
    wide = bias_kv.widen_mask(mask & Mask.causal(), extra, (B,), {**sizes, "S": T})
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
    lengths = jnp.full(B, T, np.int32)
    if mask.key_value_lengths is not None:
        lengths = jnp.minimum(lengths, _counts(jnp.asarray(mask.key_value_lengths)))
    kept, full = cache.emptied().append(key, value, lengths, left)
    out = result.out
    if isinstance(cache, PagedKVCache):  # the pool may have too few free pages for T <= S tokens
        out = nan_where(full.reshape(B, 1, 1, 1), out)
    return _combine(params, out, semantics, x), kept


def decode_step(
    params: MHAParams,
    x: Float[Array, "B T Dq"],
    cache: CacheT,
    *,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    rotate: Rotate | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> tuple[Float[jax.Array, "B T Do"], CacheT]:
    """Appends tokens to the cache; each attends to all tokens before it and to itself.

    The cost of a step grows with the longest sequence; on GPUs without cuDNN's kernel, with the
    slots of the cache. Each sequence has its own length. If a sequence has no free slots left, or
    more than 2**30 tokens, its outputs are NaN (and its cache is unusable), since a compiled
    program cannot raise. Steps have no reverse-mode gradient: train with `multi_head_attention` on
    whole sequences.

    Args:
      params: parameters of the layer; Dq = Dk = Dv.
      x: new tokens, `(B, T, Dq)`; T is 1 in plain decoding.
      cache: a `KVCache` or `PagedKVCache`; updated in place if donated
        (`jax.jit(..., donate_argnums=...)`).
      semantics: as in `multi_head_attention`; its dropout has no effect.
      mask: combined with the causal mask: `Mask.window(left, ...)`, with which a `KVCache` of at
        least left + T slots is a ring buffer, and a `PagedKVCache` frees pages to the left of the
        window; `Mask.padding(key_value=...)`, `(B, S)`, the valid slots (for prompts padded on the
        left); a Boolean array over slots, broadcastable to `(B, N, T, S)`.
      rotate: as in `prefill`.
      score_mod, mask_mod: as in `prefill`.

    Returns:
      `(out, cache)`; out is `(B, T, Do)`.

    Raises:
      ValueError: a shape does not fit, the mask has a condition that a step does not support, or
        tokens are in zig-zag order.
      TypeError: as in `prefill`.

    >>> from jaxmha import init_params
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
      q_lengths: `(B,)`, the number of tokens of each sequence, clipped to [0, T]; None: all T.
      semantics: as in `decode_step`.
      mask: as in `decode_step`.
      rotate: as in `prefill`.
      score_mod, mask_mod: as in `prefill`.

    Returns:
      `(out, cache)`; out is `(B, T, Do)`, 0 beyond the tokens of a sequence.

    Raises:
      ValueError: as in `decode_step`.
      TypeError: as in `prefill`, or q_lengths are not integers.

    >>> from jaxmha import init_params
    >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
    >>> cache = PagedKVCache.empty(params, 3, 32, pages=8, page_size=4)
    >>> counts = np.asarray([5, 1, 0])
    >>> out, cache = extend(params, jnp.ones((3, 5, 6)), cache, q_lengths=counts)
    >>> cache.lengths.tolist(), int(cache.free_pages())
    ([5, 1, 0], 5)
    """
    cache = _checked(params, x, cache, semantics)
    mask = as_mask(mask)
    reject_structure(mask)
    if policy_of(params, semantics) == "mean":
        raise ValueError(
            "semantics.fully_masked='mean' is the mean over all keys, which a cache does not have: "
            "use 'zero' or 'nan'"
        )
    found: tuple[jax.Array, CacheT] = _extend(
        params,
        x,
        cache,
        _checked_counts(q_lengths),
        mask,
        semantics,
        _traced(score_mod, mask_mod, params, x, None),
        rotate=static_rotation(rotate),
        block=BLOCK,
    )
    return found


@partial(jax.jit, static_argnames=("rotate", "block"))
@by_types(_output_specs)
def _extend(
    params: MHAParams,
    x: jax.Array,
    cache: CacheT,
    q_lengths: jax.Array | None,
    mask: Mask,
    semantics: Semantics,
    mods: Mods,
    *,
    rotate: Rotate | None,
    block: int,
) -> tuple[jax.Array, CacheT]:
    sizes = _sizes(params, x, cache)
    B, T = sizes["B"], sizes["T"]
    left, _ = mask.window_size or (None, None)
    _reject_overflow(cache, T, left)
    lengths = _counts(jnp.asarray(cache.lengths))
    tokens = jnp.arange(T, dtype=np.int32).reshape(1, T)
    positions = lengths[:, None] + tokens
    query, key, value = _heads(params, x, semantics, positions, rotate)
    counts = jnp.full(B, T, np.int32)
    if q_lengths is not None:
        bind("q_lengths", q_lengths.shape, "B", sizes)
        counts = jnp.minimum(_counts(q_lengths), T)
    cache, full = cache._replace(lengths=lengths).append(key, value, counts, left)
    mask = checks.flatten_mask(mask, (B,), sizes)
    out = attend_cache(params, query, cache, positions, mask, semantics, block, mods)
    out = _combine(params, nan_where(full.reshape(B, 1, 1, 1), out), semantics, x)
    if q_lengths is not None:
        out = jnp.where((tokens < counts[:, None])[..., None], out, 0.0)
    return out, cache


def _reject_overflow(cache: KVCache | PagedKVCache, T: int, left: int | None) -> None:
    """Raises ValueError if T new tokens cannot fit into the slots, whatever the lengths are."""
    S = cache.slots
    ring = isinstance(cache, KVCache) and left is not None
    if T > S or (ring and left is not None and left < S < left + T):
        raise ValueError(
            f"x: T={T} new tokens do not fit into the S={S} slots of the cache"
            f"{f' with a window of {left}' if ring else ''}: it needs "
            f"{left + T if ring and left is not None else T}"
        )


def _checked(params: MHAParams, x: Array, cache: CacheT, semantics: Semantics) -> CacheT:
    """Checks the arguments and returns the cache; NumPy lengths become int32, since jit would
    truncate them."""
    checks.require_type(MHAParams, params=params)
    if not isinstance(cache, KVCache | PagedKVCache):
        raise TypeError(
            f"cache must be a jaxmha.KVCache or a jaxmha.PagedKVCache, got {type(cache).__name__}"
        )
    checks.require_type(Semantics, semantics=semantics)
    require_arrays(x=x)
    for name, part in cache._asdict().items():
        is_scale = name.endswith("_scale")  # None unless the dtype of the cache needs scales
        require_arrays(optional=is_scale, **{f"cache.{name}": part})
    stored = {"cache.key": cache.key, "cache.value": cache.value}
    checks.reject_rounding(params=params, x=x, **stored)
    for name in ("key", "value"):
        if isinstance(cache, PagedKVCache):
            dtype = storage_dtype(getattr(cache, name).dtype, f"the dtype of cache.{name}")
            scale = getattr(cache, f"{name}_scale")
            if is_scaled(dtype) != (scale is not None):
                raise ValueError(
                    f"cache.{name} is {dtype}, which is stored "
                    f"{'with' if is_scaled(dtype) else 'without'} scales, and cache.{name}_scale is "
                    f"{'None' if scale is None else 'an array'}: make it by PagedKVCache.empty"
                )
        else:
            checks.floating_dtype(getattr(cache, name).dtype, f"the dtype of cache.{name}")
    for name in ("lengths", "table"):
        part = getattr(cache, name, None)
        if part is not None and not jnp.issubdtype(part.dtype, np.integer):
            raise TypeError(f"cache.{name} must be an integer array, got {part.dtype}")
    if not isinstance(cache.lengths, np.ndarray):
        return cache
    return cache._replace(lengths=_counts(cache.lengths))


def _checked_counts(q_lengths: Array | None) -> Array | None:
    """Checks that `q_lengths` is an array of integers; converts NumPy arrays to int32."""
    require_arrays(optional=True, q_lengths=q_lengths)
    if q_lengths is not None and not jnp.issubdtype(q_lengths.dtype, np.integer):
        raise TypeError(f"q_lengths must be an integer array, got {q_lengths.dtype}")
    return _counts(q_lengths) if isinstance(q_lengths, np.ndarray) else q_lengths


def _counts(lengths: ArrayT) -> ArrayT:
    """Clips lengths to [0, 2**30], so that lengths plus T fit int32; arrays become int32."""
    return near(lengths).clip(0)  # type: ignore[return-value]


def _sizes(params: MHAParams, x: jax.Array, cache: KVCache | PagedKVCache) -> dict[str, int]:
    """Checks every shape of a call and returns the sizes by letter; S counts slots."""
    sizes = check(params)
    bind("x", x.shape, "B T Dq", sizes)
    mesh_axes = sharding.current()
    if sizes["T"] > 1 and mesh_axes is not None and mesh_axes.zigzag:
        raise ValueError(
            f"x: T={sizes['T']} tokens in zig-zag order, and a cache holds them by true position: "
            "leave zigzag out of jaxmha.sharding.use here, and give them in their natural order"
        )
    for name, axes in AXES[type(cache)].items():
        if getattr(cache, name) is not None:
            bind(f"cache.{name}", getattr(cache, name).shape, axes, sizes)
    sizes["S"] = cache.slots
    if not sizes["Dq"] == sizes["Dk"] == sizes["Dv"]:
        raise ValueError(
            f"a cache is for self-attention, and params read inputs of Dq={sizes['Dq']}, "
            f"Dk={sizes['Dk']}, Dv={sizes['Dv']} features"
        )
    return sizes


def _heads(
    params: MHAParams,
    x: jax.Array,
    semantics: Semantics,
    positions: jax.Array,
    rotate: Rotate | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects inputs to heads, and rotates queries and keys if `rotate` is given."""
    dtype = compute_dtype(params, x=x)
    query, key, value = project_checked(params, x, None, None, semantics, dtype)
    if rotate is not None:
        query, key = rotate(query, positions), rotate(key, positions)
    return query, key, value


def _combine(params: MHAParams, heads: jax.Array, semantics: Semantics, x: jax.Array) -> jax.Array:
    return combine_checked(params, heads, semantics, compute_dtype(params, heads=heads), x)
