"""Writes the index of a sharded checkpoint, which maps tensors to shards."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from jaxmha.checkpoint import atomic, reader, shards_read
from jaxmha.checkpoint.errors import CheckpointError, UnsupportedFormat
from jaxmha.checkpoint.formats import table
from jaxmha.checkpoint.limits import UNLIMITED, Limits
from jaxmha.checkpoint.plan import WriteJob
from jaxmha.checkpoint.settling import settle
from jaxmha.checkpoint.source import Source


def check(plan: WriteJob, names: Mapping[Path, list[str]]) -> None:
    """Raises UnsupportedFormat if the index would be larger than readers allow."""
    size, most = len(content(plan, names)), Limits().index_bytes
    if size > most:
        problem = f"the index would have {size:,} bytes, and at most {most:,} are read"
        raise UnsupportedFormat(plan.path, problem, "shorten the names of the tensors")


def refuse_other(target: Path, expected: bytes) -> None:
    """Raises DestinationExists unless the index of the target has this content."""
    with contextlib.suppress(CheckpointError), contextlib.closing(Source(target)) as source:
        if source.size == len(expected) and source.read(0, source.size) == expected:
            return
    atomic.check_target(target, False, ())


def content(plan: WriteJob, names: Mapping[Path, list[str]]) -> bytes:
    """The bytes of the index; `names`: shard -> names of its tensors."""
    total = sum(info.nbytes for info in plan.info.values())
    index = {
        "metadata": {**plan.metadata, shards_read.TOTAL: total},
        "weight_map": {name: shard.name for shard, inside in names.items() for name in inside},
    }
    return json.dumps(index, indent=1, ensure_ascii=False).encode()


def write(file: BinaryIO, path: Path, plan: WriteJob, names: Mapping[Path, list[str]]) -> None:
    """Writes the index to a temporary file, and reads it back."""
    file.write(content(plan, names))
    file.flush()
    settle(file.fileno())
    _compare(plan, path)


def _compare(plan: WriteJob, index: Path) -> None:
    with (
        atomic.reading_back(plan.path, index),
        contextlib.closing(Source(index, known_as=plan.path)) as source,
        reader.read(source, table.SHARDED, UNLIMITED) as file,
    ):
        if dict(file.info) != dict(plan.info):
            raise atomic.unlike(plan.path)
