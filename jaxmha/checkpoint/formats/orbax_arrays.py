"""The arrays in an orbax folder: checks of their stored chunks, and reading with tensorstore."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jaxmha.checkpoint import json_text
from jaxmha.checkpoint.errors import (
    IncompleteCheckpoint,
    MalformedFile,
    MissingDependency,
    UnsupportedFormat,
    damage,
)
from jaxmha.checkpoint.folder import Folder
from jaxmha.checkpoint.formats import ocdbt, zarr
from jaxmha.checkpoint.limits import Budget, is_text
from jaxmha.checkpoint.tensor import TensorInfo, to_bytes

AGAIN = "save it again with orbax"
_CHUNK = 8 << 20  # most bytes per written chunk and per read; tensorstore buffers several
_LARGE, _PARTS = 4 << 20, 8  # larger tensors are split, so that each device can read its part
_NODES = 8 << 20  # bytes of database nodes to cache


def tensorstore_for(path: Path) -> ModuleType:
    """Imports tensorstore to read or write the folder `path`.

    Raises:
        MissingDependency.  UnsupportedFormat: the path is not UTF-8, which tensorstore requires.
    """
    if not is_text(os.path.abspath(path)):
        remedy = "rename it, or choose another name"
        raise UnsupportedFormat(path, "the path is not UTF-8, and tensorstore needs it so", remedy)
    try:
        import tensorstore
    except ImportError as e:
        remedy = "pip install 'jaxmha[orbax]'"
        raise MissingDependency(path, "orbax checkpoints need tensorstore", remedy) from e
    return tensorstore


def chunk_shape(info: TensorInfo) -> list[int]:
    """The chunk shape to write; for a large tensor, an eighth of each of the first two axes."""
    if not info.size:  # the nonzero axes may exceed the largest chunk allowed
        return [1] * len(info.shape)
    shape, row = info.shape, max(1, math.prod(info.shape[1:]) * info.dtype.itemsize)
    first = [-(-n // _PARTS) for n in shape[:2]] if info.nbytes >= _LARGE else list(shape[:2])
    chunk = [max(1, n) for n in (*first, *shape[2:])]
    return [min(chunk[0], max(1, _CHUNK // row)), *chunk[1:]] if chunk else []


class Zarr(NamedTuple):
    """A version of zarr: file name of the metadata of an array, tensorstore driver, and parser."""

    document: str
    driver: str
    read: Callable[[Path, str, dict[str, Any]], zarr.Array]


ZARR2 = Zarr(".zarray", "zarr", zarr.read2)
ZARR3 = Zarr("zarr.json", "zarr3", zarr.read3)


class KeyStore:
    """The keys of a folder, or of the database in it, and the values stored under them.

    Raises:
        MalformedFile, IncompleteCheckpoint, UnsupportedFormat, BudgetExceeded.
    """

    def __init__(
        self, folder: Folder, budget: Budget, tensorstore: Any, store: dict[str, Any]
    ) -> None:
        self.path, self._folder, self._budget = folder.path, folder, budget
        self._store = None
        self.keys: Mapping[str, tuple[str, ...]] = dict.fromkeys(folder, ())
        if "base" in store:
            self.keys = ocdbt.keys(folder, tensorstore, store, budget)
            self._store = tensorstore.KvStore.open(store).result()

    def document(self, key: str, name: str) -> dict[str, Any]:
        """Reads and parses the JSON document under a key; `name` goes into error messages."""
        most = self._budget.limits.document_bytes
        # Read one byte more than allowed, to notice larger files; from a database, the whole value.
        raw = self._read(key, slice(0, most + 1) if self._store is None else None, name)
        self._budget.spend("its zarr document", len(raw), most, name)
        return json_text.parse(raw.strip(), self._budget, AGAIN, name, numbers=True)

    def check_chunks(
        self, key: str, document: str, name: str, array: zarr.Array
    ) -> tuple[str, ...]:
        """Checks that every chunk of an array is stored; returns the files and folders of chunks.

        Raises IncompleteCheckpoint for a missing chunk, which tensorstore would read as zeros
        (orbax and this module store chunks of zeros too), and MalformedFile for inner chunks that
        overlap.
        """
        path, wanted = self._folder.path, math.prod(array.grid)
        problem = f"has not all of its {wanted:,} chunks"
        if wanted > len(self.keys):
            raise IncompleteCheckpoint(path, problem, AGAIN, name)
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
                raise IncompleteCheckpoint(path, f"{problem}: {chunk} is missing", AGAIN, name)
            if array.inner is not None:
                size = array.index_bytes()
                where = slice(-size, None) if array.inner.at_end else slice(0, size)
                index = self._read(place, where, name)
                if not array.is_whole(index, numbers):
                    problem = f"has not all inner chunks of {chunk}"
                    raise IncompleteCheckpoint(path, problem, AGAIN, name)
                if array.shares_bytes(index):
                    problem = f"stores inner chunks of {chunk} at the same bytes"
                    raise MalformedFile(path, problem, AGAIN, name)
            files |= dict.fromkeys(self.keys[place])
        return tuple(files) if self._store is not None else (key,)

    def _read(self, key: str, part: slice | None, name: str) -> bytes:
        if self._store is None:
            return self._folder.read_part(key, part or slice(None))
        with damage(self._folder.path, "tensorstore", AGAIN, name):
            found: bytes = self._store.read(key, byte_range=part).result().value
        return found


def register(
    inside: KeyStore, budget: Budget, layout: Zarr, key: str, name: str
) -> tuple[str, ...]:
    """Registers an array that is stored under a key; returns the files and folders that hold it."""
    path, limits = inside.path, budget.limits
    if f"{key}/{layout.document}" not in inside.keys:
        raise IncompleteCheckpoint(path, "is in the tree, not stored", AGAIN, name)
    array = layout.read(path, name, inside.document(f"{key}/{layout.document}", name))
    info = budget.tensor(name, array.info.shape, array.info.dtype)
    # tensorstore aborts the process if it cannot allocate one chunk.
    size = math.prod(array.chunk) * info.dtype.itemsize
    budget.spend("the chunk size", size, info.nbytes + limits.chunk_bytes, name)
    budget.read(math.prod(array.grid) * size - info.nbytes, name)
    chunk = array.inner.chunk if array.inner else array.chunk
    budget.load(info.nbytes, _CHUNK + _at_once(info.shape, chunk, info.dtype)[1], name)
    return inside.check_chunks(key, layout.document, name, array)


def check_strays(inside: KeyStore, layout: Zarr, path: Path, keys: set[str]) -> None:
    """Raises IncompleteCheckpoint if an array is stored that the tree does not list."""
    for document in inside.keys:
        key = document.removesuffix(f"/{layout.document}")
        if key == document or key in keys:
            continue
        if layout is ZARR3 and zarr.is_group(inside.document(document, key)):
            continue
        raise IncompleteCheckpoint(path, "is stored and not in the tree", AGAIN, key)


def _at_once(shape: tuple[int, ...], chunk: tuple[int, ...], dtype: np.dtype) -> tuple[int, int]:
    """The number of rows to read at once, a multiple of a chunk's, and their bytes in memory.

    tensorstore buffers all compressed chunks of a read, so few are read at once.
    """
    if not chunk:
        return 1, dtype.itemsize
    padded = (-(-n // c) * c for n, c in zip(shape[1:], chunk[1:], strict=True))
    row = max(1, math.prod(padded) * dtype.itemsize)
    rows = max(1, _CHUNK // row // chunk[0]) * chunk[0]
    return rows, rows * row


class Arrays:
    """The arrays of a checked folder, read by tensorstore."""

    def __init__(
        self,
        path: Path,
        tensorstore: ModuleType,
        layout: Zarr,
        store: Mapping[str, Any],
        keys: Mapping[str, str],
        info: Mapping[str, TensorInfo],
    ) -> None:
        self._path, self._library = path, tensorstore
        self._layout, self._store, self._keys, self._info = layout, store, keys, info
        # Without a cache, every tensor would read and inflate the nodes of the database again.
        self._nodes = tensorstore.Context({"cache_pool": {"total_bytes_limit": _NODES}})

    def _open(self, name: str) -> Any:
        inside = self._store.get("path", "")  # a database store has no path
        store = {**self._store, "path": f"{inside}{self._keys[name]}/"}
        spec = {"driver": self._layout.driver, "kvstore": store}
        array = self._library.open(spec, open=True, read=True, context=self._nodes).result()
        declared = self._info[name]
        if ((*array.shape,), array.dtype.numpy_dtype) != (declared.shape, declared.dtype):
            raise MalformedFile(self._path, "reads otherwise than it declares", AGAIN, name)
        return array

    def part(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """Reads a box of one array."""
        with damage(self._path, "tensorstore", AGAIN, name):
            array = self._open(name)
            view = array[box]
            if not view.rank:
                return np.asarray(view.read().result()).reshape(())
            found = np.empty(view.shape, self._info[name].dtype)
            step, _ = _at_once(view.shape, array.chunk_layout.read_chunk.shape, found.dtype)
            first = view.domain[0].inclusive_min
            for at in range(0, view.shape[0], step):
                end = min(at + step, view.shape[0])
                # `view.read()` would allocate another array.
                rows = self._library.array(found[at:end])
                rows.write(view[first + at : first + end]).result()
        return found

    def stream(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of one array in pieces of whole rows."""
        info = self._info[name]
        if not info.shape:
            yield to_bytes(self.part(name, ())).data
        elif info.nbytes:
            step = chunk_shape(info)[0]
            for at in range(0, info.shape[0], step):
                rows = slice(at, min(at + step, info.shape[0]))
                yield to_bytes(self.part(name, (rows,))).data
