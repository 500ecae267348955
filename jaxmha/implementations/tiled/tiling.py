"""How scores are cut into blocks: static sizes from shapes, and nothing computed.

A block is `cells` key/value heads times `rows` query positions (of every query head of the
group) times `keys` key positions.
"""

from dataclasses import dataclass, replace

# Bytes of scores that are worked on at once, by platform: about what second-level caches hold, by
# measurement; elsewhere enough to keep the device busy.
TARGET: dict[str, int] = {"cpu": 2**21}
TARGET_ELSEWHERE = 2**26
# Of one head with all its keys, and nothing but a softmax between the products: XLA makes one kernel
# of them, and fewer kernels start less often.
TARGET_OF_KERNEL: dict[str, int] = {"cpu": 2**23}
# Heads with scores of at most so many bytes are worked on together, up to so many: XLA makes one
# kernel of them, which keeps to one head at a time itself. Of few keys and with nothing but a
# softmax between the products, a head may have so many times as many bytes.
SMALL_HEAD: dict[str, int] = {"cpu": 2**18}
FEW_KEYS, FEW_KEYS_TIMES = 256, 4
TARGET_OF_SMALL_HEADS: dict[str, int] = {"cpu": 2**24}
# Fewer rows than this leave matrix products without reuse, whatever the cache. Where nothing but a
# softmax comes between them, so many rows, up to so many bytes, are worth more than a cache.
LEAST_ROWS = 64
LEAST_OF_KERNEL, LEAST_OF_GRADIENT, MOST_OF_LEAST = 1024, 512, 2**24
# Rows and keys of a block where some blocks need not be computed: small enough to leave out much,
# large enough to be products of matrices. A window of at most so many small blocks leaves out more
# with them; they have at least so many rows of every query head of a group, and of a sequence there
# are at most so many, since what is left out is known of every two blocks.
SIDE: dict[str, int] = {"cpu": 512}
SIDE_OF_WINDOW: dict[str, int] = {"cpu": 64}
BLOCKS_OF_WINDOW, LEAST_OF_GROUP, MOST_BLOCKS = 4, 16, 1024
SIDE_ELSEWHERE = 2048
# Bytes of scores of whole heads, or of blocks of many, at once: fewer kernels. In the gradient twice
# as many where keys are few.
TARGET_OF_HEADS: dict[str, int] = {"cpu": 2**22}
TARGET_OF_FEW_KEYS: dict[str, int] = {"cpu": 2**23}
# Few steps of one kernel each, of few bytes in all, are no loop: XLA works on some side by side.
FEW_STEPS = 8
BYTES_OF_FEW_STEPS: dict[str, int] = {"cpu": 2**24}
# Nor are few blocks of rows with keys left out.
FEW_BLOCKS: dict[str, int] = {"cpu": 4}


@dataclass(frozen=True)
class Plan:
    """The cut of one request.

    Attributes:
      B, K, G, T, S: sizes, as in the dimension key; G = N // K.
      batches, heads: batch rows and key/value heads of one block.
      rows: query positions of one block; T is filled up to a multiple.
      keys: key positions of one block; S is filled up to a multiple.
      unroll: whether there is no loop over steps or, where keys are cut too, over blocks of rows.
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
        """Blocks of rows."""
        return -(-self.T // self.rows)

    @property
    def chunks(self) -> int:
        """Blocks of keys."""
        return -(-self.S // self.keys)

    @property
    def cells(self) -> int:
        """Key/value heads of one block, over its batch rows."""
        return self.batches * self.heads

    @property
    def groups(self) -> int:
        """Steps that one batch row takes."""
        return self.K // self.heads

    @property
    def steps(self) -> int:
        """Groups of cells, worked on one after another."""
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
    """Cuts scores so that a block takes at most `target` bytes, or `least_rows` rows.

    Args:
      B, K, G, T, S: sizes, all at least 1.
      skips: whether conditions may leave whole blocks out; then a block has at most about `side`
        rows and keys, else all keys.
      plain: whether nothing comes between the products but a softmax; with all keys in it, such a
        block is cut less.
      gradient: whether the blocks are those of the gradient.
      window: how many keys a row may look at, where a window says so.
      itemsize: bytes of a score.
      platform: chooses target and side where none is given.
      target: bytes of a block.
      least_rows: of a block, also where that takes more bytes.
      side: rows, over all query heads of a group, and keys of a block.

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
    # Batch rows of one block would share what is left out.
    batches = divisor(B, cells // K) if heads == K and keys == S else 1
    made = Plan(B, K, G, T, S, batches, heads, rows, keys)
    if keys < S:
        unroll = not gradient and made.blocks <= FEW_BLOCKS.get(platform, 0)
    else:
        few = B * K * T * row <= BYTES_OF_FEW_STEPS.get(platform, 0)
        unroll = kernel and rows == T and made.steps <= FEW_STEPS and few
    return replace(made, unroll=unroll)


def _even(size: int, most: int) -> int:
    """The size of parts that are as few as `most` allows, and alike."""
    parts = -(-size // most)
    return -(-size // parts)


def divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`, at least 1."""
    return max(d for d in range(1, max(min(most, n), 1) + 1) if n % d == 0) if n else 1
