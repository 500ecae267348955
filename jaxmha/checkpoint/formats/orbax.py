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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmha.checkpoint import digests, json_text
from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    IncompleteCheckpoint,
    IntegrityError,
    MalformedFile,
    MissingDependency,
    PathEscape,
    UnsupportedDtype,
    UnsupportedFormat,
    WriteFailed,
    damage,
)
from jaxmha.checkpoint.folder import UNFINISHED, Folder
from jaxmha.checkpoint.formats import ocdbt, zarr
from jaxmha.checkpoint.limits import Budget, Limits, check_name
from jaxmha.checkpoint.plan import Contents, Plan
from jaxmha.checkpoint.tensor import TensorInfo, to_bytes

SUFFIX = ".orbax"
TREE, MARK, MANIFEST = "_METADATA", "commit_success.txt", ocdbt.MANIFEST
SIDECAR = f"{digests.KEY}.json"
_ARRAYS, _EMPTY = ("np.ndarray", "jax.Array", "scalar"), ("None", "Dict", "List", "Tuple")
_CHUNK, _LARGE = 8 << 20, 4 << 20  # bytes; tensorstore holds some chunks at a time
_PARTS = 8
_NODES = 8 << 20  # bytes of the nodes of a database that are kept
_AGAIN = "save it again with orbax"


def places(folder: Folder, limits: Limits) -> dict[str, str]:
    """Where the arrays of the tree are stored -> their names; raises as `read` does."""
    return _leaves(folder.path, _document(folder, Budget(folder.path, folder.size, limits)), limits)


def _document(folder: Folder, budget: Budget) -> dict[str, Any]:
    raw = folder.read(TREE, budget.limits.index_bytes)
    return json_text.parse(raw, budget, _AGAIN, TREE, numbers=True)


def read(folder: Folder, limits: Limits) -> Contents:
    """Checks the tree and what every array declares.

    Raises:
        MissingDependency, MalformedFile, AmbiguousFile, ForbiddenContent, IncompleteCheckpoint,
        UnsupportedDtype, UnsupportedFormat, BudgetExceeded, PathEscape, IntegrityError.
    """
    path = folder.path
    tensorstore = _tensorstore(path)
    budget = Budget(path, folder.size, limits)
    tree = _document(folder, budget)
    leaves = _leaves(path, tree, limits)
    zarr3 = tree.get("use_zarr3", False)
    document, driver = ("zarr.json", "zarr3") if zarr3 else (".zarray", "zarr")
    base: dict[str, Any] = {"driver": "file", "path": f"{os.path.abspath(path)}/"}
    store = {"driver": "ocdbt", "base": base} if MANIFEST in folder else base
    inside = _Inside(folder, budget, tensorstore, store)
    places: dict[str, str] = {}
    held: dict[str, tuple[str, ...]] = {}
    for key, name in leaves.items():
        if f"{key}/{document}" not in inside.keys:
            raise IncompleteCheckpoint(path, "is in the tree, not stored", _AGAIN, name)
        array = (zarr.read3 if zarr3 else zarr.read2)(
            path, name, inside.document(f"{key}/{document}", name)
        )
        info = budget.tensor(name, array.info.shape, array.info.dtype)
        # tensorstore ends the process where it cannot get the memory for one chunk.
        size = math.prod(array.chunk) * info.dtype.itemsize
        budget.spend("the chunk size", size, info.nbytes + limits.chunk_bytes, name)
        held[name] = inside.check_chunks(key, document, name, array)
        places[name] = key
    for key in inside.keys:
        place = key.removesuffix(f"/{document}")
        stray = place != key and place not in leaves
        if stray and not (zarr3 and zarr.is_group(inside.document(key, place))):
            raise IncompleteCheckpoint(path, "is stored and not in the tree", _AGAIN, place)
    kept = _digests(folder, budget, limits) if SIDECAR in folder else {}
    # Without a cache every tensor would have the nodes of the database read and inflated again.
    nodes = tensorstore.Context({"cache_pool": {"total_bytes_limit": _NODES}})

    def opened(name: str) -> Any:
        spec = {"driver": driver, "kvstore": {**store, "path": f"{base['path']}{places[name]}/"}}
        if store is not base:
            spec["kvstore"] = {**store, "path": f"{places[name]}/"}
        array = tensorstore.open(spec, open=True, read=True, context=nodes).result()
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
        budget.info,
        lambda name: part(name, ()),
        digests=kept,
        places=held,
        part=part,
        stream=stream,
    )


class _Inside:
    """The keys of a folder or of the database in it, and what is stored under them.

    Raises:
        MalformedFile, IncompleteCheckpoint, UnsupportedFormat, BudgetExceeded.
    """

    def __init__(
        self, folder: Folder, budget: Budget, tensorstore: Any, store: dict[str, Any]
    ) -> None:
        self._folder, self._budget = folder, budget
        self._store = None
        self.keys: Mapping[str, tuple[str, ...]] = dict.fromkeys(folder, ())
        if "base" in store:
            self.keys = ocdbt.keys(folder, tensorstore, store, budget)
            self._store = tensorstore.KvStore.open(store).result()

    def document(self, key: str, name: str) -> dict[str, Any]:
        """A JSON document."""
        most = self._budget.limits.document_bytes
        # One byte more than is allowed, so that a larger one shows. A database gives whole values.
        raw = self._read(key, slice(0, most + 1) if self._store is None else None, name)
        self._budget.spend("its zarr document", len(raw), most, name)
        return json_text.parse(raw.strip(), self._budget, _AGAIN, name, numbers=True)

    def check_chunks(
        self, key: str, document: str, name: str, array: zarr.Array
    ) -> tuple[str, ...]:
        """The files and folders of the folder that hold an array.

        Raises IncompleteCheckpoint unless every chunk is stored: others would read as zeros. orbax
        and this module store chunks of zeros too.
        """
        path, wanted = self._folder.path, math.prod(array.grid)
        problem = f"has not all of its {wanted:,} chunks"
        if wanted > len(self.keys):
            raise IncompleteCheckpoint(path, problem, _AGAIN, name)
        if array.inner is not None:
            self._budget.spend(
                "the index of inner chunks",
                array.index_bytes(),
                self._budget.limits.chunk_bytes,
                name,
            )
        files = dict.fromkeys(self.keys[f"{key}/{document}"])
        for chunk, numbers in array.chunks():
            place = f"{key}/{chunk}"
            if place not in self.keys:
                raise IncompleteCheckpoint(path, f"{problem}: {chunk} is missing", _AGAIN, name)
            if array.inner is not None:
                size = array.index_bytes()
                where = slice(-size, None) if array.inner.at_end else slice(0, size)
                if not array.is_whole(self._read(place, where, name), numbers):
                    problem = f"has not all inner chunks of {chunk}"
                    raise IncompleteCheckpoint(path, problem, _AGAIN, name)
            files |= dict.fromkeys(self.keys[place])
        return tuple(files) if self._store is not None else (key,)

    def _read(self, key: str, part: slice | None, name: str) -> bytes:
        if self._store is None:
            return self._folder.read_part(key, part or slice(None))
        with damage(self._folder.path, "tensorstore", _AGAIN, name):
            found: bytes = self._store.read(key, byte_range=part).result().value
        return found


def write(path: Path, plan: Plan) -> None:
    """Writes into an empty folder; memory for one tensor and some chunks.

    Raises:
        WriteFailed.
    """
    tensorstore, names = _tensorstore(plan.path), _names(plan)
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{os.path.abspath(path)}/"}}
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
    """The chunk: an eighth of the first two axes of a large tensor, so that devices read their parts."""
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


def _names(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {name: tuple(name.split("/")) for name in plan.info}


def check(plan: Plan) -> None:
    """Raises unless names are a tree, their keys distinct and no paths, and dtypes known.

    Raises:
        MissingDependency, PathEscape, AmbiguousFile, UnsupportedDtype, UnsupportedFormat.
    """
    _tensorstore(plan.path)
    if UNFINISHED in plan.path.name:
        problem = f"the name says by {UNFINISHED} that its writing never ended"
        raise UnsupportedFormat(plan.path, problem, "choose another name")
    names = _names(plan)
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
    kept = json_text.parse(folder.read(SIDECAR, limits.index_bytes), budget, _AGAIN, SIDECAR)
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
