"""Lists the keys of a tensorstore database (OCDBT) within limits.

A few nodes that share children can yield billions of keys, a node can inflate to any size, and two
bytes in it can encode a key of 64 kB. Therefore each node is read once, and tensorstore decodes it
only after its frame and the lengths of its keys were checked.

Format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html
"""

import re
from typing import Any, NamedTuple
from urllib.parse import unquote

from jaxmha.checkpoint.errors import IncompleteCheckpoint, MalformedFile, UnsupportedFormat, damage
from jaxmha.checkpoint.folder import Folder
from jaxmha.checkpoint.formats import ocdbt_node
from jaxmha.checkpoint.limits import Budget

MANIFEST = "manifest.ocdbt"
_MOST_MANIFEST = 1 << 20
_MAGIC = b"\x28\xb5\x2f\xfd"  # magic number of zstd
_BLOCK = 128 << 10  # largest inflated size of a zstd block
_REPEATED, _COMPRESSED, _RESERVED = 1, 2, 3  # types of zstd blocks; 0 is an uncompressed block
_DAMAGED = "a node of the database is damaged"
_PLACE = re.compile(r"(?:btreenode|value):(.*):(.+):(\d+):(\d+)")  # folder, file, offset, length
_AGAIN = "save it again with orbax"


def keys(
    folder: Folder, tensorstore: Any, store: dict[str, Any], budget: Budget
) -> dict[str, tuple[str, ...]]:
    """Maps each key of the latest version of a database to the files that hold its value and nodes.

    Raises:
        MalformedFile, IncompleteCheckpoint, UnsupportedFormat, BudgetExceeded.
    """
    with damage(folder.path, "tensorstore", _AGAIN):
        base = tensorstore.KvStore.open(store["base"]).result()
        _check_manifest(folder, tensorstore, budget)
        manifest = tensorstore.ocdbt.dump(base).result()
        if manifest["config"].get("manifest_kind", "single") != "single":
            raise UnsupportedFormat(folder.path, "a manifest in parts", _AGAIN, MANIFEST)
        versions = manifest["versions"]
        todo = list[_Node]()
        if versions and "location" in versions[-1]["root"]:
            todo.append(_Node(versions[-1]["root"]["location"], b"", (MANIFEST,)))
        count, stored, seen, held = 0, 0, set[str](), dict[bytes, tuple[str, ...]]()
        while todo:
            node = todo.pop()
            if node.location in seen:
                raise MalformedFile(folder.path, "two nodes share a child", _AGAIN, node.location)
            seen.add(node.location)
            file, more = _check_node(folder, tensorstore, node, budget)
            count += more
            budget.spend("the number of chunks", count, budget.limits.members)
            files = node.files if file in node.files else (*node.files, file)
            for entry in tensorstore.ocdbt.dump(base, node.location).result()["entries"]:
                if "location" in entry:
                    prefix = node.prefix + entry["subtree_common_prefix"]
                    todo.append(_Node(entry["location"], prefix, files))
                    continue
                own = files
                if "indirect_value" in entry:
                    value, part = _place(folder, "value", entry["indirect_value"])
                    own = files if value in files else (*files, value)
                    stored += part.stop - part.start
                held[node.prefix + entry["key"]] = own
            if stored > folder.size:  # bytes that values share are inflated once per value
                problem = "two values share bytes: together they are larger than the folder"
                raise MalformedFile(folder.path, problem, _AGAIN, node.location)
        found = tensorstore.KvStore.open(store).result().list().result()
    # The value of a key that the loop above did not find may be in any file.
    return {key.decode("utf-8", "backslashreplace"): held.get(key, ("",)) for key in found}


class _Node(NamedTuple):
    """The location of a node, the common prefix of its keys, and the files read to find it."""

    location: str
    prefix: bytes
    files: tuple[str, ...]


def _place(folder: Folder, what: str, location: str) -> tuple[str, slice]:
    """The file that holds a node or a value, and its byte range."""
    parts = _PLACE.fullmatch(location)
    if parts is None:
        raise MalformedFile(folder.path, f"a {what} is nowhere", _AGAIN, location)
    file = unquote(parts[1]) + unquote(parts[2])
    if ".." in file.split("/"):
        raise MalformedFile(folder.path, f"a {what} is outside of the folder", _AGAIN, file)
    if file not in folder:
        raise IncompleteCheckpoint(folder.path, "a file of the database is missing", _AGAIN, file)
    start, size = int(parts[3]), int(parts[4])
    return file, slice(start, start + size)


def _check_manifest(folder: Folder, tensorstore: Any, budget: Budget) -> None:
    raw = folder.read(MANIFEST, _MOST_MANIFEST)
    _check_frame(folder, MANIFEST, raw, budget)
    try:
        ocdbt_node.check_manifest(tensorstore, raw, budget)
    except ocdbt_node.Damaged:
        raise MalformedFile(folder.path, _DAMAGED, _AGAIN, MANIFEST) from None


def _check_node(folder: Folder, tensorstore: Any, node: _Node, budget: Budget) -> tuple[str, int]:
    """Checks a node before tensorstore decodes it; returns its file and its number of keys.

    Raises unless the node is a frame in a file of the folder, and inflates within the limits.
    """
    file, part = _place(folder, "node", node.location)
    raw = folder.read_part(file, part)
    _check_frame(folder, file, raw, budget)
    try:
        return file, ocdbt_node.keys(tensorstore, raw, len(node.prefix), budget)
    except ocdbt_node.Damaged:
        raise MalformedFile(folder.path, _DAMAGED, _AGAIN, file) from None


def _check_frame(folder: Folder, file: str, raw: bytes, budget: Budget) -> None:
    """Charges an upper bound of the inflated size of a frame; tensorstore checks the rest."""
    size = len(raw) if raw[12:14] == b"\0\0" else None  # version 0, then compression: none or zstd
    size = _inflated(raw) if raw[12:14] == b"\0\1" else size
    if size is None:
        raise MalformedFile(folder.path, _DAMAGED, _AGAIN, file)
    budget.build(size, "its database", file)


def _inflated(raw: bytes) -> int | None:
    """Upper bound of the inflated size of a zstd frame, from its blocks; None if it is damaged."""
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
    # The last block is followed by zstd's optional checksum and the checksum of the OCDBT frame.
    return total if last and at + 4 <= len(raw) <= at + 8 else None
