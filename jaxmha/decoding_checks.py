"""Checks of the arguments of `prefill` and `extend`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import checks, sharding
from jaxmha.arrays import Array, require_arrays
from jaxmha.cache_arguments import (
    COUNTED,
    DENSE,
    PAGED,
    check_dtypes,
    check_shapes,
    clipped_counts,
    reject_outside,
    require_integers,
)
from jaxmha.dims import bind
from jaxmha.integers import near
from jaxmha.kv_cache import KVCache
from jaxmha.mask import Mask
from jaxmha.paged_cache import PagedKVCache
from jaxmha.params import MHAParams, check
from jaxmha.semantics import FullyMasked, Semantics, reject_axes

CacheT = TypeVar("CacheT", KVCache, PagedKVCache)


class HasSlots(Protocol):
    """Any cache, also of latents."""

    @property
    def slots(self) -> int: ...


def reject_overflow(cache: HasSlots, T: int, left: int | None, name: str = "x") -> None:
    """Raises ValueError if T new tokens do not fit even into an empty cache.

    `left`: left bound of the window. A ring buffer takes any number of tokens.
    """
    S = cache.slots
    if T > S and not _is_ring(cache, left):
        raise ValueError(
            f"{name}: T={T} new tokens do not fit into the S={S} slots of the cache: it needs {T}"
        )


def _is_ring(cache: HasSlots, left: int | None) -> bool:
    """True if new tokens overwrite those to the left of the window."""
    return left is not None and left < cache.slots and not isinstance(cache, PagedKVCache)


def flat_mask(mask: Mask, cache: HasSlots, sizes: dict[str, int]) -> Mask:
    """Checks every array of the mask of a step, and gives it one batch axis.

    Key/value padding is over positions: that of a ring buffer may have more than S columns.
    """
    padding, (left, _) = mask.key_value_padding, mask.window_size or (None, None)
    longer = padding is not None and _is_ring(cache, left) and padding.shape[-1] > sizes["S"]
    if padding is None or not longer:
        return checks.flatten_mask(mask, (sizes["B"],), sizes)
    columns = {**sizes, "S": padding.shape[-1]}
    flat = checks.flatten_mask(Mask(key_value_padding=padding), (sizes["B"],), columns)
    rest = checks.flatten_mask(replace(mask, key_value_padding=None), (sizes["B"],), sizes)
    return replace(rest, key_value_padding=flat.key_value_padding)


def reject_long_prompt(cache: HasSlots, T: int, left: int | None) -> None:
    """Raises ValueError if prompts have more tokens T than the cache has slots, unless a ring
    buffer keeps the last tokens."""
    S = cache.slots
    if T > S and not _is_ring(cache, left):
        raise ValueError(
            f"x: T={T} tokens are more than the S={S} slots of the cache: make a longer one"
        )


def require_cache(cache: object) -> None:
    """Raises TypeError unless the cache holds keys and values."""
    if not isinstance(cache, KVCache | PagedKVCache):
        found = type(cache).__name__
        hint = ": it is a cache of jaxmha.latent.extend" if found == "LatentCache" else ""
        raise TypeError(
            f"cache must be a jaxmha.KVCache or a jaxmha.PagedKVCache, got {found}{hint}"
        )


def reject_latent_pages(cache: object, features: Callable[[], int]) -> None:
    """Raises ValueError if a cache of latents, whose pages have values of 0 features, is given to a
    layer whose values have some. `features` returns how many."""
    if isinstance(cache, PagedKVCache) and cache.value.shape[-1:] == (0,) and features():
        raise ValueError(
            f"cache.value: expected axes (P, K, page, h) with h={features()}, got shape "
            f"{cache.value.shape}: it is a cache of jaxmha.latent.paged_cache, for "
            "jaxmha.latent.extend; make one by PagedKVCache.empty"
        )


def checked_cache(params: MHAParams, x: Array, cache: CacheT, semantics: Semantics) -> CacheT:
    """Checks types of the arguments; returns the cache with lengths and table of `checked_parts`."""
    if type(params).__name__ == "LatentParams":  # by name: the module of the class imports this one
        raise TypeError(
            "params must be a jaxmha.MHAParams, got LatentParams: call the function of the same name "
            "in jaxmha.latent, such as jaxmha.latent.extend"
        )
    checks.require_type(MHAParams, params=params)
    require_cache(cache)
    checks.require_type(Semantics, semantics=semantics)
    reject_axes(semantics)
    require_arrays(x=x)
    checks.reject_rounding(params=params, x=x)
    paged = isinstance(cache, PagedKVCache)
    checked = checked_parts(cache._asdict(), paged=paged)
    reject_latent_pages(cache, lambda: check(params)["h"])
    return cache._replace(**checked)


def checked_parts(parts: dict[str, Array | None], *, paged: bool) -> dict[str, Array]:
    """Checks the dtypes of a cache. Returns its lengths and table as int32, clipped, if they are NumPy
    arrays: jit would truncate wider integers. Lengths and tables of JAX are not returned."""
    check_dtypes(parts, paged=paged)
    found = {name: x for name, x in parts.items() if name in COUNTED and isinstance(x, np.ndarray)}
    return {name: near(x) if name == "table" else clipped_counts(x) for name, x in found.items()}


def reject_mean(policy: FullyMasked) -> None:
    """Raises ValueError for the policy "mean": a cache lacks some of the keys to take the mean over."""
    if policy == "mean":
        raise ValueError(
            "semantics.fully_masked='mean' is the mean over all keys, which a cache does not have: "
            "use 'zero' or 'nan'"
        )


def checked_counts(q_lengths: Array | None, x: Array, name: str = "x") -> Array | None:
    """Raises TypeError unless `q_lengths` are integers, and ValueError for a NumPy array outside
    [0, T]. Returns them; a NumPy array becomes int32."""
    require_arrays(optional=True, q_lengths=q_lengths)
    if q_lengths is not None:
        require_integers("q_lengths", q_lengths)
    _reject_outside_rows("q_lengths", q_lengths, x, name)
    return clipped_counts(q_lengths) if isinstance(q_lengths, np.ndarray) else q_lengths


def checked_positions(positions: Array | None, rotate: object, x: Array) -> Array | None:
    """Raises TypeError unless `positions` are integers, and ValueError if nothing rotates or their
    axes do not fit. Returns them; a NumPy array becomes int32."""
    if positions is None:
        return None
    require_arrays(positions=positions)
    require_integers("positions", positions)
    if rotate is None:
        raise ValueError("positions: nothing is rotated; give rotate, such as jaxmha.rope, as well")
    if x.ndim == 3:
        axes = "T" if positions.ndim == 1 else "*n #B T"
        bind("positions", positions.shape, axes, {"B": x.shape[0], "T": x.shape[1]})
    return near(positions) if isinstance(positions, np.ndarray) else positions


def checked_prompts(mask: Mask, x: Array) -> Mask:
    """Raises ValueError for a NumPy array of prompt lengths outside [0, T], and for a condition that
    the steps after the prompts would not keep; returns the mask."""
    _reject_forgotten(mask)
    _reject_outside_rows("mask.key_value_lengths", mask.key_value_lengths, x)
    return mask


def _reject_forgotten(mask: Mask) -> None:
    """Raises ValueError for conditions that a cache does not keep: later steps would attend keys that
    the prompt did not."""
    offset, forgotten = mask.causal_offset, []
    # A JAX array may be negative: it is refused unread, since reading waits for the device.
    if isinstance(offset, jax.Array) or (offset is not None and np.less(offset, 0).any()):
        forgotten += ["causal_offset"]
    if mask.query_segments is not None:
        forgotten += ["segments"]
    if mask.key_value_lengths is None and mask.key_value_padding is None:
        names = ("query_lengths", "query_padding")
        forgotten += [name for name in names if getattr(mask, name) is not None]
    if forgotten:
        raise ValueError(
            f"mask: a cache keeps the lengths of prompts, and not {', '.join(forgotten)}, so that "
            "later steps would attend other keys: give Mask.lengths(key_value=lengths), with one "
            "prompt per row"
        )


def _reject_outside_rows(name: str, lengths: object, x: Array, tokens: str = "x") -> None:
    """Raises ValueError for a NumPy array of lengths outside [0, T]; JAX arrays are not read."""
    if isinstance(lengths, np.ndarray) and x.ndim >= 3 and isinstance(x.shape[1], int):
        reject_outside(name, lengths, x.shape[1], f"of the T tokens of a row of {tokens}")


def prompt_lengths(mask: Mask, sizes: dict[str, int]) -> jax.Array:
    """The number of tokens of each prompt, `(B,)`: the key/value lengths of the mask, else T."""
    lengths = jnp.full(sizes["B"], sizes["T"], np.int32)
    if mask.key_value_lengths is None:
        return lengths
    return jnp.minimum(lengths, clipped_counts(jnp.asarray(mask.key_value_lengths)))


def counts_of(q_lengths: jax.Array | None, sizes: dict[str, int]) -> jax.Array:
    """The number of new tokens of each sequence, `(B,)`; None: all T."""
    if q_lengths is None:
        return jnp.full(sizes["B"], sizes["T"], np.int32)
    bind("q_lengths", q_lengths.shape, "B", sizes)
    return jnp.minimum(clipped_counts(q_lengths), sizes["T"])


def reject_zigzag(T: int, name: str = "x") -> None:
    """Raises ValueError if T > 1 tokens are in zig-zag order (`sharding.use`), which no cache has."""
    mesh_axes = sharding.current()
    if T > 1 and mesh_axes is not None and mesh_axes.zigzag:
        raise ValueError(
            f"{name}: T={T} tokens in zig-zag order, and a cache holds them by true position: "
            "leave zigzag out of jaxmha.sharding.use here, and give them in their natural order"
        )


def sizes_of(params: MHAParams, x: jax.Array, cache: KVCache | PagedKVCache) -> dict[str, int]:
    """Checks every shape of a call and returns the sizes by letter; S counts slots."""
    sizes = check(params)
    bind("x", x.shape, "B T Dq", sizes)
    reject_zigzag(sizes["T"])
    axes = PAGED if isinstance(cache, PagedKVCache) else DENSE
    check_shapes(cache._asdict(), axes, sizes)
    sizes["S"] = cache.slots
    if not sizes["Dq"] == sizes["Dk"] == sizes["Dv"]:
        raise ValueError(
            f"a cache is for self-attention, and params read inputs of Dq={sizes['Dq']}, "
            f"Dk={sizes['Dk']}, Dv={sizes['Dv']} features"
        )
    return sizes
