"""Files that must be refused, each built from a sound file with one thing wrong.

CASES maps a name to its suffix, its builder and the error it must raise. The sound files are in
SOUND: they must be accepted, or an error would prove nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxmha import checkpoint as ck
from jaxmha.checkpoint.errors import CheckpointError

Bad, Two, No, Code = ck.MalformedFile, ck.AmbiguousFile, ck.UnsupportedFormat, ck.ForbiddenContent
Big, Gone, Out = ck.BudgetExceeded, ck.IncompleteCheckpoint, ck.PathEscape
Data = bytes | Callable[..., Any]


class Case(NamedTuple):
    suffix: str
    build: Callable[[Path], None]
    error: type[CheckpointError]


CASES: dict[str, Case] = {}
SOUND: dict[str, Case] = {}


def case(
    suffix: str, error: type[CheckpointError] = CheckpointError, name: str = ""
) -> Callable[[Callable[..., bytes | None]], Callable[..., bytes | None]]:
    """Registers a builder. One without parameters returns bytes, one with a path writes itself."""

    def register(function: Callable[..., bytes | None]) -> Callable[..., bytes | None]:
        def build(path: Path) -> None:
            if function.__code__.co_argcount:
                function(path)
            else:
                data = function()
                assert data is not None
                path.write_bytes(data)

        table, key = SOUND if error is CheckpointError else CASES, name or function.__name__
        assert key not in table
        table[key] = Case(suffix, build, error)
        return function

    return register


def raw_case(name: str, suffix: str, error: type[CheckpointError], data: Data) -> None:
    """A file of given bytes, or of what a function returns or writes; large data needs one."""
    case(suffix, error, name)(data if callable(data) else lambda: data)


def raw_cases(prefix: str, suffix: str, *rows: tuple[str, type[CheckpointError], Data]) -> None:
    """Files like that of `raw_case`, whose names have a prefix in common."""
    for name, error, data in rows:
        raw_case(prefix + name, suffix, error, data)


def files(path: Path) -> list[Path]:
    """Every file of a checkpoint: of a folder all inside, of an index its shards too."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    if path.name.endswith(".index.json"):
        shards = set(json.loads(path.read_text())["weight_map"].values())
        return [path, *(path.with_name(shard) for shard in sorted(shards))]
    return [path]
