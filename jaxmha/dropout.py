"""Keep-mask of dropout over the attention weights, defined entry by entry.

The draw of an entry depends on the key and its position (b, n, t, s) alone, so that every
implementation, tile size and sharding drops the same entries.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, PRNGKeyArray, UInt32

from jaxmha.arrays import Array
from jaxmha.implementations.base import Part


def keep(
    key: PRNGKeyArray,
    rate: float,
    shape: tuple[int, int, int, int],
    broadcast: tuple[str, ...] = (),
    part: Part | None = None,
) -> Bool[jax.Array, "B N T S"]:
    """Keep-mask: True, with probability `1 - rate`, where a weight is kept.

    Args:
      key: a PRNG key, typed or raw.
      rate: probability of dropping, in [0, 1).
      shape: (B, N, T, S).
      broadcast: axes of BNTS that share a draw; their size in the result is 1.
      part: where these entries are in the whole B N T S, if one device or tile computes them alone;
        None: they are the whole.

    >>> import jax
    >>> keep(jax.random.key(0), 0.5, (1, 2, 3, 5), ("N",)).shape
    (1, 1, 3, 5)
    """
    B, N, T, S = (
        1 if axis in broadcast else size for axis, size in zip("BNTS", shape, strict=True)
    )

    def positions(size: int) -> jax.Array:
        return jnp.arange(size, dtype=jnp.uint32)

    rows = positions(B * N * T)
    if part is not None:
        first_b, first_n = (0 if a in broadcast else x for a, x in zip("BN", part[:2], strict=True))
        heads = 1 if "N" in broadcast else part.N
        b, n = (
            positions(size) + jnp.asarray(first).astype(jnp.uint32)
            for size, first in ((B, first_b), (N, first_n))
        )
        b, n = b.reshape(B, 1, 1), n.reshape(1, N, 1)
        rows = ((b * heads + n) * T + positions(T).reshape(1, 1, T)).reshape(-1)
    return draw(threefry(key), rate, rows, positions(S)).reshape(B, N, T, S)


def draw(
    key: PRNGKeyArray,
    rate: float,
    rows: UInt32[jax.Array, "rows"],
    columns: UInt32[jax.Array, "columns"],
) -> Bool[jax.Array, "rows columns"]:
    """Keep-mask of the entries `(rows, columns)`: entry (b, n, t, s) has row `(b * N + n) * T + t`
    and column s, with size 1 for axes that share a draw."""
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    entries = jax.vmap(lambda k: jax.vmap(lambda s: jax.random.fold_in(k, s))(columns))(row_keys)
    bits = jax.random.key_data(entries)[..., 0]
    kept: jax.Array = bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    return kept


def threefry(key: Array) -> PRNGKeyArray:
    """Converts a key to threefry: under vmap, other generators may ignore some of the keys."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim != (0 if typed else 1):
        raise TypeError(
            "expected one PRNG key for dropout, such as jax.random.key(0), got an array of "
            f"{key.dtype} with shape {key.shape}"
        )
    integers = jnp.asarray(jax.random.key_data(key) if typed else key)
    threefry_key: jax.Array = jax.random.wrap_key_data(integers[:2], impl="threefry2x32")
    for i in range(2, integers.shape[0]):
        threefry_key = jax.random.fold_in(threefry_key, integers[i])
    return threefry_key
