"""Tile sizes of the scores, chosen from static shapes.

A tile is `cells` key/value heads times `rows` query positions (of every query head of the group)
times `keys` key positions.
"""

from dataclasses import dataclass, replace

# Bytes of scores per tile, by platform: about the size of second-level caches, by measurement;
# elsewhere enough to keep the device busy.
TARGET: dict[str, int] = {"cpu": 2**21}
TARGET_ELSEWHERE = 2**26
# The same for one head with all its keys and only a softmax between the matmuls: XLA fuses them
# into one kernel, and fewer kernels have fewer starts.
TARGET_OF_KERNEL: dict[str, int] = {"cpu": 2**23}
# Heads with at most SMALL_HEAD bytes of scores share a tile of up to TARGET_OF_SMALL_HEADS bytes:
# XLA fuses it into one kernel, which itself computes one head at a time. With up to FEW_KEYS keys
# and only a softmax between the matmuls, a small head may have FEW_KEYS_TIMES as many bytes.
SMALL_HEAD: dict[str, int] = {"cpu": 2**18}
FEW_KEYS, FEW_KEYS_TIMES = 256, 4
TARGET_OF_SMALL_HEADS: dict[str, int] = {"cpu": 2**24}
# Minimum query rows per tile: with fewer, matmuls reuse no operand even if the tile fits in cache.
# Where only a softmax comes between the matmuls, the minimum is larger (forward, gradient; up to
# MOST_OF_LEAST bytes): reuse is then worth more than the cache.
LEAST_ROWS = 64
LEAST_OF_KERNEL, LEAST_OF_GRADIENT, MOST_OF_LEAST = 1024, 512, 2**24
# Rows and keys of a tile where whole tiles may be skipped: small enough to skip much, large enough
# for efficient matmuls. A window of at most BLOCKS_OF_WINDOW narrow tiles uses them, because they
# skip more; a narrow tile has at least LEAST_OF_GROUP rows of every query head of a group, and a
# sequence at most MOST_BLOCKS tiles, because the schedule stores flags for every pair of query and
# KV tile.
SIDE: dict[str, int] = {"cpu": 512}
SIDE_OF_WINDOW: dict[str, int] = {"cpu": 64}
BLOCKS_OF_WINDOW, LEAST_OF_GROUP, MOST_BLOCKS = 4, 16, 1024
SIDE_ELSEWHERE = 2048
# Bytes of scores of a tile that holds several heads: fewer kernels. Twice as many in the gradient
# where keys are few.
TARGET_OF_HEADS: dict[str, int] = {"cpu": 2**22}
TARGET_OF_FEW_KEYS: dict[str, int] = {"cpu": 2**23}
# Few steps of one kernel each, of few bytes in total, are unrolled: XLA runs some in parallel.
FEW_STEPS = 8
BYTES_OF_FEW_STEPS: dict[str, int] = {"cpu": 2**24}
# Few query tiles are unrolled too where keys are tiled.
FEW_BLOCKS: dict[str, int] = {"cpu": 4}


@dataclass(frozen=True)
class Plan:
    """The tiling of one request.

    Attributes:
      B, K, G, T, S: sizes, as in the dimension key; G = N // K.
      batches, heads: batch rows and key/value heads per tile.
      rows: query positions per tile; T is padded to a multiple.
      keys: key positions per tile; S is padded to a multiple.
      unroll: unrolls the loop over steps or, where keys are tiled too, over query tiles.
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
    def blocks(self) -> int:
        """Number of query tiles."""
        return -(-self.T // self.rows)

    @property
    def chunks(self) -> int:
        """Number of KV tiles."""
        return -(-self.S // self.keys)

    @property
    def cells(self) -> int:
        """Key/value heads per tile, over its batch rows."""
        return self.batches * self.heads

    @property
    def groups(self) -> int:
        """Number of steps per batch row."""
        return self.K // self.heads

    @property
    def steps(self) -> int:
        """Number of groups of cells, computed one after another."""
        return self.B * self.K // self.cells


def plan(
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
) -> Plan:
    """Chooses a tiling in which a tile takes at most `target` bytes, or `least_rows` rows.

    Args:
      B, K, G, T, S: sizes, all at least 1.
      skips: whether conditions may mask whole tiles; then a tile has at most about `side` rows and
        keys, else all keys.
      plain: whether only a softmax comes between the matmuls; tiles with all keys are then larger.
      gradient: whether the tiles are those of the backward pass.
      window: number of keys that a row may attend, where a window limits it.
      itemsize: bytes of a score.
      platform: selects target and side where they are not given.
      target: bytes of scores per tile.
      least_rows: minimum rows per tile, even if they take more bytes.
      side: rows, over all query heads of a group, and keys of a tile.

    >>> plan(1, 8, 1, 4096, 4096, plain=True).rows, plan(1, 8, 1, 4096, 4096, skips=True).keys
    (1024, 512)
    """
    if side is None:
        side = SIDE.get(platform, SIDE_ELSEWHERE)
        narrow = SIDE_OF_WINDOW.get(platform, side)
        if window is not None and window <= BLOCKS_OF_WINDOW * narrow:
            side = min(max(narrow, LEAST_OF_GROUP * G, -(-max(T, S) // MOST_BLOCKS)), side)
    keys = _even(S, side) if skips else S
    kernel = plain and not gradient and keys == S
    few_keys = plain and keys == S <= FEW_KEYS
    times = FEW_KEYS_TIMES if few_keys and not gradient else 1
    small = itemsize * G * T * S <= times * SMALL_HEAD.get(platform, 0)
    rule = TARGET_OF_KERNEL if kernel else TARGET
    rule_of_heads = TARGET_OF_FEW_KEYS if few_keys and gradient else TARGET_OF_HEADS
    rule_of_heads = TARGET_OF_SMALL_HEADS if small else rule_of_heads
    of_rows, of_heads = (
        x.get(platform, TARGET_ELSEWHERE) if target is None else target
        for x in (rule, rule_of_heads)
    )
    row = itemsize * G * keys
    if least_rows is None:
        least_rows = LEAST_ROWS
        if plain:
            wide = LEAST_OF_GRADIENT if gradient else LEAST_OF_KERNEL
            least_rows = max(min(wide, G * MOST_OF_LEAST // row), least_rows)
    rows = max(of_rows // row, -(-least_rows // G), 1)
    if keys < S:
        rows = min(rows, max(side // G, 1))
    rows = _even(T, rows)
    cells = max(of_heads // (row * rows), 1) if rows == T or keys < S else 1
    heads = divisor(K, cells)
    # Batch rows of one tile would share a schedule.
    batches = divisor(B, cells // K) if heads == K and keys == S else 1
    made = Plan(B, K, G, T, S, batches, heads, rows, keys)
    if keys < S:
        unroll = not gradient and made.blocks <= FEW_BLOCKS.get(platform, 0)
    else:
        few = B * K * T * row <= BYTES_OF_FEW_STEPS.get(platform, 0)
        unroll = kernel and rows == T and made.steps <= FEW_STEPS and few
    return replace(made, unroll=unroll)


def _even(size: int, most: int) -> int:
    """Size of equal parts of at most `most`, as few as possible."""
    parts = -(-size // most)
    return -(-size // parts)


def divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`, at least 1."""
    return max(d for d in range(1, max(min(most, n), 1) + 1) if n % d == 0) if n else 1
