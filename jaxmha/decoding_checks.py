"""Checks of the arguments of `prefill` and `extend`."""

from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import checks, sharding
from jaxmha.arrays import Array, require_arrays
from jaxmha.dims import bind
from jaxmha.integers import near
from jaxmha.kv_cache import KVCache
from jaxmha.paged_cache import PagedKVCache
from jaxmha.params import MHAParams, check
from jaxmha.quantized import is_scaled, storage_dtype
from jaxmha.semantics import FullyMasked, Semantics, reject_axes

CacheT = TypeVar("CacheT", KVCache, PagedKVCache)
ArrayT = TypeVar("ArrayT", bound=Array)


class HasSlots(Protocol):
    """A cache of any kind."""

    @property
    def slots(self) -> int: ...


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


def reject_overflow(cache: HasSlots, T: int, left: int | None) -> None:
    """Raises ValueError if T new tokens cannot fit into the slots, whatever the lengths are."""
    S = cache.slots
    ring = not isinstance(cache, PagedKVCache) and left is not None
    if T > S or (ring and left is not None and left < S < left + T):
        raise ValueError(
            f"x: T={T} new tokens do not fit into the S={S} slots of the cache"
            f"{f' with a window of {left}' if ring else ''}: it needs "
            f"{left + T if ring and left is not None else T}"
        )


def reject_long_prompt(cache: HasSlots, T: int, left: int | None) -> None:
    """Raises ValueError for prompts of T tokens that are more than the slots, unless a ring buffer
    keeps the last of them."""
    S = cache.slots
    if T > S and (left is None or left >= S or isinstance(cache, PagedKVCache)):
        raise ValueError(
            f"x: T={T} tokens are more than the S={S} slots of the cache: make a longer one"
        )


def checked_cache(params: MHAParams, x: Array, cache: CacheT, semantics: Semantics) -> CacheT:
    """Checks the arguments and returns the cache; NumPy lengths become int32, since jit would
    truncate them."""
    checks.require_type(MHAParams, params=params)
    if not isinstance(cache, KVCache | PagedKVCache):
        raise TypeError(
            f"cache must be a jaxmha.KVCache or a jaxmha.PagedKVCache, got {type(cache).__name__}"
        )
    checks.require_type(Semantics, semantics=semantics)
    reject_axes(semantics)
    require_arrays(x=x)
    checks.reject_rounding(params=params, x=x)
    return checked_parts(cache)


def checked_parts(cache: CacheT) -> CacheT:
    """Checks the dtypes of a cache and returns it, with int32 lengths in the place of NumPy's."""
    for name, part in cache._asdict().items():
        is_scale = name.endswith("_scale")  # None unless the dtype of the cache needs scales
        require_arrays(optional=is_scale, **{f"cache.{name}": part})
    stored = {"cache.key": cache.key, "cache.value": cache.value}
    checks.reject_rounding(**stored)
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
    lengths = checked_lengths(cache.lengths)
    if isinstance(cache, PagedKVCache):
        require_integers("cache.table", cache.table)
    return cache._replace(lengths=lengths)


def checked_lengths(lengths: Array) -> Array:
    """Checks that the lengths of a cache are integers; converts NumPy arrays to int32."""
    require_integers("cache.lengths", lengths)
    return clipped_counts(lengths) if isinstance(lengths, np.ndarray) else lengths


def require_integers(name: str, array: Array) -> None:
    """Raises TypeError, which names the array, for one of another dtype."""
    if not jnp.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be an integer array, got {array.dtype}")


def reject_mean(policy: FullyMasked) -> None:
    """Raises ValueError if fully masked rows are the mean over all keys."""
    if policy == "mean":
        raise ValueError(
            "semantics.fully_masked='mean' is the mean over all keys, which a cache does not have: "
            "use 'zero' or 'nan'"
        )


def checked_counts(q_lengths: Array | None) -> Array | None:
    """Checks that `q_lengths` is an array of integers; converts NumPy arrays to int32."""
    require_arrays(optional=True, q_lengths=q_lengths)
    if q_lengths is not None:
        require_integers("q_lengths", q_lengths)
    return clipped_counts(q_lengths) if isinstance(q_lengths, np.ndarray) else q_lengths


def clipped_counts(lengths: ArrayT) -> ArrayT:
    """Clips lengths to [0, 2**30], so that lengths plus T fit int32; arrays become int32."""
    return near(lengths).clip(0)  # type: ignore[return-value]


def counts_of(q_lengths: jax.Array | None, sizes: dict[str, int]) -> jax.Array:
    """The number of new tokens of each sequence, `(B,)`; None: all T."""
    if q_lengths is None:
        return jnp.full(sizes["B"], sizes["T"], np.int32)
    bind("q_lengths", q_lengths.shape, "B", sizes)
    return jnp.minimum(clipped_counts(q_lengths), sizes["T"])


def reject_zigzag(T: int) -> None:
    """Raises ValueError for several tokens in zig-zag order."""
    mesh_axes = sharding.current()
    if T > 1 and mesh_axes is not None and mesh_axes.zigzag:
        raise ValueError(
            f"x: T={T} tokens in zig-zag order, and a cache holds them by true position: "
            "leave zigzag out of jaxmha.sharding.use here, and give them in their natural order"
        )


def sizes_of(params: MHAParams, x: jax.Array, cache: KVCache | PagedKVCache) -> dict[str, int]:
    """Checks every shape of a call and returns the sizes by letter; S counts slots."""
    sizes = check(params)
    bind("x", x.shape, "B T Dq", sizes)
    reject_zigzag(sizes["T"])
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
