"""How scores are cut into blocks: static sizes from shapes, and nothing computed.

A block is `cells` key/value heads times `rows` query positions (of every query head of the
group) times the keys that a band of rows can see.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

# Bytes of scores that are worked on at once, by platform: about what second-level caches hold, by
# measurement; elsewhere enough to keep the device busy.
TARGET: dict[str, int] = {"cpu": 2**21}
TARGET_ELSEWHERE = 2**26
# Fewer rows than this leave matrix products without reuse, whatever the cache.
LEAST_ROWS = 64
# Every band is compiled on its own.
MOST_BANDS = 8


class Band(NamedTuple):
    """Blocks `first` to `stop` see keys `low` to `high` alone."""

    first: int
    stop: int
    low: int
    high: int


@dataclass(frozen=True)
class Plan:
    """The cut of one request.

    Attributes:
      B, K, G, T, S: sizes, as in the dimension key; G = N // K.
      batches, heads: batch rows and key/value heads of one block.
      rows: query positions of one block; T is filled up to a multiple.
      bands: in order; together every block.
    """

    B: int
    K: int
    G: int
    T: int
    S: int
    batches: int
    heads: int
    rows: int
    bands: tuple[Band, ...]

    @property
    def blocks(self) -> int:
        """Blocks of rows."""
        return -(-self.T // self.rows)

    @property
    def cells(self) -> int:
        """Key/value heads of one block, over its batch rows."""
        return self.batches * self.heads

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
    below: int | None = None,
    above: int | None = None,
    itemsize: int = 4,
    platform: str = "cpu",
    target: int | None = None,
    least_rows: int = LEAST_ROWS,
) -> Plan:
    """Cuts scores so that a block takes at most `target` bytes, or `least_rows` rows.

    Args:
      B, K, G, T, S: sizes, all at least 1.
      below: every query i sees keys j >= i - below alone; None: no bound.
      above: every query i sees keys j <= i + above alone; None: no bound.
      itemsize: bytes of a score.
      platform: chooses the target where none is given.
      target: bytes of a block.
      least_rows: of a block, also where that takes more bytes.

    >>> plan(1, 8, 1, 2048, 2048).rows, len(plan(1, 8, 1, 2048, 2048, above=0).bands)
    (256, 8)
    """
    target = TARGET.get(platform, TARGET_ELSEWHERE) if target is None else target
    fitting = max(target // (itemsize * G * S), -(-least_rows // G), 1)
    if below is not None or above is not None:  # so that bands have something to leave out
        fitting = min(fitting, max(-(-T // MOST_BANDS), -(-least_rows // G)))
    blocks = -(-T // fitting)
    rows = -(-T // blocks)
    blocks = -(-T // rows)
    cells = max(target // (itemsize * G * rows * S), 1) if blocks == 1 else 1
    heads = _divisor(K, cells)
    batches = _divisor(B, cells // K) if heads == K else 1
    edges = [round(i * blocks / min(blocks, MOST_BANDS)) for i in range(min(blocks, MOST_BANDS))]
    if below is None and above is None:
        edges = [0]
    bands = []
    for first, stop in zip(edges, [*edges[1:], blocks], strict=True):
        low = 0 if below is None else min(max(first * rows - below, 0), S)
        last = min(stop * rows, T) - 1
        high = S if above is None else min(max(last + above + 1, low), S)
        bands.append(Band(first, stop, low, high))
    return Plan(B, K, G, T, S, batches, heads, rows, tuple(bands))


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`, at least 1."""
    return max(d for d in range(1, max(math.floor(most), 1) + 1) if n % d == 0) if n else 1
