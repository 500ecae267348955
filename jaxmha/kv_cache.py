"""Decoding with a cache of keys and values: `KVCache`, `prefill` and `decode_step`."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmha import bias_kv, checks, sharding
from jaxmha.arrays import Array, DTypeLike, require_arrays
from jaxmha.attention import attend, hashable
from jaxmha.cached_attention import BLOCK, attend_cache, nan_where, reject_structure
from jaxmha.dims import bind
from jaxmha.explicit_sharding import by_types, sharding_of_features, spec_of
from jaxmha.integers import FAR, near
from jaxmha.mask import Mask
from jaxmha.mask_arguments import as_mask
from jaxmha.params import MHAParams, check
from jaxmha.projections import combine_checked, compute_dtype, project_checked
from jaxmha.rotary import Rotate, static_rotation
from jaxmha.semantics import Semantics


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, in a ring buffer: slot `p % S` holds position p.

    A plain pytree: donate it to the step that returns its successor. To roll back, reduce the
    lengths, `cache._replace(lengths=earlier)`, as long as no token that is still attended has been
    overwritten: with `Mask.window(left, ...)`, up to S - left tokens once a cache has wrapped
    around.

    Attributes:
      key: `(B, K, S, H)`, S slots.
      value: `(B, K, S, h)`.
      lengths: `(B,)` int32, number of tokens so far per sequence; a negative length counts as 0.
        Positions are counted up to 2**30, beyond which the outputs of a sequence are NaN.
    """

    key: Array
    value: Array
    lengths: Array

    @classmethod
    def empty(
        cls, params: MHAParams, batch_size: int, length: int, dtype: DTypeLike | None = None
    ) -> "KVCache":
        """A cache with room for `length` tokens of each sequence.

        Args:
          params: of the layer, for K, H and h.
          batch_size: B.
          length: S, at most 2**30. With `Mask.window(left, ...)` in every step, left + 1 slots
            are enough for sequences of up to 2**30 tokens.
          dtype: default that of the parameters. Keys and values are rounded to it once, when a
            token is written, as by `astype`: values beyond its range become inf, or NaN if it has
            no inf. Steps compute in the dtype of their inputs. float8 takes a quarter of the bytes
            of float32.

        Raises:
          ValueError: a size is not an integer of at least 0, or length is more than 2**30.
          TypeError: dtype is not floating, has no zero (float8_e8m0fnu), or is float64 without x64.

        >>> from jaxmha import init_params
        >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
        >>> KVCache.empty(params, 5, 7).key.shape
        (5, 2, 7, 3)
        """
        sizes = check(params)
        checks.require_sizes(least=0, batch_size=batch_size)
        checks.require_sizes(least=0, most=FAR, length=length)
        dtype = (
            checks.promoted(
                **{
                    "params.key.kernel": params.key.kernel,
                    "params.value.kernel": params.value.kernel,
                }
            )
            if dtype is None
            else dtype
        )
        dtype = checks.floating_dtype(dtype)
        shape = (batch_size, sizes["K"], length)
        return cls(
            jnp.zeros((*shape, sizes["H"]), dtype),
            jnp.zeros((*shape, sizes["h"]), dtype),
            jnp.zeros(batch_size, np.int32),
        )


def prefill(
    params: MHAParams,
    x: Float[Array, "B T Dq"],
    cache: KVCache,
    *,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    rotate: Rotate | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[jax.Array, "B T Do"], KVCache]:
    """Causal self-attention over prompts; returns the output and a cache of these prompts alone.

    Args:
      params: of the layer; Dq = Dk = Dv.
      x: prompts, `(B, T, Dq)`; shorter prompts are padded on the right.
      cache: its previous contents are discarded.
      semantics: as in `multi_head_attention`; its dropout has no effect.
      mask: combined with the causal mask; `Mask.lengths(key_value=lengths)` gives the lengths of
        the prompts.
      rotate: `rotate(heads, positions)` of projected queries and keys, for `rope`. It is a static
        argument: give the same function in every call, or a `functools.partial` of the same
        function and equal arguments. Every new lambda compiles again.
      implementation: as in `multi_head_attention`.

    Returns:
      `(out, cache)`; out is `(B, T, Do)`.

    Raises:
      ValueError: T exceeds the slots of the cache, a shape does not fit, or tokens are in zig-zag
        order.
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
        rotate=static_rotation(rotate),
        implementation=hashable(implementation),
    )
    return out, kept


def _output_specs(
    params: MHAParams, x: jax.Array, cache: KVCache, *_: object, **__: object
) -> tuple[sharding.Axes, object] | None:
    """Specs of the outputs: a cache keeps its sharding."""
    found = sharding_of_features(x, params.query.kernel)
    kept = KVCache(*(sharding.spec(*spec_of(part)) for part in cache))  # type: ignore[arg-type]
    return found and (found.axes, (found.features, kept))


@partial(jax.jit, static_argnames=("rotate", "implementation"))
@by_types(_output_specs)
def _prefill(
    params: MHAParams,
    x: jax.Array,
    cache: KVCache,
    mask: Mask,
    semantics: Semantics,
    *,
    rotate: Rotate | None,
    implementation: str | tuple[str, ...] | None,
) -> tuple[jax.Array, KVCache]:
    sizes = _sizes(params, x, cache)
    B, T, S = sizes["B"], sizes["T"], sizes["S"]
    left = None if mask.window_size is None else mask.window_size[0]
    if T > S and (left is None or left >= S):
        raise ValueError(
            f"x: T={T} tokens are more than the S={S} slots of the cache (cache.key is "
            f"(B, K, S, H) = {cache.key.shape}): make a longer one"
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
        sinks=params.sinks,
    )
    lengths = jnp.full(B, T, np.int32)
    if mask.key_value_lengths is not None:
        lengths = jnp.minimum(lengths, _counts(jnp.asarray(mask.key_value_lengths)))
    fresh = cache._replace(lengths=jnp.zeros(B, np.int32))
    kept = _write(fresh, key, value, lengths)
    return _combine(params, result.out, semantics, x), kept


def decode_step(
    params: MHAParams,
    x: Float[Array, "B T Dq"],
    cache: KVCache,
    *,
    semantics: Semantics = Semantics(),
    mask: Bool[Array, "..."] | Mask | None = None,
    rotate: Rotate | None = None,
) -> tuple[Float[jax.Array, "B T Do"], KVCache]:
    """Appends tokens to the cache; each attends to all tokens before it and to itself.

    The cost of a step grows with the longest sequence, not with the slots of the cache. Each
    sequence has its own length. If a sequence has no free slots left, or more than 2**30 tokens,
    its outputs are NaN (and its cache is unusable), since a compiled program cannot raise. Steps
    have no reverse-mode gradient: train with `multi_head_attention` on whole sequences.

    Args:
      params: of the layer; Dq = Dk = Dv.
      x: new tokens, `(B, T, Dq)`; T is 1 in plain decoding.
      cache: updated in place if donated (`jax.jit(..., donate_argnums=...)`).
      semantics: as in `multi_head_attention`; its dropout has no effect.
      mask: combined with the causal mask: `Mask.window(left, ...)`, with which a cache of left + T
        slots wraps around (ring buffer); `Mask.padding(key_value=...)`, `(B, S)`, the valid slots
        (for prompts padded on the left); a Boolean array over slots, broadcastable to
        `(B, N, T, S)`.
      rotate: as in `prefill`.

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
    cache = _checked(params, x, cache, semantics)
    mask = as_mask(mask)
    reject_structure(mask)
    if semantics.fully_masked == "mean":
        raise ValueError(
            "semantics.fully_masked='mean' is the mean over all keys, which a cache does not have: "
            "use 'zero' or 'nan'"
        )
    out, longer = _decode_step(
        params, x, cache, mask, semantics, rotate=static_rotation(rotate), block=BLOCK
    )
    return out, longer


@partial(jax.jit, static_argnames=("rotate", "block"))
@by_types(_output_specs)
def _decode_step(
    params: MHAParams,
    x: jax.Array,
    cache: KVCache,
    mask: Mask,
    semantics: Semantics,
    *,
    rotate: Rotate | None,
    block: int,
) -> tuple[jax.Array, KVCache]:
    sizes = _sizes(params, x, cache)
    B, T, S = sizes["B"], sizes["T"], sizes["S"]
    lengths = _counts(jnp.asarray(cache.lengths))
    left, _ = mask.window_size or (None, None)
    if T > S or (left is not None and left < S < left + T):
        raise ValueError(
            f"x: T={T} new tokens do not fit into the S={S} slots of the cache"
            f"{'' if left is None else f' with a window of {left}'}: it needs "
            f"{T if left is None else left + T}"
        )
    rings = left is not None and left + T <= S
    tokens = jnp.arange(T, dtype=np.int32).reshape(1, T)
    positions = lengths[:, None] + tokens
    query, key, value = _heads(params, x, semantics, positions, rotate)
    cache = _write(cache._replace(lengths=lengths), key, value, jnp.full(B, T, np.int32))
    mask = checks.flatten_mask(mask, (B,), sizes)
    out = attend_cache(params, query, cache, positions, mask, semantics, block)
    # A ring buffer never fills, but positions are limited to FAR.
    out = nan_where((lengths + T > (FAR if rings else S)).reshape(B, 1, 1, 1), out)
    return _combine(params, out, semantics, x), cache


ArrayT = TypeVar("ArrayT", bound=Array)


def _checked(params: MHAParams, x: Array, cache: KVCache, semantics: Semantics) -> KVCache:
    """Checks the arguments and returns the cache; NumPy lengths become int32, since jit would
    truncate them."""
    checks.require_type(MHAParams, params=params)
    checks.require_type(KVCache, cache=cache)
    checks.require_type(Semantics, semantics=semantics)
    require_arrays(x=x)
    require_arrays(**{f"cache.{name}": part for name, part in cache._asdict().items()})
    stored = {"cache.key": cache.key, "cache.value": cache.value}
    checks.reject_rounding(params=params, x=x, **stored)
    for name in ("key", "value"):
        checks.floating_dtype(getattr(cache, name).dtype, f"the dtype of cache.{name}")
    if not jnp.issubdtype(cache.lengths.dtype, np.integer):
        raise TypeError(f"cache.lengths must be an integer array, got {cache.lengths.dtype}")
    if not isinstance(cache.lengths, np.ndarray):
        return cache
    return cache._replace(lengths=_counts(cache.lengths))


def _counts(lengths: ArrayT) -> ArrayT:
    """Clips lengths to [0, 2**30], so that lengths plus T fit int32; arrays become int32."""
    return near(lengths).clip(0)  # type: ignore[return-value]


def _sizes(params: MHAParams, x: jax.Array, cache: KVCache) -> dict[str, int]:
    """Checks every shape of a call and returns the sizes by letter; S counts slots."""
    sizes = check(params)
    bind("x", x.shape, "B T Dq", sizes)
    mesh_axes = sharding.current()
    if sizes["T"] > 1 and mesh_axes is not None and mesh_axes.zigzag:
        raise ValueError(
            f"x: T={sizes['T']} tokens in zig-zag order, and a cache holds them by true position: "
            "leave zigzag out of jaxmha.sharding.use here, and give them in their natural order"
        )
    for name, axes in (("key", "B K S H"), ("value", "B K S h"), ("lengths", "B")):
        bind(f"cache.{name}", getattr(cache, name).shape, axes, sizes)
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


def _combine(
    params: MHAParams, heads: jax.Array, semantics: Semantics, x: jax.Array
) -> jax.Array:
    return combine_checked(params, heads, semantics, compute_dtype(params, heads=heads), x)


def _write(
    cache: KVCache,
    key: Float[jax.Array, "B T K H"],
    value: Float[jax.Array, "B T K h"],
    counts: Int[jax.Array, "B"],
) -> KVCache:
    """Writes the first `counts` of T new tokens `B T K H`, `B T K h` into the cache at its
    lengths."""
    S, T = cache.key.shape[2], key.shape[1]
    if T > S:  # only the last S tokens: earlier ones would be overwritten
        rows = jnp.maximum(counts - S, 0)[:, None] + jnp.arange(S, dtype=np.int32).reshape(1, S)
    else:
        rows = jnp.broadcast_to(jnp.arange(T, dtype=np.int32).reshape(1, T), (key.shape[0], T))
    starts = jnp.asarray(cache.lengths)
    if S == 0:
        return cache
    slots = jnp.where(rows < counts[:, None], (starts[:, None] + rows) % S, S)  # S: not written

    def put(old: jax.Array, new: jax.Array, row: jax.Array, slot: jax.Array) -> jax.Array:
        chosen = jnp.swapaxes(new[row], 0, 1).astype(old.dtype)  # K T H
        return old.at[:, slot].set(chosen, mode="drop", unique_indices=False)

    write = jax.vmap(put)
    return KVCache(
        write(jnp.asarray(cache.key), key, rows, slots),
        write(jnp.asarray(cache.value), value, rows, slots),
        starts + counts,
    )
