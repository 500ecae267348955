"""Sums the lengths of the keys and paths of one OCDBT node before tensorstore allocates them.

Each key is stored as a suffix and the length of the prefix that it shares with the previous key, so
that two bytes can encode a key of 64 kB. Only the lengths are read here; they precede all text.

Format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxmha.checkpoint.limits import Budget

_HEAD = 14  # bytes of magic, length, version and compression
_CONFIG = 16  # bytes of the UUID at the start of a manifest
_MOST_BYTES = 3  # bytes of a stored length; keys have less than 2**16 bytes
_ZSTD = 93  # the compression method number of zstd in zip files
# Bytes of memory for a file path and for an entry of a node, without their text.
_PATH, _ENTRY = 100, 600
# Copies of a key in memory: one in tensorstore, one in the result of `ocdbt.dump`, and two in the
# dicts of keys.
_COPIES = 4


class Damaged(Exception):  # noqa: N818
    """A node ends before its lengths do, or a length is too large."""


class _Lengths:
    """Reads lengths from the start of a node; inflates no more of it than needed."""

    def __init__(self, first: Callable[[int], bytes], at: int) -> None:
        self._first, self.at = first, at

    def bytes(self, count: int) -> bytes:
        end = self.at + count
        found = self._first(end)[self.at :]
        if len(found) < count:
            raise Damaged
        self.at = end
        return found

    def number(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.bytes(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise Damaged

    def total(self, count: int) -> int:
        """Reads `count` lengths and returns their sum."""
        if count <= 0:
            return 0
        need = count
        while True:
            raw = np.frombuffer(self._first(self.at + need)[self.at :], np.uint8)
            if len(raw) < need:
                raise Damaged
            ends = np.flatnonzero(raw < 0x80)[:count]
            if len(ends) == count:
                break
            need += count - len(ends)
            if need > count * _MOST_BYTES:
                raise Damaged
        used = int(ends[-1]) + 1
        starts = np.concatenate([[0], ends[:-1] + 1])
        widths = ends + 1 - starts
        if int(widths.max()) > _MOST_BYTES:
            raise Damaged
        places = np.arange(used) - np.repeat(starts, widths)
        self.at += used
        return int(((raw[:used] & 0x7F).astype(np.int64) << (7 * places)).sum())


def check_manifest(tensorstore: Any, raw: bytes, budget: Budget) -> None:
    """Charges the memory of the file paths in a manifest to the budget.

    Raises:
        BudgetExceeded, Damaged.
    """
    lengths = _Lengths(_start(tensorstore, raw), _CONFIG)
    in_parts = lengths.number()
    lengths.number(), lengths.number(), lengths.bytes(1)  # sizes of values and nodes, arity
    if lengths.number():  # compressed: skip the compression level
        lengths.bytes(4)
    if not in_parts:
        _paths(lengths, budget)


def keys(tensorstore: Any, raw: bytes, shared: int, budget: Budget) -> int:
    """Charges the memory of the keys and paths of a node; returns the number of keys.

    `shared` is the length of the common prefix of the keys, which the node does not store.

    Raises:
        BudgetExceeded, Damaged.
    """
    lengths = _Lengths(_start(tensorstore, raw), 0)
    lengths.bytes(1)  # skip the height of the node
    _paths(lengths, budget)
    count = lengths.number()
    budget.spend("the number of chunks", count, budget.limits.members)
    budget.build(_ENTRY * count, "its database")
    total = lengths.total(count - 1) + lengths.total(count) + shared * count
    budget.build(_COPIES * total, "its database")
    return count


def _paths(lengths: _Lengths, budget: Budget) -> None:
    count = lengths.number()
    budget.spend("the number of files", count, budget.limits.files)
    total = lengths.total(count - 1)
    text = lengths.total(count)
    lengths.total(count)  # skip the lengths of the folders in the paths
    budget.build(_PATH * count + _COPIES * (total + text), "its database")
    lengths.bytes(text)


def _start(tensorstore: Any, raw: bytes) -> Callable[[int], bytes]:
    """Returns a function of `count`: the first `count` bytes of the content of a frame."""
    inside = raw[_HEAD:-4]
    if raw[_HEAD - 1] == 0:
        return lambda count: inside[:count]
    # Only tensorstore's zip driver can inflate just the start of a zstd stream.
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("node", inside)
    zipped = bytearray(out.getvalue())
    central = zipped.rindex(b"PK\1\2")
    struct.pack_into("<H", zipped, 8, _ZSTD)
    struct.pack_into("<H", zipped, central + 10, _ZSTD)
    kept = b""

    def first(count: int) -> bytes:
        nonlocal kept
        if count <= len(kept):
            return kept[:count]
        struct.pack_into("<L", zipped, 22, count)
        struct.pack_into("<L", zipped, central + 24, count)
        context = tensorstore.Context()
        base = {"driver": "memory", "path": "node.zip"}
        tensorstore.KvStore.open({"driver": "memory"}, context=context).result().write(
            "node.zip", bytes(zipped)
        ).result()
        store = tensorstore.KvStore.open({"driver": "zip", "base": base}, context=context).result()
        try:
            read: bytes = store.read("node").result().value
        except ValueError as error:
            raise Damaged from error
        kept = read
        return read

    return first
