"""Tile and band sizes by platform; `python -m experiments.tiling` measures those of CPUs again."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Tuning:
    """Sizes of tiles and bands on one platform; bytes are bytes of scores.

    A kernel is a tile of the forward pass with all keys and only a softmax between the matmuls,
    which XLA fuses into one program.

    Attributes:
      tile_bytes: maximum size of a tile of one head, and of the heads of a row band that are
        computed together: about the second-level cache of a CPU; elsewhere enough to keep the
        device busy.
      kernel_bytes: the same for a kernel: larger kernels mean fewer kernel launches.
      heads_bytes: maximum size of a tile that holds several heads.
      few_keys: maximum number of keys for which the two `few_keys_...` entries apply, to tiles with
        all keys and only a softmax between the matmuls.
      few_keys_gradient_bytes: `heads_bytes` in the backward pass, unless heads are small.
      few_keys_factor: factor of `small_head_bytes` in the forward pass.
      small_head_bytes: size of all scores of a key/value head up to which the head is small: XLA
        fuses a tile of small heads into one kernel that computes one head at a time.
      small_heads_bytes: `heads_bytes` of small heads.
      least_rows: minimum rows per tile, over all query heads of a group: with fewer, matmuls reuse
        too little of their operands, even if the tile fits in cache.
      least_rows_kernel, least_rows_gradient: the same with only a softmax between the matmuls, in
        the forward and the backward pass, where reuse is worth more than the cache.
      least_rows_bytes: size to which these two minima may enlarge a tile, and up to which the
        scores of a head in a row band are one tile.
      side: maximum rows and keys of a tile where whole tiles may be skipped: small enough to skip
        much, large enough for efficient matmuls.
      window_side: the same under a narrow window, of at most `window_tiles * window_side` keys,
        where `group_rows` and `most_tiles` do not need more.
      window_tiles: the largest narrow window, in tiles of `window_side` keys.
      group_rows: minimum of the size under a narrow window, per query head of a group.
      most_tiles: maximum number of tiles along T or S under a narrow window, unless `side` needs
        more: the schedule has an entry for every pair of query and KV tile.
      unroll_steps, unroll_bytes: maximum number and total size of `Tiling.steps` for which their
        loop is unrolled if tiles are kernels with all rows, so that XLA runs some in parallel.
      unroll_query_tiles: maximum number of query tiles for which their loop is unrolled where keys
        are tiled too.
      row_bands: pairs (approximate rows per band, maximum number of bands); the pair that gives the
        most bands applies.
      row_band_range: smallest and largest T with row bands. With fewer rows one kernel computes all
        heads together; with more, tiles skip as much and compile faster.
      key_bands: maximum number of key bands: more compute fewer masked scores, and compile longer.
      key_band_keys: approximate minimum number of keys per band.
      mask_by_matmul: whether 1 * -inf is -inf in a matmul, as masking by a feature needs; it may be
        NaN on devices that split operands into parts.
      shard_side, shard_tile_bytes: `side` and `tile_bytes` under context parallelism, where the
        memory of a tile does not fall as devices are added; None: as on one device.
    """

    tile_bytes: int
    kernel_bytes: int
    heads_bytes: int
    few_keys: int
    few_keys_gradient_bytes: int
    few_keys_factor: int
    small_head_bytes: int
    small_heads_bytes: int
    least_rows: int
    least_rows_kernel: int
    least_rows_gradient: int
    least_rows_bytes: int
    side: int
    window_side: int
    window_tiles: int
    group_rows: int
    most_tiles: int
    unroll_steps: int
    unroll_bytes: int
    unroll_query_tiles: int
    row_bands: tuple[tuple[int, int], ...]
    row_band_range: tuple[int, int]
    key_bands: int
    key_band_keys: int
    mask_by_matmul: bool
    shard_side: int | None
    shard_tile_bytes: int | None


CPU = Tuning(
    tile_bytes=2 * MIB,
    kernel_bytes=8 * MIB,
    heads_bytes=4 * MIB,
    few_keys=256,
    few_keys_gradient_bytes=8 * MIB,
    few_keys_factor=4,
    small_head_bytes=MIB // 4,
    small_heads_bytes=16 * MIB,
    least_rows=64,
    least_rows_kernel=1024,
    least_rows_gradient=512,
    least_rows_bytes=16 * MIB,
    side=512,
    window_side=64,
    window_tiles=4,
    group_rows=16,
    most_tiles=1024,
    unroll_steps=8,
    unroll_bytes=16 * MIB,
    unroll_query_tiles=4,
    row_bands=((128, 4), (256, 8)),
    row_band_range=(257, 4096),
    key_bands=4,
    key_band_keys=256,
    mask_by_matmul=True,
    shard_side=256,
    shard_tile_bytes=2 * MIB,
)

# For all platforms but CPUs: estimates, not measured.
ELSEWHERE = Tuning(
    tile_bytes=64 * MIB,
    kernel_bytes=64 * MIB,
    heads_bytes=64 * MIB,
    few_keys=256,
    few_keys_gradient_bytes=64 * MIB,
    few_keys_factor=4,
    small_head_bytes=0,
    small_heads_bytes=64 * MIB,
    least_rows=64,
    least_rows_kernel=1024,
    least_rows_gradient=512,
    least_rows_bytes=16 * MIB,
    side=2048,
    window_side=2048,
    window_tiles=4,
    group_rows=16,
    most_tiles=1024,
    unroll_steps=8,
    unroll_bytes=0,
    unroll_query_tiles=0,
    row_bands=((128, 4), (256, 8)),
    row_band_range=(0, 0),
    key_bands=4,
    key_band_keys=2048,
    mask_by_matmul=False,
    shard_side=None,
    shard_tile_bytes=None,
)

TUNING: dict[str, Tuning] = {"cpu": CPU}


def tuning_for(platform: str) -> Tuning:
    """The tuning table of a platform, by its name in JAX (cpu, cuda, rocm, tpu)."""
    return TUNING.get(platform, ELSEWHERE)
