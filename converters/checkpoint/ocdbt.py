"""The databases of tensorstore (OCDBT), bounded before they are listed.

A few nodes that share their children hold billions of keys, and a node may inflate to any size. So
each node is looked at once, by its frame and then by tensorstore's own decoder.

Format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html
"""

import re
from typing import Any
from urllib.parse import unquote

from jaxmha.converters.checkpoint.errors import (
    IncompleteCheckpoint,
    MalformedFile,
    UnsupportedFormat,
    damage,
)
from jaxmha.converters.checkpoint.folder import Folder
from jaxmha.converters.checkpoint.limits import Budget

MANIFEST = "manifest.ocdbt"
_MOST_MANIFEST = 1 << 20
_MAGIC = b"\x28\xb5\x2f\xfd"  # of zstd
_BLOCK = 128 << 10  # what a block of zstd inflates to at most
_REPEATED, _COMPRESSED, _RESERVED = 1, 2, 3  # kinds of blocks; 0 is stored
_ENTRY = 400  # bytes of memory for one key, its own bytes apart
_AGAIN = "save it again with orbax"


def keys(folder: Folder, tensorstore: Any, store: dict[str, Any], budget: Budget) -> list[str]:
    """The keys of the last version of a database.

    Raises:
        MalformedFile, IncompleteCheckpoint, UnsupportedFormat, BudgetExceeded.
    """
    with damage(folder.path, "tensorstore", _AGAIN):
        base = tensorstore.KvStore.open(store["base"]).result()
        _check_frame(folder, MANIFEST, folder.read(MANIFEST, _MOST_MANIFEST), budget)
        manifest = tensorstore.ocdbt.dump(base).result()
        if manifest["config"].get("manifest_kind", "single") != "single":
            raise UnsupportedFormat(folder.path, "a manifest in parts", _AGAIN, MANIFEST)
        versions = manifest["versions"]
        todo = [versions[-1]["root"]["location"]] if versions and _root(versions[-1]) else []
        count, seen = 0, set[str]()
        while todo:
            location = todo.pop()
            if location in seen:
                raise MalformedFile(folder.path, "two nodes share a child", _AGAIN, location)
            seen.add(location)
            _check_node(folder, location, budget)
            for entry in tensorstore.ocdbt.dump(base, location).result()["entries"]:
                count += 1
                budget.spend("the number of chunks", count, budget.limits.members)
                budget.build(_ENTRY, "its database")
                if "location" in entry:
                    todo.append(entry["location"])
        found = tensorstore.KvStore.open(store).result().list().result()
    return [key.decode("utf-8", "backslashreplace") for key in found]


def _root(version: dict[str, Any]) -> bool:
    return "location" in version["root"]


def _check_node(folder: Folder, location: str, budget: Budget) -> None:
    """Raises unless a node is a frame in a file of the folder, of an allowed inflated size."""
    parts = re.fullmatch(r"btreenode:(.*):(.+):(\d+):(\d+)", location)
    if parts is None:
        raise MalformedFile(folder.path, "a node is nowhere", _AGAIN, location)
    file = unquote(parts[1]) + unquote(parts[2])
    if ".." in file.split("/"):
        raise MalformedFile(folder.path, "a node is outside of the folder", _AGAIN, file)
    if file not in folder:
        raise IncompleteCheckpoint(folder.path, "a file of the database is missing", _AGAIN, file)
    start, size = int(parts[3]), int(parts[4])
    _check_frame(folder, file, folder.read_part(file, slice(start, start + size)), budget)


def _check_frame(folder: Folder, file: str, raw: bytes, budget: Budget) -> None:
    """Charges what a frame inflates to at most. tensorstore checks the rest."""
    size = len(raw) if raw[12:14] == b"\0\0" else None  # a version, and no compression or zstd
    size = _inflated(raw) if raw[12:14] == b"\0\1" else size
    if size is None:
        raise MalformedFile(folder.path, "a node of the database is damaged", _AGAIN, file)
    budget.build(size, "its database", file)


def _inflated(raw: bytes) -> int | None:
    """The most bytes that a frame of zstd inflates to, by its blocks; None: it is damaged."""
    if raw[14:18] != _MAGIC or len(raw) < 24:
        return None
    descriptor = raw[18]
    single, width = descriptor >> 5 & 1, descriptor >> 6
    at = 19 + (not single) + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[width]
    total = last = 0
    while not last and at + 7 <= len(raw):
        header = int.from_bytes(raw[at : at + 3], "little")
        last, kind, length = header & 1, header >> 1 & 3, header >> 3
        if kind == _RESERVED:
            return None
        total += _BLOCK if kind == _COMPRESSED else length
        at += 3 + (1 if kind == _REPEATED else length)
    # Behind it are at most a checksum of zstd and that of the frame.
    return total if last and at + 4 <= len(raw) <= at + 8 else None
