"""Folders that orbax writes: a JSON tree of names, and arrays in the zarr format of tensorstore.

Everything declared is checked here; tensorstore reads the chunks and their checksums. Written are
the same files, array by array, which orbax itself would want in memory together.

Format: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
"""

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmha.converters.checkpoint import digests, zarr
from jaxmha.converters.checkpoint.contents import Contents, Plan
from jaxmha.converters.checkpoint.errors import (
    AmbiguousFile,
    ForbiddenContent,
    IncompleteCheckpoint,
    IntegrityError,
    MalformedFile,
    MissingDependency,
    PathEscape,
    UnreadableFile,
    UnsupportedDtype,
    UnsupportedFormat,
    WriteFailed,
    damage,
)
from jaxmha.converters.checkpoint.limits import Budget, Limits, check_name
from jaxmha.converters.checkpoint.safetensors import parse_json
from jaxmha.converters.checkpoint.source import Source
from jaxmha.converters.checkpoint.tensor import TensorInfo, to_bytes

SUFFIX = ".orbax"
TREE, MARK, MANIFEST = "_METADATA", "commit_success.txt", "manifest.ocdbt"
SIDECAR = f"{digests.KEY}.json"
_UNFINISHED = ".orbax-checkpoint-tmp"
_ARRAYS, _EMPTY = ("np.ndarray", "jax.Array", "scalar"), ("None", "Dict", "List", "Tuple")
_DEPTH = 6  # folders within folders
_CHUNK, _LARGE = 8 << 20, 4 << 20  # bytes; tensorstore holds some chunks at a time
_PARTS = 8
_AGAIN = "save it again with orbax"


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


class Folder:
    """A folder of plain files, none of which may change while it is read.

    Raises:
        UnreadableFile, IncompleteCheckpoint, ForbiddenContent, BudgetExceeded.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path = path
        if _UNFINISHED in path.name:
            remedy = "wait for its writer, or name another step"
            raise IncompleteCheckpoint(path, "the writing of this folder never ended", remedy)
        self._limits = limits
        self._files = self._walk()
        self.size = sum(size for _, size, _ in self._files.values())

    def _walk(self) -> dict[str, tuple[int, int, int]]:
        budget, found = Budget(self.path, 0, self._limits), {}
        todo: list[tuple[str, int]] = [(str(self.path), 0)]
        try:
            while todo:
                folder, depth = todo.pop()
                budget.spend("the depth of folders", depth, _DEPTH)
                for entry in sorted(_entries(folder), key=lambda entry: entry.name):
                    inside = os.path.relpath(entry.path, self.path)
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        todo.append((entry.path, depth + 1))
                    elif not stat.S_ISREG(status.st_mode):
                        problem = "is a link or device, not a plain file"
                        raise ForbiddenContent(self.path, problem, "copy the files here", inside)
                    else:
                        found[inside] = status.st_ino, status.st_size, status.st_mtime_ns
                        budget.spend("the number of files", len(found), self._limits.members)
        except OSError as e:
            problem = f"cannot be listed ({e.strerror or e})"
            raise UnreadableFile(self.path, problem, "check its permissions") from e
        return found

    def __contains__(self, file: str) -> bool:
        return file in self._files

    def read(self, file: str, most: int) -> bytes:
        """A whole small file of the folder.

        Raises:
            IncompleteCheckpoint, BudgetExceeded, UnreadableFile.
        """
        if file not in self:
            raise IncompleteCheckpoint(self.path, "the file is missing", _AGAIN, file)
        source = Source(self.path / file)
        try:
            Budget(self.path, 0, self._limits).spend("the file", source.size, most, file)
            return source.read(0, source.size)
        finally:
            source.close()

    def check_unchanged(self) -> None:
        """Raises IntegrityError if any file came, went or changed."""
        if self._walk() != self._files:
            problem = "the folder changed while it was being read"
            raise IntegrityError(self.path, problem, "wait for its writer, read again")

    def close(self) -> None:
        """Nothing is held open."""


def read(folder: Folder, limits: Limits) -> Contents:
    """Checks the tree and what every array declares.

    Raises:
        MissingDependency, MalformedFile, AmbiguousFile, ForbiddenContent, IncompleteCheckpoint,
        UnsupportedDtype, UnsupportedFormat, BudgetExceeded, PathEscape, IntegrityError.
    """
    path = folder.path
    tensorstore = _tensorstore(path)
    tree = parse_json(folder.read(TREE, limits.index_bytes), path, numbers=True)
    leaves = _leaves(path, tree, limits)
    zarr3 = tree.get("use_zarr3", False)
    document, driver = ("zarr.json", "zarr3") if zarr3 else (".zarray", "zarr")
    base: dict[str, Any] = {"driver": "file", "path": f"{os.path.abspath(path)}/"}
    store = {"driver": "ocdbt", "base": base} if MANIFEST in folder else base
    budget = Budget(path, folder.size, limits)
    with damage(path, "tensorstore", _AGAIN):
        keys = tensorstore.KvStore.open(store).result()
        listed = [key.decode() for key in keys.list().result()]
    budget.spend("the number of chunks", len(listed), limits.members)
    stored = {k.removesuffix(f"/{document}") for k in listed if k.endswith(f"/{document}")}
    if stored != leaves.keys():
        odd = min(stored ^ leaves.keys())
        problem = "is stored and not in the tree" if odd in stored else "is in the tree, not stored"
        raise IncompleteCheckpoint(path, problem, _AGAIN, odd)
    chunks = dict.fromkeys(stored, 0)
    for key in listed:
        array = key.rpartition("/c/")[0] or key.rpartition("/")[0]
        while array and array not in chunks:
            array = array.rpartition("/")[0]
        if array and not key.endswith(document):
            chunks[array] += 1
    places: dict[str, str] = {}
    for key, name in leaves.items():
        with damage(path, "tensorstore", _AGAIN, name):
            raw = keys.read(f"{key}/{document}").result().value
        info, chunk = (zarr.read3 if zarr3 else zarr.read2)(
            path, name, parse_json(raw.strip(), path, True)
        )
        budget.tensor(name, info.shape, info.dtype)
        # tensorstore ends the process where it cannot get the memory for one chunk.
        size = math.prod(chunk) * info.dtype.itemsize
        budget.spend("the chunk size", size, info.nbytes + limits.chunk_bytes, name)
        wanted = math.prod(-(-n // c) for n, c in zip(info.shape, chunk, strict=True))
        if wanted != chunks[key]:  # what is missing would read as zeros
            problem = f"has {chunks[key]} of {wanted} chunks"
            raise IncompleteCheckpoint(path, problem, _AGAIN, name)
        places[name] = key
    kept = _digests(folder, budget, limits) if SIDECAR in folder else {}

    def opened(name: str) -> Any:
        spec = {"driver": driver, "kvstore": {**store, "path": f"{base['path']}{places[name]}/"}}
        if store is not base:
            spec["kvstore"] = {**store, "path": f"{places[name]}/"}
        array = tensorstore.open(spec, open=True, read=True).result()
        if (*array.shape,) != budget.info[name].shape or (
            array.dtype.numpy_dtype != budget.info[name].dtype
        ):
            raise MalformedFile(path, "reads otherwise than it declares", _AGAIN, name)
        return array

    def part(name: str, box: tuple[slice, ...]) -> np.ndarray:
        with damage(path, "tensorstore", _AGAIN, name):
            array = opened(name)
            view = array[box]
            if not view.rank:
                return np.asarray(view.read().result()).reshape(())
            found = np.empty(view.shape, budget.info[name].dtype)
            # tensorstore holds all chunks that it is asked for, as they are stored.
            row = max(1, math.prod(view.shape[1:]) * found.itemsize)
            chunk = array.chunk_layout.read_chunk.shape[0]
            step = max(1, _CHUNK // row // chunk) * chunk
            first = view.domain[0].inclusive_min
            for at in range(0, view.shape[0], step):
                end = min(at + step, view.shape[0])
                found[at:end] = view[first + at : first + end].read().result()
        return found

    def stream(name: str) -> Iterator[memoryview]:
        info = budget.info[name]
        if not info.shape:
            yield to_bytes(part(name, ())).data
        elif info.nbytes:
            step = _chunk(info)[0]
            for at in range(0, info.shape[0], step):
                rows = slice(at, min(at + step, info.shape[0]))
                yield to_bytes(part(name, (rows,))).data

    return Contents(
        budget.info, lambda name: part(name, ()), digests=kept, part=part, stream=stream
    )


def write(path: Path, plan: Plan) -> None:
    """Writes into an empty folder; memory for one tensor and some chunks.

    Raises:
        MissingDependency, AmbiguousFile, UnsupportedDtype, WriteFailed.
    """
    tensorstore = _tensorstore(plan.path)
    names = {name: tuple(name.split("/")) for name in plan.info}
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{os.path.abspath(path)}/"}}
    _check_tree(plan, names)
    for name, info in plan.info.items():
        row = max(1, math.prod(info.shape[1:]) * info.dtype.itemsize)
        chunk = _chunk(info)
        rows = chunk[0] if chunk else 1
        metadata = {
            "shape": list(info.shape),
            "chunks": chunk,
            "dtype": zarr.written(info.dtype),
            "compressor": {"id": "zstd", "level": 1},
            "filters": None,
            "fill_value": None,
            "order": "C",
            "dimension_separator": ".",
        }
        spec = {
            "driver": "zarr",
            "kvstore": {**store, "path": f"{'.'.join(names[name])}/"},
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
        }
        with _written(plan.path):
            array = tensorstore.open(spec, create=True, open=False).result()
        at = 0
        for piece in _gathered(plan.blocks(name), rows * row):
            block = piece.view(info.dtype).reshape(-1, *info.shape[1:])
            with _written(plan.path):
                part = array[at : at + len(block)] if info.shape else array
                part.write(block if info.shape else block[0]).result()
            at += len(block)
    documents: dict[str, Any] = {TREE: _tree(names), "_CHECKPOINT_METADATA": _ABOUT}
    if plan.keep_digests:
        documents[SIDECAR] = {"all": plan.manifest(), "tensors": plan.digests}
    for file, document in documents.items():
        (path / file).write_text(json.dumps(document))
    (path / MARK).write_text("written by jaxmha\n")


def _chunk(info: TensorInfo) -> list[int]:
    """Of a large tensor an eighth of the first two axes, so that devices read their own parts."""
    shape, row = info.shape, max(1, math.prod(info.shape[1:]) * info.dtype.itemsize)
    first = [-(-n // _PARTS) for n in shape[:2]] if info.nbytes >= _LARGE else list(shape[:2])
    chunk = [max(1, n) for n in (*first, *shape[2:])]
    return [min(chunk[0], max(1, _CHUNK // row)), *chunk[1:]] if chunk else []


_ABOUT: dict[str, Any] = {
    "item_handlers": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler."
    "PyTreeCheckpointHandler",
    "metrics": {},
    "performance_metrics": {},
    "init_timestamp_nsecs": None,
    "commit_timestamp_nsecs": None,
    "custom_metadata": {},
}


def _tree(names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {
        str(keys): {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": value,
        }
        for keys in names.values()
    }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _gathered(blocks: Iterator[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Bytes in pieces of a size, the last may be smaller."""
    piece, used = np.empty(size, np.uint8), 0
    for block in blocks:
        while block.size:
            step = min(block.size, size - used)
            piece[used : used + step] = block[:step]
            used, block = used + step, block[step:]
            if used == size:
                yield piece
                used = 0
    if used:
        yield piece[:used]


def _check_tree(plan: Plan, names: Mapping[str, tuple[str, ...]]) -> None:
    """Raises unless names are a tree, and their keys distinct and no paths."""
    inner = {keys[:n] for keys in names.values() for n in range(1, len(keys))}
    places: dict[str, str] = {}
    for name, keys in names.items():
        if "" in keys:
            raise PathEscape(plan.path, "an empty key", "rename the tensor", name)
        if keys in inner:
            raise AmbiguousFile(plan.path, "is both a tensor and a tree", "rename one", name)
        place = ".".join(keys)
        if places.setdefault(place, name) != name:
            problem = f"orbax stores it at the same place as {places[place]!r}"
            raise AmbiguousFile(plan.path, problem, "rename one of them", name)
        if plan.info[name].dtype not in zarr.NAMES:
            problem = f"orbax stores no {plan.info[name].dtype}"
            raise UnsupportedDtype(plan.path, problem, "convert the tensor first", name)


def _leaves(path: Path, tree: dict[str, Any], limits: Limits) -> dict[str, str]:
    """Where the arrays of the tree are stored -> their names."""
    entries = tree.get("tree_metadata")
    if not isinstance(entries, dict) or type(tree.get("use_zarr3", False)) is not bool:
        raise MalformedFile(path, "tree_metadata is not a JSON object", _AGAIN, TREE)
    leaves: dict[str, str] = {}
    for label, entry in entries.items():
        try:
            keys = [key["key"] for key in entry["key_metadata"]]
            kind = entry["value_metadata"]["value_type"]
        except (TypeError, KeyError):
            raise MalformedFile(path, "an entry of the tree is damaged", _AGAIN, label) from None
        if not keys or any(type(key) is not str or not key for key in keys):
            raise MalformedFile(path, "a key of the tree is not text", _AGAIN, label)
        if kind in _EMPTY:
            continue
        name = "/".join(keys)
        if kind not in _ARRAYS:
            problem = f"is a {str(kind)[:40]!r}, not an array"
            raise UnsupportedFormat(path, problem, "save a tree of arrays only", name)
        check_name(path, name, limits)
        place = ".".join(keys)
        if place in leaves:
            raise AmbiguousFile(path, "two arrays are stored at one place", _AGAIN, name)
        leaves[place] = name
    return leaves


def _digests(folder: Folder, budget: Budget, limits: Limits) -> dict[str, str]:
    path = folder.path
    kept = parse_json(folder.read(SIDECAR, limits.index_bytes), path)
    every, tensors = kept.get("all"), kept.get("tensors")
    if not isinstance(every, str) or not isinstance(tensors, dict):
        raise IntegrityError(path, "the digests are damaged", _AGAIN, SIDECAR)
    digests.check_manifest(every, budget.info, tensors, (), path)
    return tensors


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        code = re.search(r"os_error_code='(\d+)'", str(e))  # says more than all calls above it
        reason = os.strerror(int(code[1])) if code else " ".join(str(e).split())[:100]
        remedy = "check the folder and its free space"
        raise WriteFailed(path, f"tensorstore cannot write it ({reason})", remedy) from e


def _tensorstore(path: Path) -> Any:
    try:
        import tensorstore
    except ImportError as e:
        remedy = "pip install 'jaxmha[orbax]'"
        raise MissingDependency(path, "orbax checkpoints need tensorstore", remedy) from e
    return tensorstore
