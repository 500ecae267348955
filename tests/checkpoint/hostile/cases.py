"""Files that must be refused, each built from a sound file with one thing wrong.

CASES maps a name to its suffix, its builder and the error it must raise. The sound files are in
SOUND: they must be accepted, or an error would prove nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxmha.checkpoint.errors import CheckpointError


class Case(NamedTuple):
    suffix: str
    build: Callable[[Path], None]
    error: type[CheckpointError]


CASES: dict[str, Case] = {}
SOUND: dict[str, Case] = {}


def case(
    suffix: str, error: type[CheckpointError] = CheckpointError
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

        table = SOUND if error is CheckpointError else CASES
        assert function.__name__ not in table
        table[function.__name__] = Case(suffix, build, error)
        return function

    return register


def files(path: Path) -> list[Path]:
    """Every file of a checkpoint: of a folder all inside, of an index its shards too."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    if path.name.endswith(".index.json"):
        shards = set(json.loads(path.read_text())["weight_map"].values())
        return [path, *(path.with_name(shard) for shard in sorted(shards))]
    return [path]
