"""The cases to time, as data. Dimension letters are B T S N K H; E = N * H."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

Scope = Literal["layer", "core"]
Direction = Literal["forward", "backward"]
Kind = Literal["plain", "causal", "padded", "gqa", "cross", "decode"]


@dataclass(frozen=True)
class Case:
    """One thing to compute, in float32.

    `layer` is multi-head attention with its four projections, on features of width E; `core` is
    attention alone, on projected heads. `backward` is forward and backward together.
    """

    scope: Scope
    direction: Direction
    kind: Kind
    B: int
    T: int
    S: int
    N: int = 8
    K: int = 8
    H: int = 64
    quick: bool = False

    @property
    def name(self) -> str:
        """Unique, and what `--case` looks for.

        >>> Case("layer", "forward", "plain", 2, 512, 512).name
        'layer-forward-plain-B2-T512-E512'
        """
        name = f"{self.scope}-{self.direction}-{self.kind}-B{self.B}-T{self.T}"
        name += f"-S{self.S}" if self.S != self.T else ""
        name += f"-E{self.E}"
        name += f"-K{self.K}" if self.K != self.N else ""
        return name + (f"-H{self.H}" if self.H != 64 else "")

    @property
    def E(self) -> int:
        """Width of the features: all heads together."""
        return self.N * self.H

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Keys of each batch row: full in the first, a quarter in the last; None: all full."""
        if self.kind == "padded":
            return tuple(
                self.S - (self.S - self.S // 4) * i // max(self.B - 1, 1) for i in range(self.B)
            )
        if self.kind == "decode":  # a cache that is not quite full
            return (self.S - 3,) * self.B
        return None

    @property
    def pairs(self) -> int:
        """Pairs of query and key that may attend, in one head, over the batch."""
        if self.kind == "causal":
            return self.B * sum(min(i + 1, self.S) for i in range(self.T))
        return self.T * (sum(self.lengths) if self.lengths else self.B * self.S)

    @property
    def flop(self) -> float:
        """Floating-point operations that are needed: what is masked counts nothing.

        Attention: 2 products forward, 5 more backward (scores are computed again). Projections:
        1 forward, 2 more backward.
        """
        attention = 4.0 * self.N * self.H * self.pairs
        new = self.T if self.kind == "decode" else self.S  # keys of the past are in the cache
        queries, keys = self.B * self.T * self.E, self.B * new * self.E
        projections = 4.0 * (queries * self.E + keys * self.K * self.H)
        backward = self.direction == "backward"
        total = attention * (3.5 if backward else 1.0)
        if self.scope == "layer":
            total += projections * (3.0 if backward else 1.0)
        return total

    @property
    def measures_memory(self) -> bool:
        """True if materialised scores would take most of the memory."""
        return max(self.T, self.S) >= 2048 and self.kind != "decode"

    def as_dict(self) -> dict[str, Any]:
        """Fields, for JSON; `Case(**fields)` is the way back."""
        return asdict(self)


def _grid(
    scope: Scope,
    direction: Direction,
    kind: Kind,
    sizes: Iterable[tuple[int, ...]],
    *,
    N: int = 8,
    K: int | None = None,
    H: int = 64,
    quick: Sequence[tuple[int, ...]] = (),
) -> list[Case]:
    """Cases of sizes (B, T) or (B, T, S)."""
    return [
        Case(scope, direction, kind, s[0], s[1], s[-1], N, N if K is None else K, H, s in quick)
        for s in sizes
    ]


_PLAIN = [(1, 64), (8, 128), (4, 256), (2, 512), (1, 1024), (1, 2048), (1, 4096), (32, 512)]
_QUICK = [(8, 128), (2, 512), (1, 1024), (1, 2048)]
_LONG = (1, 16384)
_ODD = [(8, 77), (8, 197), (4, 333), (2, 1023)]
_CROSS = [(2, 128, 1023), (2, 1024, 77), (1, 2048, 512)]
_CACHES = [(1, 1, 1023), (8, 1, 1023), (1, 1, 4096)]

CASES: tuple[Case, ...] = (
    # The layer, forward.
    *_grid("layer", "forward", "plain", [*_PLAIN, _LONG], quick=_QUICK),
    *_grid("layer", "forward", "plain", [(1, 64), (8, 128), (2, 512), (1, 2048), (1, 4096)], N=4),
    *_grid("layer", "forward", "plain", [(1, 64), (8, 128), (2, 512), (1, 2048), (1, 4096)], N=16),
    *_grid("layer", "forward", "plain", _ODD, quick=[(8, 197)]),
    *_grid("layer", "forward", "plain", [(8, 197), (1, 2048)], H=80),
    *_grid("layer", "forward", "plain", [(8, 197), (1, 2048)], H=96),
    *_grid("layer", "forward", "plain", [(1, 512), (1, 2048)], N=1),
    *_grid("layer", "forward", "causal", [(8, 128), (2, 512), (1, 1024)]),
    *_grid("layer", "forward", "causal", [(1, 2048), (1, 4096), (2, 1023)], quick=[(1, 2048)]),
    *_grid("layer", "forward", "padded", [(8, 128), (8, 512), (4, 1024)], quick=[(8, 512)]),
    *_grid("layer", "forward", "padded", [(4, 2048), (4, 333)]),
    *_grid("layer", "forward", "gqa", [(8, 128), (2, 512), (1, 2048)], K=2, quick=[(2, 512)]),
    *_grid("layer", "forward", "cross", _CROSS, quick=[(2, 1024, 77)]),
    *_grid("layer", "forward", "decode", _CACHES, quick=[(8, 1, 1023)]),
    # The layer, forward and backward.
    *_grid("layer", "backward", "plain", _PLAIN, quick=_QUICK),
    *_grid("layer", "backward", "plain", [_LONG]),
    *_grid("layer", "backward", "plain", [(2, 512), (1, 2048)], N=4),
    *_grid("layer", "backward", "plain", [(2, 512), (1, 2048)], N=16),
    *_grid("layer", "backward", "plain", _ODD),
    *_grid("layer", "backward", "plain", [(8, 197), (1, 2048)], H=80),
    *_grid("layer", "backward", "plain", [(8, 197), (1, 2048)], H=96),
    *_grid("layer", "backward", "plain", [(1, 512), (1, 2048)], N=1),
    *_grid("layer", "backward", "causal", [(8, 128), (2, 512), (1, 2048)]),
    *_grid("layer", "backward", "padded", [(8, 128), (8, 512), (4, 1024)]),
    *_grid("layer", "backward", "gqa", [(2, 512), (1, 2048)], K=2),
    *_grid("layer", "backward", "cross", _CROSS),
    # The core.
    *_grid("core", "forward", "plain", [*_PLAIN, _LONG], quick=[(2, 512), (1, 2048)]),
    *_grid("core", "forward", "plain", [(8, 197), (1, 2048)], H=80),
    *_grid("core", "forward", "plain", [(2, 1023)], H=96),
    *_grid("core", "forward", "causal", [(2, 512), (1, 2048), (1, 4096)]),
    *_grid("core", "forward", "padded", [(8, 512), (4, 1024)]),
    *_grid("core", "forward", "gqa", [(2, 512), (1, 2048)], K=2),
    *_grid("core", "forward", "cross", _CROSS),
    *_grid("core", "forward", "decode", _CACHES),
    *_grid("core", "forward", "decode", _CACHES, K=2),
    *_grid("core", "backward", "plain", [(8, 128), (2, 512), (1, 2048), (1, 4096), _LONG]),
    *_grid("core", "backward", "plain", [(1, 2048)], N=1),
    *_grid("core", "backward", "causal", [(2, 512), (1, 2048)]),
    *_grid("core", "backward", "gqa", [(2, 512), (1, 2048)], K=2),
)


def named(name: str) -> Case:
    """The one case of the name.

    >>> named("layer-forward-plain-B1-T2048-E64").N
    1
    """
    return next(case for case in CASES if case.name == name)


def select(patterns: Sequence[str] = (), *, quick: bool = False) -> list[Case]:
    """Cases whose name matches one of the patterns: shell wildcards, anywhere in the name.

    Raises:
      ValueError: a pattern that matches nothing.

    >>> len(select(["layer-*-causal-B1-T4096"]))
    1
    """
    pool = [case for case in CASES if case.quick or not quick or patterns]
    for pattern in patterns:
        if not pattern or not any(_matches(case, pattern) for case in pool):
            raise ValueError(
                f"--case {pattern!r} matches none of {len(pool)} cases: names look like "
                f"{pool[0].name!r}; --full --list prints them all"
            )
    return [case for case in pool if not patterns or any(_matches(case, p) for p in patterns)]


def _matches(case: Case, pattern: str) -> bool:
    return fnmatchcase(case.name, f"*{pattern}*")
