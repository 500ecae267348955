"""Checkpoints in several files, and the JSON index that says which tensor is where.

Format: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints
"""

import contextlib
import os
import re
from collections.abc import Iterator
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
from jaxmha.checkpoint.limits import Budget, Limits, check_name, is_text
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.system import Directory

SUFFIX, TOTAL = ".index.json", "total_size"
READERS = {".safetensors": safetensors.read, ".bin": zip.read}
_AGAIN = "copy or download the whole checkpoint again"
_KEPT = 512  # bytes of memory for a tensor in its shard
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class Index(NamedTuple):
    """An index file: tensor -> shard, and the bytes of all tensors if it says so."""

    shards: dict[str, str]
    total: int | None
    metadata: dict[str, str]


def read(source: Source, limits: Limits) -> Contents:
    """Opens every shard and checks that index and shards agree.

    Raises:
        MalformedFile, AmbiguousFile, PathEscape, IncompleteCheckpoint, BudgetExceeded, and what
        the shards raise, with their own paths.
    """
    path = source.path
    index = parse(source, limits)
    budget = Budget(path, source.size, Limits(**{**vars(limits), "logical_bytes": 2**63 - 1}))
    files = sorted(set(index.shards.values()))
    budget.spend("the number of shards", len(files), limits.shards)
    budget.spend("the number of tensors", len(index.shards), limits.tensors)
    if len({name.casefold() for name in files}) != len(files):
        raise AmbiguousFile(path, "two shard names differ in case only", _AGAIN)
    ending = suffix(path)
    opened: list[tuple[Source, Contents]] = []
    where: dict[str, tuple[Source, Contents]] = {}
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(Directory(path.parent))
        for file in files:
            check_shard_name(path, file)
            if not file.endswith(ending):
                raise MalformedFile(path, f"the shard is not {ending}", _AGAIN, file)
            shard = _open_shard(folder, file, source)
            cleanup.callback(shard.close)
            budget.grow(shard.size)
            contents = READERS[ending](shard, limits)
            cleanup.callback(contents.close)
            opened.append((shard, contents))
            # Digests protect the metadata of a shard, and nothing but it that of the index.
            if contents.digests and dict(contents.metadata) != index.metadata:
                problem = "its metadata is not that of the index"
                raise AmbiguousFile(path, problem, _AGAIN, file)
            for name, info in contents.info.items():
                if index.shards.get(name) != file:
                    listed = index.shards.get(name)
                    said = f"the index says {shown(listed)}" if listed else "not in the index"
                    raise AmbiguousFile(path, f"is in {shown(file)}, {said}", _AGAIN, name)
                budget.build(_KEPT, "the index", name)
                budget.tensor(name, info.shape, info.dtype)
                where[name] = shard, contents
        missing = index.shards.keys() - where.keys()
        if missing:
            file = index.shards[min(missing)]
            raise IncompleteCheckpoint(path, f"is not in {shown(file)}", _AGAIN, min(missing))
        total = sum(info.nbytes for info in budget.info.values())
        # Tied tensors may be counted once for each name, or once.
        if index.total is not None and ending == ".safetensors" and index.total != total:
            problem = f"total_size is {index.total}, the tensors have {total} bytes"
            raise MalformedFile(path, problem, _AGAIN)
        close = cleanup.pop_all().close

    def load(name: str) -> np.ndarray:
        shard, contents = where[name]
        try:
            return contents.load(name)
        finally:
            shard.check_unchanged()

    def stream(name: str) -> Iterator[memoryview]:
        shard, contents = where[name]
        assert contents.stream is not None
        yield from contents.stream(name)
        shard.check_unchanged()

    def view(name: str) -> np.ndarray | None:
        contents = where[name][1]
        return None if contents.view is None else contents.view(name)

    ordered = {name: budget.info[name] for name in index.shards}  # in the order of the index
    digests = {n: d for _, contents in opened for n, d in contents.digests.items()}
    streams = all(contents.stream is not None for _, contents in opened)
    metadata = index.metadata
    return Contents(
        ordered,
        load,
        metadata=metadata,
        digests=digests,
        others=tuple(name for _, contents in opened for name in contents.others),
        close=close,
        files=tuple(shard.path for shard, _ in opened),
        stream=stream if streams else None,
        view=view,
    )


def suffix(path: Path) -> str:
    """The suffix of the shards of an index.

    Raises:
        MalformedFile: the name of the index does not tell.
    """
    name = path.name.lower()
    for ending in READERS:
        if name.endswith(ending + SUFFIX):
            return ending
    known = ", ".join(f"{ending}{SUFFIX}" for ending in READERS)
    raise MalformedFile(path, "the name does not tell the format of the shards", f"use {known}")


def parse(source: Source, limits: Limits) -> Index:
    """The content of an index file, strictly.

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
    """Raises PathEscape unless a name is that of a plain file in the same folder."""
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


def _open_shard(folder: Directory, file: str, index: Source) -> Source:
    """A shard next to its index. No link out of the folder is followed.

    Raises:
        IncompleteCheckpoint: it is not there.  PathEscape: it is a link.  UnreadableFile.
    """
    name = file
    try:
        if os.path.islink(folder.path / file):
            name = _blob(folder, file, index)
        return Source(folder.path / file, mapped=index.mapped, within=(folder, name))
    except UnreadableFile as e:
        if not isinstance(e.__cause__, FileNotFoundError):
            raise
        problem = "the shard is missing"
        raise IncompleteCheckpoint(index.path, problem, _AGAIN, file) from None


def _blob(folder: Directory, file: str, index: Source) -> str:
    """The target of a link in the cache of Hugging Face; other links are refused."""
    target = folder.readlink(file).replace(os.sep, "/")
    parents = Path(os.path.realpath(folder.path)).parts[-3:]
    cached = len(parents) == 3 and parents[0].startswith("models--") and parents[1] == "snapshots"
    if not cached or not re.fullmatch(r"\.\./\.\./blobs/[0-9a-f]{40,64}", target):
        raise PathEscape(index.path, "the shard is a link", "copy the file itself here", file)
    return target
