"""Folders that orbax writes: a JSON tree of names, and arrays in the zarr format of tensorstore.

This module checks all declarations in a folder; tensorstore reads the chunks and verifies their
checksums. Writing handles one array at a time, while orbax needs all arrays in memory at once.

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
    IntegrityError,
    MalformedFile,
    PathEscape,
    UnsupportedDtype,
    UnsupportedFormat,
    WriteFailed,
)
from jaxmha.checkpoint.folder import UNFINISHED, Folder
from jaxmha.checkpoint.formats import ocdbt, zarr
from jaxmha.checkpoint.formats.orbax_arrays import (
    AGAIN,
    ZARR2,
    ZARR3,
    Arrays,
    KeyStore,
    check_strays,
    chunk_shape,
    register,
    tensorstore_for,
)
from jaxmha.checkpoint.limits import Budget, Limits, check_name
from jaxmha.checkpoint.plan import Contents, WriteJob

SUFFIX = ".orbax"
TREE, MARK, MANIFEST = "_METADATA", "commit_success.txt", ocdbt.MANIFEST
SIDECAR = f"{digests.KEY}.json"
ABOUT = "_CHECKPOINT_METADATA"
_ARRAYS, _EMPTY = ("np.ndarray", "jax.Array", "scalar"), ("None", "Dict", "List", "Tuple")
_ABOUT: dict[str, Any] = {
    "item_handlers": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler."
    "PyTreeCheckpointHandler",
    "metrics": {},
    "performance_metrics": {},
    "init_timestamp_nsecs": None,
    "commit_timestamp_nsecs": None,
    "custom_metadata": {},
}


def places(folder: Folder, limits: Limits) -> dict[str, str]:
    """Maps the storage key of every array in the tree to its name; raises the errors of `read`."""
    return _leaves(folder.path, _document(folder, Budget(folder.path, folder.size, limits)), limits)


def _document(folder: Folder, budget: Budget) -> dict[str, Any]:
    raw = folder.read(TREE, budget.limits.index_bytes)
    return json_text.parse(raw, budget, AGAIN, TREE, numbers=True)


def read(folder: Folder, limits: Limits) -> Contents:
    """Checks the tree and the declaration of every array.

    Raises:
        MissingDependency, MalformedFile, AmbiguousFile, ForbiddenContent, IncompleteCheckpoint,
        UnsupportedDtype, UnsupportedFormat, BudgetExceeded, PathEscape, IntegrityError.
    """
    path = folder.path
    tensorstore = tensorstore_for(path)
    budget = Budget(path, folder.size, limits)
    tree = _document(folder, budget)
    keys = {name: key for key, name in _leaves(path, tree, limits).items()}
    layout = ZARR3 if tree.get("use_zarr3", False) else ZARR2
    base: dict[str, Any] = {"driver": "file", "path": f"{os.path.abspath(path)}/"}
    store = {"driver": "ocdbt", "base": base} if MANIFEST in folder else base
    inside = KeyStore(folder, budget, tensorstore, store)
    files = {name: register(inside, budget, layout, key, name) for name, key in keys.items()}
    check_strays(inside, layout, path, set(keys.values()))
    arrays = Arrays(path, tensorstore, layout, store, keys, budget.info)
    metadata = _metadata(folder, budget, limits) if ABOUT in folder else {}
    return Contents(
        budget.info,
        lambda name: arrays.part(name, ()),
        metadata=metadata,
        digests=_digests(folder, budget, limits, metadata) if SIDECAR in folder else {},
        places=files,
        part=arrays.part,
        stream=arrays.stream,
    )


def write(path: Path, plan: WriteJob) -> None:
    """Writes a checkpoint into the empty folder `path`; holds one tensor and some chunks in memory.

    Raises:
        WriteFailed.
    """
    tensorstore, names = tensorstore_for(plan.path), _names(plan)
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{os.path.abspath(path)}/"}}
    for name, info in plan.info.items():
        row = math.prod(info.shape[1:]) * info.dtype.itemsize if info.size else 1
        chunk = chunk_shape(info)
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
    about = {**_ABOUT, "custom_metadata": dict(plan.metadata)}
    documents: dict[str, Any] = {TREE: _tree(names), ABOUT: about}
    if plan.keep_digests:
        documents[SIDECAR] = {"all": plan.manifest(), "tensors": plan.digests}
    for file, document in documents.items():
        (path / file).write_text(json.dumps(document))
    (path / MARK).write_text("written by jaxmha\n")


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
    """Regroups bytes into pieces of `size` bytes in one reused buffer; the last may be smaller."""
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


def _names(plan: WriteJob) -> dict[str, tuple[str, ...]]:
    return {name: tuple(name.split("/")) for name in plan.info}


def check(plan: WriteJob) -> None:
    """Raises unless names form a tree with distinct storage keys, and orbax supports all dtypes.

    Raises:
        MissingDependency, PathEscape, AmbiguousFile, UnsupportedDtype, UnsupportedFormat.
    """
    tensorstore_for(plan.path)
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
    """Maps the storage key of every array in the tree to its name."""
    entries = tree.get("tree_metadata")
    if not isinstance(entries, dict) or type(tree.get("use_zarr3", False)) is not bool:
        raise MalformedFile(path, "tree_metadata is not a JSON object", AGAIN, TREE)
    leaves: dict[str, str] = {}
    for label, entry in entries.items():
        try:
            keys = [key["key"] for key in entry["key_metadata"]]
            kind = entry["value_metadata"]["value_type"]
        except (TypeError, KeyError):
            raise MalformedFile(path, "an entry of the tree is damaged", AGAIN, label) from None
        if not keys or any(type(key) is not str or not key for key in keys):
            raise MalformedFile(path, "a key of the tree is not text", AGAIN, label)
        if kind in _EMPTY:
            continue
        name = "/".join(keys)
        if kind not in _ARRAYS:
            problem = f"is a {str(kind)[:40]!r}, not an array"
            raise UnsupportedFormat(path, problem, "save a tree of arrays only", name)
        check_name(path, name, limits)
        place = ".".join(keys)
        if place in leaves:
            raise AmbiguousFile(path, "two arrays are stored at one place", AGAIN, name)
        leaves[place] = name
    return leaves


def _metadata(folder: Folder, budget: Budget, limits: Limits) -> dict[str, str]:
    """The strings in the custom metadata; values of other types, by other writers, are left out."""
    raw = folder.read(ABOUT, limits.index_bytes).strip()
    kept = json_text.parse(raw, budget, AGAIN, ABOUT, numbers=True).get("custom_metadata")
    items = kept.items() if isinstance(kept, dict) else ()
    return {key: value for key, value in items if type(value) is str}


def _digests(
    folder: Folder, budget: Budget, limits: Limits, metadata: Mapping[str, str]
) -> dict[str, str]:
    path = folder.path
    kept = json_text.parse(folder.read(SIDECAR, limits.index_bytes), budget, AGAIN, SIDECAR)
    every, tensors = kept.get("all"), kept.get("tensors")
    if not isinstance(every, str) or not isinstance(tensors, dict):
        raise IntegrityError(path, "the digests are damaged", AGAIN, SIDECAR)
    digests.check_manifest(every, budget.info, tensors, metadata.items(), path)
    return tensors


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        code = re.search(
            r"os_error_code='(\d+)'", str(e)
        )  # more precise than the text of the exception
        reason = os.strerror(int(code[1])) if code else " ".join(str(e).split())[:100]
        remedy = "check the folder and its free space"
        raise WriteFailed(path, f"tensorstore cannot write it ({reason})", remedy) from e
