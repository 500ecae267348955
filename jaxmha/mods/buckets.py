"""Buckets of relative positions: the row of a bias table for query i and key j."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.integers import require_sizes
from jaxmha.static_checks import flag

# `bucket(i, j)` returns the row of the bias table for query i and key j.
Bucket: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class _T5:
    bidirectional: bool
    num_buckets: int
    max_distance: int

    @property
    def rows(self) -> int:
        """The number of buckets."""
        return self.num_buckets

    def __call__(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """The bucket of query i and key j, from a table of all distances up to `max_distance`."""
        most = self.max_distance
        distances = np.arange(-most, most + 1)
        return jnp.asarray(self.of(distances))[jnp.clip(j - i, -most, most) + most]

    def of(
        self, distances: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    ) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The buckets of distances j - i, rounded as torch rounds the float32 logarithm."""
        buckets, first = self.num_buckets, np.zeros_like(distances)
        if self.bidirectional:
            buckets //= 2
            first, distances = (distances > 0) * buckets, np.abs(distances)
        else:
            distances = -np.minimum(distances, 0)
        exact = buckets // 2
        ratio = np.maximum(distances, 1).astype(np.float32) / np.float32(exact)
        steps = np.log(ratio) / np.float32(math.log(self.max_distance / exact))
        far = exact + (steps * np.float32(buckets - exact)).astype(np.int64)
        found = first + np.where(distances < exact, distances, np.minimum(far, buckets - 1))
        return found.astype(np.int32)


def t5(*, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128) -> Bucket:
    """T5's buckets: one per short distance; longer distances share buckets of logarithmic size.

    Args:
      bidirectional: half of the buckets are for keys after the query (encoders); False: all such
        keys are in bucket 0 (decoders).
      num_buckets: rows of the table.
      max_distance: distances from here on share the last bucket.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (2020), section 2.1; `T5Attention._relative_position_bucket` of transformers.

    >>> import jax.numpy as jnp
    >>> bucket = t5()
    >>> [int(bucket(jnp.int32(100), jnp.int32(j))) for j in (0, 97, 100, 101)]
    [15, 3, 0, 17]
    """
    bidirectional = flag("bidirectional", bidirectional)
    require_sizes(num_buckets=num_buckets, max_distance=max_distance)
    if num_buckets < 4 or max_distance <= num_buckets // (4 if bidirectional else 2):
        raise ValueError(
            f"t5: num_buckets must be at least 4 and max_distance above the exact buckets, got "
            f"num_buckets={num_buckets}, max_distance={max_distance}"
        )
    return _T5(bidirectional, num_buckets, max_distance)


@dataclass(frozen=True)
class _Swin:
    height: int
    width: int

    @property
    def rows(self) -> int:
        """The number of buckets."""
        return (2 * self.height - 1) * (2 * self.width - 1)

    @property
    def positions(self) -> int:
        """The number of patches of the window, and thus of positions that have buckets."""
        return self.height * self.width

    def __call__(self, i: jax.Array, j: jax.Array) -> jax.Array:
        down = i // self.width - j // self.width + self.height - 1
        across = i % self.width - j % self.width + self.width - 1
        return down * (2 * self.width - 1) + across


def swin(height: int, width: int | None = None) -> Bucket:
    """Swin's buckets: one per offset of rows and columns in a window of `height` x `width` patches.

    The table has `(2 * height - 1) * (2 * width - 1)` rows; position i is row `i // width`, column
    `i % width` of the window. `width` defaults to `height`. A call has at most `height * width`
    queries and keys.

    Source: Liu et al., "Swin Transformer" (2021), section 3.2; `relative_position_index` of
    transformers' `SwinSelfAttention`.

    >>> import jax.numpy as jnp
    >>> int(swin(7)(jnp.int32(0), jnp.int32(48))), int(swin(7)(jnp.int32(48), jnp.int32(0)))
    (0, 168)
    """
    require_sizes(height=height)
    require_sizes(optional=True, width=width)
    return _Swin(height, height if width is None else width)
