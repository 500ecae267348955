"""Reads checkpoints that consist of several files and a JSON index, which maps tensors to files.

Format: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxmha.checkpoint import json_text
from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    IncompleteCheckpoint,
    MalformedFile,
    PathEscape,
    UnreadableFile,
    shown,
)
from jaxmha.checkpoint.formats import safetensors
from jaxmha.checkpoint.formats.torch import zip
from jaxmha.checkpoint.inside import open_folder, open_inside
from jaxmha.checkpoint.limits import Budget, Limits, check_name, is_text
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.system import Directory
from jaxmha.checkpoint.tensor import TensorInfo

SUFFIX, TOTAL = ".index.json", "total_size"
READERS = {".safetensors": safetensors.read, ".bin": zip.read}
_AGAIN = "copy or download the whole checkpoint again"
# Most shards to keep open: the system limits open files, and a comparison of two checkpoints opens
# each of them twice.
_HELD = 32
_KEPT = 512  # bytes of memory per tensor for the tables of a shard
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class Index(NamedTuple):
    """An index file: tensor -> shard, the bytes of all tensors if given, and the metadata."""

    shards: dict[str, str]
    total: int | None
    metadata: dict[str, str]


def read(source: Source, limits: Limits) -> Contents:
    """Opens every shard and checks that index and shards agree.

    Raises:
        MalformedFile, AmbiguousFile, PathEscape, IncompleteCheckpoint, BudgetExceeded, and the
        errors of the shards, with their own paths.
    """
    path = source.path
    index = parse(source, limits)
    budget = Budget(path, source.size, Limits(**{**vars(limits), "logical_bytes": 2**63 - 1}))
    files = sorted(set(index.shards.values()))
    budget.spend("the number of shards", len(files), limits.shards)
    budget.spend("the number of tensors", len(index.shards), limits.tensors)
    if len({name.casefold() for name in files}) != len(files):
        raise AmbiguousFile(path, "two shard names differ in case only", _AGAIN)
    shards: list[_Shard] = []
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(open_folder(path.parent))
        for file in files:
            check_shard_name(path, file)
            if not file.endswith(suffix(path)):
                raise MalformedFile(path, f"the shard is not {suffix(path)}", _AGAIN, file)
            opened = _open_shard(folder, file, source, held=len(files) <= _HELD)
            cleanup.callback(opened.close)
            budget.grow(opened.size)
            shard = _Shard(opened, READERS[suffix(path)](opened, limits))
            cleanup.callback(shard.contents.close)
            _register(budget, index, file, shard.contents)
            shards.append(shard)
        _check_whole(path, budget, index)
        close = cleanup.pop_all().close
    return _contents(budget.info, index, shards, close)


class _Shard(NamedTuple):
    """An open shard and what its header declares."""

    source: Source
    contents: Contents


def _register(budget: Budget, index: Index, file: str, contents: Contents) -> None:
    """Registers the tensors of a shard.

    Raises:
        AmbiguousFile: index and shard disagree.  BudgetExceeded.
    """
    path = budget.path
    # The digests cover the metadata of the shard, so the metadata of the index must be equal.
    if contents.digests and dict(contents.metadata) != index.metadata:
        raise AmbiguousFile(path, "its metadata is not that of the index", _AGAIN, file)
    for name, info in contents.info.items():
        if index.shards.get(name) != file:
            listed = index.shards.get(name)
            indexed = f"the index says {shown(listed)}" if listed else "not in the index"
            raise AmbiguousFile(path, f"is in {shown(file)}, {indexed}", _AGAIN, name)
        budget.build(_KEPT, "the index", name)
        budget.tensor(name, info.shape, info.dtype)


def _check_whole(path: Path, budget: Budget, index: Index) -> None:
    """Raises IncompleteCheckpoint or MalformedFile unless the shards hold all indexed tensors."""
    if missing := index.shards.keys() - budget.info.keys():
        file = index.shards[min(missing)]
        raise IncompleteCheckpoint(path, f"is not in {shown(file)}", _AGAIN, min(missing))
    total = sum(info.nbytes for info in budget.info.values())
    # For .bin files, some writers count tied tensors once per name, so their total is not checked.
    counted_once = suffix(path) == ".safetensors"
    if index.total is not None and counted_once and index.total != total:
        problem = f"total_size is {index.total}, the tensors have {total} bytes"
        raise MalformedFile(path, problem, _AGAIN)


def _contents(
    info: Mapping[str, TensorInfo],
    index: Index,
    shards: Sequence[_Shard],
    close: Callable[[], None],
) -> Contents:
    shard_of = {name: shard for shard in shards for name in shard.contents.info}

    def load(name: str) -> np.ndarray:
        source, contents = shard_of[name]
        try:
            return contents.load(name)
        finally:
            source.check_unchanged()

    def stream(name: str) -> Iterator[memoryview]:
        source, contents = shard_of[name]
        assert contents.stream is not None
        yield from contents.stream(name)
        source.check_unchanged()

    def view(name: str) -> np.ndarray | None:
        contents = shard_of[name].contents
        return None if contents.view is None else contents.view(name)

    return Contents(
        {name: info[name] for name in index.shards},  # in the order of the index
        load,
        metadata=index.metadata,
        digests={n: d for shard in shards for n, d in shard.contents.digests.items()},
        others=tuple(name for shard in shards for name in shard.contents.others),
        close=close,
        files=tuple(shard.source.path for shard in shards),
        stream=stream if all(s.contents.stream is not None for s in shards) else None,
        view=view,
    )


def suffix(path: Path) -> str:
    """The suffix of the shards of an index.

    Raises:
        MalformedFile: the name of the index has no known suffix.
    """
    name = path.name.lower()
    for ending in READERS:
        if name.endswith(ending + SUFFIX):
            return ending
    known = ", ".join(f"{ending}{SUFFIX}" for ending in READERS)
    raise MalformedFile(path, "the name does not show the format of the shards", f"use {known}")


def parse(source: Source, limits: Limits) -> Index:
    """Parses an index file, and refuses duplicate keys, unknown top-level keys and wrong types.

    Raises:
        MalformedFile, AmbiguousFile, BudgetExceeded.
    """
    path = source.path
    budget = Budget(path, source.size, limits)
    budget.spend("the index", source.size, limits.index_bytes)
    document = json_text.parse(source.read(0, source.size).strip(), budget, _AGAIN, numbers=True)
    if not document.keys() <= {"metadata", "weight_map"} or "weight_map" not in document:
        raise MalformedFile(path, "an index has exactly metadata and weight_map", _AGAIN)
    shards, metadata = document["weight_map"], document.get("metadata", {})
    if not isinstance(shards, dict) or any(type(file) is not str for file in shards.values()):
        raise MalformedFile(path, "weight_map does not map names to file names", _AGAIN)
    if not isinstance(metadata, dict):
        raise MalformedFile(path, "metadata is not a JSON object", _AGAIN)
    for name in shards:
        check_name(path, name, limits)
    total = metadata.get(TOTAL)
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if total is not None and (type(total) is not int or total < 0):
        raise MalformedFile(path, "total_size is not a natural number", _AGAIN)
    texts = {key: text for key, text in metadata.items() if type(text) is str}
    return Index(shards, total, texts)


def check_shard_name(path: str | os.PathLike[str], file: str) -> None:
    """Raises PathEscape unless `file` is a plain file name, without folders, on every system."""
    bad = (
        not file
        or any(c in '/\\:<>|"?*' or ord(c) < 32 for c in file)
        or file in (".", "..")
        or file.startswith(".")
        or file[-1] in ". "
        or _DEVICES.fullmatch(file)
        or not is_text(file)
        or len(file.encode()) > 255
    )
    if bad:
        raise PathEscape(
            path, "a shard name is not the name of a file next to the index", _AGAIN, file
        )


def _open_shard(folder: Directory, file: str, index: Source, held: bool) -> Source:
    """Opens a shard next to its index.

    Raises:
        IncompleteCheckpoint: the shard is missing.  PathEscape: the shard is a link.
        UnreadableFile: the shard cannot be opened.
    """
    try:
        return open_inside(folder, file, mapped=index.mapped, held=held, of=index.path)
    except UnreadableFile as e:
        if not isinstance(e.__cause__, FileNotFoundError):
            raise
        problem = "the shard is missing"
        raise IncompleteCheckpoint(index.path, problem, _AGAIN, file) from None
