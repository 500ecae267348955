"""The cases to time, as data. Dimension letters are B T S N K H; E = N * H."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from jaxmha.bench.case import Case, Direction, Kind, Scope


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
