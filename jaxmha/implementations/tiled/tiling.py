"""Tilings of the scores, chosen from static shapes.

A tile has the scores of some batch rows and key/value heads, of every query head in the groups of
these heads, for `rows` query positions and `keys` key positions.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

import jax

from jaxmha.implementations.tiled.tuning import Tuning, tuning_for

# An array, or its shape and dtype alone: no tiling depends on data.
Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Tiling:
    """Sizes of the arrays and of their tiles.

    Attributes:
      B, K, G, T, S: sizes, as in the dimension key; G = N // K.
      batches, heads: batch rows and key/value heads per tile, which divide B and K.
      rows: query positions per tile, for each of G query heads; T is padded to a multiple.
      keys: key positions per tile; S is padded to a multiple.
      unroll: unrolls the loop of the forward pass over query tiles and, if there is one KV tile,
        the loop over `steps`.
    """

    B: int
    K: int
    G: int
    T: int
    S: int
    batches: int
    heads: int
    rows: int
    keys: int
    unroll: bool = False

    @property
    def query_tiles(self) -> int:
        """Number of tiles along T."""
        return -(-self.T // self.rows)

    @property
    def kv_tiles(self) -> int:
        """Number of tiles along S."""
        return -(-self.S // self.keys)

    @property
    def tile_heads(self) -> int:
        """Key/value heads per tile, summed over its batch rows."""
        return self.batches * self.heads

    @property
    def groups(self) -> int:
        """Number of tiles along K: `steps` that have the same batch rows."""
        return self.K // self.heads

    @property
    def steps(self) -> int:
        """Number of tiles along B and K: steps of the outer loop, each over `tile_heads` heads."""
        return self.B * self.K // self.tile_heads


def choose_tiling(
    B: int,
    K: int,
    G: int,
    T: int,
    S: int,
    *,
    skips: bool = False,
    plain: bool = False,
    gradient: bool = False,
    window: int | None = None,
    itemsize: int = 4,
    platform: str = "cpu",
    target: int | None = None,
    least_rows: int | None = None,
    side: int | None = None,
) -> Tiling:
    """Chooses a tiling whose tiles have at most about `target` bytes of scores.

    `least_rows` and `side` count the rows of all query heads of a group.

    Args:
      B, K, G, T, S: sizes, all at least 1; G = N // K.
      skips: whether conditions may mask whole tiles; if so, and if S exceeds `side`, a tile has at
        most about `side` rows and at most `side` keys, else it has all keys.
      plain: whether only a softmax comes between the matmuls; tiles may then be larger.
      gradient: whether the tiles are those of the backward pass.
      window: number of keys that a row may attend; None: no window, or a bound on one side alone.
      itemsize: bytes of a score.
      platform: selects the tuning table, which also has the sizes that are None here.
      target: maximum bytes of scores per tile, unless `least_rows` need more.
      least_rows: minimum rows per tile, even if they exceed `target`; fewer if `side` or T allows
        no more, or if T is split into even parts.
      side: the bound of rows and keys if `skips`.

    >>> tiling = choose_tiling(1, 8, 1, 4096, 4096, plain=True)
    >>> tiling.rows, choose_tiling(1, 8, 1, 4096, 4096, skips=True).keys
    (1024, 512)
    """
    tuning = tuning_for(platform)
    if side is None:
        side = _side(tuning, window, G, max(T, S))
    keys = even_parts(S, side) if skips else S
    kernel = plain and not gradient and keys == S
    few_keys = plain and keys == S <= tuning.few_keys
    factor = tuning.few_keys_factor if few_keys and not gradient else 1
    if target is not None:
        tile_bytes = heads_bytes = target
    else:
        tile_bytes = tuning.kernel_bytes if kernel else tuning.tile_bytes
        heads_bytes = tuning.heads_bytes
        if itemsize * G * T * S <= factor * tuning.small_head_bytes:
            heads_bytes = tuning.small_heads_bytes
        elif few_keys and gradient:
            heads_bytes = tuning.few_keys_gradient_bytes
    row_bytes = itemsize * G * keys
    if least_rows is None:
        least_rows = tuning.least_rows
        if plain:
            most = tuning.least_rows_gradient if gradient else tuning.least_rows_kernel
            least_rows = max(min(most, G * tuning.least_rows_bytes // row_bytes), least_rows)
    rows = max(tile_bytes // row_bytes, -(-least_rows // G), 1)
    if keys < S:
        rows = min(rows, max(side // G, 1))
    rows = even_parts(T, rows)
    tile_heads = max(heads_bytes // (row_bytes * rows), 1) if rows == T or keys < S else 1
    heads = divisor(K, tile_heads)
    # With several KV tiles, a tile has one batch row: all batch rows of a tile share a schedule,
    # and would visit each KV tile that any of them needs.
    batches = divisor(B, tile_heads // K) if heads == K and keys == S else 1
    tiling = Tiling(B, K, G, T, S, batches, heads, rows, keys)
    if keys < S:
        unroll = not gradient and tiling.query_tiles <= tuning.unroll_query_tiles
    else:
        small = B * K * T * row_bytes <= tuning.unroll_bytes
        unroll = kernel and rows == T and tiling.steps <= tuning.unroll_steps and small
    return replace(tiling, unroll=unroll)


def tiling_for(
    query: Shaped,
    key: Shaped,
    *,
    platform: str,
    skips: bool = False,
    plain: bool = False,
    gradient: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    sizes: tuple[tuple[str, int], ...] = (),
) -> Tiling:
    """The tiling of queries `B N T H` and keys `B K S H`, by their shapes and the queries' dtype.

    Args:
      query, key: the queries have the dtype of the scores.
      platform, skips, plain, gradient: as in `choose_tiling`.
      window: bounds to the left and to the right; None: no such bound.
      sizes: values of `target`, `least_rows` and `side` in `choose_tiling`; later ones win.
    """
    (B, N, T, _), (K, S) = query.shape, key.shape[1:3]
    before, after = window
    keys_of_row = None if before is None or after is None else before + after + 1
    return choose_tiling(
        B, K, N // K, T, S, skips=skips, plain=plain, gradient=gradient, window=keys_of_row,
        itemsize=query.dtype.itemsize, platform=platform, **dict(sizes),
    )  # fmt: skip


def _side(tuning: Tuning, window: int | None, G: int, positions: int) -> int:
    """The default of `side` in `choose_tiling`, the maximum rows and keys of a tile: smaller under
    a narrow `window` (keys per row), so that more masked scores are skipped.

    `positions`: the larger of T and S.
    """
    if window is None or window > tuning.window_tiles * tuning.window_side:
        return tuning.side
    least = -(-positions // tuning.most_tiles)
    return min(max(tuning.window_side, tuning.group_rows * G, least), tuning.side)


def even_parts(size: int, most: int) -> int:
    """The size of the parts if `size` is split into the fewest parts of at most `most`, all equal
    but for a smaller last one."""
    parts = -(-size // most)
    return -(-size // parts)


def divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`; 1 if n is 0 or `most` is below 1."""
    return max(d for d in range(1, max(min(most, n), 1) + 1) if n % d == 0) if n else 1
