"""Keep-mask of dropout over the attention weights, defined entry by entry.

The draw of an entry depends on the key and its position (b, n, t, s) alone, so that every
implementation, tile size and sharding drops the same entries.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from jaxmha.arrays import Array


def keep(
    key: Array,
    rate: float,
    shape: tuple[int, int, int, int],
    broadcast: tuple[str, ...] = (),
    part: Any = None,
) -> Bool[jax.Array, "B N T S"]:
    """Keep-mask: True, with probability `1 - rate`, where a weight is kept.

    Args:
      key: a PRNG key, typed or raw.
      rate: probability of dropping, in [0, 1).
      shape: (B, N, T, S).
      broadcast: axes of BNTS that share a draw; their size in the result is 1.
      part: a `base.Part`, the position within a larger request; None: this is the whole.

    >>> import jax
    >>> keep(jax.random.key(0), 0.5, (1, 2, 3, 5), ("N",)).shape
    (1, 1, 3, 5)
    """
    B, N, T, S = (
        1 if axis in broadcast else size for axis, size in zip("BNTS", shape, strict=True)
    )

    def places(size: int) -> jax.Array:
        return jnp.arange(size, dtype=jnp.uint32)

    rows = places(B * N * T)
    if part is not None:
        first_b, first_n = (0 if a in broadcast else x for a, x in zip("BN", part[:2], strict=True))
        heads = 1 if "N" in broadcast else part.N
        b, n = (
            places(size) + jnp.asarray(first).astype(jnp.uint32)
            for size, first in ((B, first_b), (N, first_n))
        )
        b, n = b.reshape(B, 1, 1), n.reshape(1, N, 1)
        rows = ((b * heads + n) * T + places(T).reshape(1, 1, T)).reshape(-1)
    return draw(threefry(key), rate, rows, places(S)).reshape(B, N, T, S)


def draw(key: jax.Array, rate: float, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Keep-mask of the entries `(rows, columns)`: entry (b, n, t, s) has row `(b * N + n) * T + t`
    and column s, with size 1 for axes that share a draw."""
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    entries = jax.vmap(lambda k: jax.vmap(lambda s: jax.random.fold_in(k, s))(columns))(row_keys)
    bits = jax.random.key_data(entries)[..., 0]
    kept: jax.Array = bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    return kept


def threefry(key: Array) -> jax.Array:
    """Converts a key to threefry: vectorised, other generators may not distinguish keys."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim != (0 if typed else 1):
        raise TypeError(
            "expected one PRNG key for dropout, such as jax.random.key(0), got an array of "
            f"{key.dtype} with shape {key.shape}"
        )
    words = jnp.asarray(jax.random.key_data(key) if typed else key)
    plain: jax.Array = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    for i in range(2, words.shape[0]):
        plain = jax.random.fold_in(plain, words[i])
    return plain
