"""Collects facts of a compared checkpoint for a page: digests of files, results of tensors."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from jaxmha import checkpoint
from jaxmha.converters.discovery import attention_blocks, user_names
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.verify.comparison_report import BlockReport, Report

SAME, DIFFERS, LEFT = "same", "differs", "not compared"


class FileFacts(NamedTuple):
    """One file of a checkpoint; `sha256` is the digest of its bytes, as `sha256sum` prints it."""

    name: str
    size: int
    sha256: str


class TensorFacts(NamedTuple):
    """One tensor of a checkpoint; `result` is `SAME`, `DIFFERS` or `LEFT`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    result: str


class Facts(NamedTuple):
    """A compared checkpoint."""

    path: str
    format: str
    files: tuple[FileFacts, ...]
    tensors: tuple[TensorFacts, ...]


def read(path: Path, report: Report, second: bool = False) -> Facts:
    """Reads the facts of the checkpoint at `path`, the first or second source of a report.

    Raises:
      CheckpointError, OSError: a file cannot be read.
    """
    with checkpoint.open(path, dequantise=True, unbox=True) as file:
        found = attention_blocks.find(attention_blocks.shapes(file))
        results = _results(report, second)
        called = user_names.distinct_names((block.prefix for block in found), file.names)
        for block in found:
            results |= _of_block(block, called[block.prefix], report, second)
        tensors = tuple(
            TensorFacts(name, str(info.dtype), tuple(info.shape), results.get(name, SAME))
            for name, info in file.info.items()
        )
        files = tuple(_file(Path(one)) for one in file.files)
        return Facts(str(path), file.format, files, tensors)


def _results(report: Report, second: bool) -> dict[str, str]:
    """Maps the tensors outside attention that differ or were not compared to their results."""
    found = dict.fromkeys(report.unlike[second], DIFFERS)
    source = "second" if second else "first"
    return found | {left.name: LEFT for left in report.not_compared if left.source == source}


def _of_block(block: Block, name: str, report: Report, second: bool) -> dict[str, str]:
    """Maps the tensors of a block to their results; a stack differs if one layer `name[i]` does."""
    own = [one for one in report.blocks if _is_of(one.b if second else one.a, name, block.prefix)]
    if not own:
        return dict.fromkeys(block.keys.values(), LEFT)
    differing = {x.leaf for one in own for x in one.differences if not x.harmless}
    return {
        block.keys[entry.key]: DIFFERS if differing & {*entry.leaves} else SAME
        for entry in block.layout.entries
        if entry.key in block.keys
    }


def _is_of(reported: str, name: str, prefix: str) -> bool:
    return any(reported == one or reported.startswith(f"{one}[") for one in (name, prefix))


def _file(path: Path) -> FileFacts:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileFacts(path.name, file.tell(), sha256)


def shown_first(blocks: tuple[BlockReport, ...]) -> list[BlockReport]:
    """Sorts blocks: the differing blocks first, otherwise in their order."""
    return sorted(blocks, key=lambda block: block.same)
