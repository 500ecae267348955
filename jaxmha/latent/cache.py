"""Caches of latents and rotary keys: `LatentCache`, and pages of them."""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from jaxmha import checks
from jaxmha.arrays import Array, DTypeLike
from jaxmha.cache_arguments import (
    check_dtypes,
    check_lengths,
    check_shapes,
    checked_rows,
    checked_tokens,
    clipped_counts,
    taken,
)
from jaxmha.compiled import compiled
from jaxmha.explicit_sharding import full_like, in_auto_axes, specs_of_leaves
from jaxmha.integers import FAR, require_sizes
from jaxmha.kv_cache import KVCache, with_tokens
from jaxmha.latent.params import LatentParams, leaves, sizes
from jaxmha.paged_cache import PagedKVCache, empty_pages
from jaxmha.quantized import unscaled_dtype
from jaxmha.record_repr import record_repr

# Array of a cache -> its axes.
LATENTS = {"latents": "B S C", "lengths": "B"}


class LatentCache(NamedTuple):
    """Latents and rotary keys of the tokens so far: `C = L + R` numbers per token, whatever the
    number of heads, in a ring buffer in which slot `p % S` holds position p.

    A plain pytree: donate it to the step that returns its successor. To roll back, reduce the
    lengths, `cache._replace(lengths=earlier)`, as with a `KVCache`.

    Attributes:
      latents: `(B, S, C)`: L features of the normalised latent, then R of the rotated key.
      lengths: `(B,)` int32, number of tokens so far per sequence; a negative length counts as 0.
    """

    latents: Array
    lengths: Array

    def __repr__(self) -> str:
        return record_repr(self)

    @classmethod
    def empty(
        cls, params: LatentParams, batch_size: int, length: int, dtype: DTypeLike | None = None
    ) -> "LatentCache":
        """A cache with room for `length` tokens of each sequence.

        Args:
          params: of the layer, for L and R.
          batch_size: B.
          length: S, at most 2**30.
          dtype: default that of the parameters; latents are rounded to it once, when written.

        Raises:
          ValueError: a size is not an integer of at least 0, or length is more than 2**30.
          TypeError: dtype is not floating, or is float64 without x64.

        >>> from jaxmha.latent import init_latent_params
        >>> params = init_latent_params(
        ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
        ... )
        >>> LatentCache.empty(params, 2, 7).latents.shape
        (2, 7, 10)
        """
        C, dtype = _stored(params, dtype)
        require_sizes(least=0, batch_size=batch_size)
        require_sizes(least=0, most=FAR, length=length)
        shape = (batch_size, length, C)
        return cls(jnp.zeros(shape, unscaled_dtype(dtype)), jnp.zeros(batch_size, np.int32))

    @property
    def slots(self) -> int:
        """S, the number of slots of a sequence."""
        return self.latents.shape[1]

    def emptied(self) -> "LatentCache":
        """The cache with lengths 0."""
        return self._replace(lengths=full_like(self.lengths, 0))

    def take(self, rows: Integer[Array, "C"]) -> "LatentCache":
        """The cache with copies of these rows, in this order, as `KVCache.take`."""
        check_dtypes(self._asdict(), paged=False)
        check_shapes(self._asdict(), LATENTS, {})
        at = checked_rows(rows, self.latents.shape[0])
        return LatentCache(taken(self.latents, at), taken(clipped_counts(self.lengths), at))

    def validate(self, left: int | None = None) -> None:
        """Raises ValueError if a row has a negative length, or more tokens than it can hold, as
        `KVCache.validate`."""
        check_lengths(self._asdict(), LATENTS, left)

    def append(
        self, keys: Float[Array, "B T C"], counts: Integer[Array, "B"], left: int | None = None
    ) -> tuple["LatentCache", Bool[jax.Array, "B"]]:
        """Writes the first `counts` of T tokens to each row; token p is written to slot `p % S`.

        Returns the cache, and True for rows that have too many tokens. Errors are those of
        `KVCache.append`.
        """
        sizes: dict[str, int] = {}
        check_dtypes(self._asdict(), paged=False)
        check_shapes(self._asdict(), LATENTS, sizes)
        more, tokens = checked_tokens(sizes, counts, left, keys=(keys, "B T C"))
        starts = jnp.asarray(clipped_counts(self.lengths))
        rings = left is not None and left < self.slots
        most = FAR if rings else self.slots

        def written(*arrays: jax.Array) -> tuple[LatentCache, jax.Array]:
            return _appended(most, *arrays)

        specs = specs_of_leaves((self, self.lengths))
        return in_auto_axes(written, specs, self.latents, tokens, starts, more)

    def as_heads(self) -> KVCache:
        """A `KVCache` with one head, whose keys and values both are the latents with rotary keys;
        only the first L features of the values count."""
        latents = jnp.asarray(self.latents)[:, None]
        return KVCache(latents, latents, self.lengths)


@compiled(0)
def _appended(
    most: int, latents: jax.Array, tokens: jax.Array, starts: jax.Array, more: jax.Array
) -> tuple[LatentCache, jax.Array]:
    """`LatentCache.append` on checked arrays; `most`: the tokens that a row can have."""
    (found,) = with_tokens([latents[:, None]], [tokens[:, :, None]], starts, more)
    return LatentCache(found[:, 0], starts + more), starts + more > most


LatentT = TypeVar("LatentT", LatentCache, PagedKVCache)


def paged_cache(
    params: LatentParams,
    batch_size: int,
    length: int,
    *,
    pages: int,
    page_size: int = 64,
    dtype: DTypeLike | None = None,
) -> PagedKVCache:
    """A `PagedKVCache` for latents: one head, keys of C = L + R features, values of 0 features.

    `prefill`, `extend` and `decode_step` take it in the place of a `LatentCache`; a `PagePool`, and
    the methods of the cache, work as with keys and values.

    Args:
      params: of the layer, for L and R.
      batch_size, length, pages, page_size, dtype: as in `PagedKVCache.empty`. With int8 and float8,
        the latent and the rotary key of a token have one scale.

    Raises:
      ValueError, TypeError: as `PagedKVCache.empty`.

    >>> from jaxmha.latent import init_latent_params
    >>> params = init_latent_params(
    ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
    ... )
    >>> cache = paged_cache(params, 5, 100, pages=7, page_size=16)
    >>> cache.key.shape, cache.value.shape
    ((7, 1, 16, 10), (7, 1, 16, 0))
    """
    C, dtype = _stored(params, dtype)
    return empty_pages((1, C, 0), batch_size, length, pages, page_size, dtype)


def append(
    cache: LatentT,
    keys: Float[jax.Array, "B T C"],
    counts: Int[jax.Array, "B"],
    left: int | None,
) -> tuple[LatentT, Bool[jax.Array, "B"]]:
    """Writes the first `counts` of T tokens; returns the cache, and True for rows without room."""
    if isinstance(cache, PagedKVCache):
        return cache.append(keys[:, :, None], keys[:, :, None, :0], counts, left)
    return cache.append(keys, counts, left)


def as_heads(cache: LatentCache | PagedKVCache) -> KVCache | PagedKVCache:
    """A cache whose values are its keys; only the first L features of the values count."""
    if isinstance(cache, PagedKVCache):
        return cache._replace(value=cache.key, value_scale=cache.key_scale)
    return cache.as_heads()


def _stored(params: LatentParams, dtype: DTypeLike | None) -> tuple[int, DTypeLike]:
    """C, and the dtype of a cache: by default that of the parameters."""
    found = sizes(params)
    if dtype is None:
        dtype = checks.promoted(**{f"params.{name}": x for name, x in leaves(params).items()})
    return found["L"] + found["R"], dtype
