"""Hostile HDF5 files that h5py wrote, with some bytes changed."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from jaxmha import checkpoint as ck
from jaxmha.checkpoint.formats.hdf5.checksum import lookup3
from tests.checkpoint.hostile.cases import Bad, Code, case, raw_cases
from tests.checkpoint.hostile.hdf5 import SECRET
from tests.checkpoint.hostile.keras_archives import archive
from tests.checkpoint.hostile.keras_weights import keras

# --- files of h5py, changed --------------------------------------------------------------------


def changed(path: Path, change: Callable[[bytearray], None], **settings: Any) -> None:
    """A sound file of version `latest`, its bytes changed."""
    new(path, **settings)
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)


def new(path: Path, layers: int = 1, **settings: Any) -> None:
    with h5py.File(path, "w", libver="latest") as file:
        for i in range(layers):
            group = file.create_group(f"layer_{i}/vars")
            group.attrs["name"] = f"layer_{i}"
            group.create_dataset("0", data=np.arange(600, dtype="i4").reshape(20, 30), **settings)


def seal(raw: bytearray, at: int, size: int) -> None:
    """Makes the checksum at the end of a structure match again."""
    struct.pack_into("<L", raw, at + size - 4, lookup3(bytes(raw[at : at + size - 4])))


def seal_header(raw: bytearray, at: int) -> None:
    flags = raw[at + 5]
    start = 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1)
    width = 1 << (flags & 3)
    seal(raw, at, start + width + int.from_bytes(raw[at + start :][:width], "little") + 4)


def new_header(*messages: tuple[int, bytes]) -> bytes:
    body = b"".join(struct.pack("<BHB", k, len(data), 0) + data for k, data in messages)
    raw = bytearray(b"OHDR\2\2" + struct.pack("<L", len(body)) + body + bytes(4))
    seal(raw, 0, len(raw))
    return bytes(raw)


def extended(path: Path, kind: int, body: bytes) -> None:
    """A sound file whose superblock has an extension with one message."""

    def change(raw: bytearray) -> None:
        struct.pack_into("<Q", raw, 20, len(raw))
        raw += new_header((kind, body))
        struct.pack_into("<Q", raw, 28, len(raw))
        seal(raw, 0, 48)

    changed(path, change)


def cache_image(path: Path) -> None:
    """The header of a dataset lies in an image of the cache; at its address is a harmless one."""
    from_file = path.with_name("external.tmp")
    with h5py.File(from_file, "w", libver="latest") as file:
        file.create_dataset("w", (16,), "u1", external=[(SECRET, 0, 16)])
        at = h5py.h5o.get_info(file["w"].id).addr
    raw = bytearray(from_file.read_bytes())
    from_file.unlink()
    start = raw[at + 6 + 16 * (raw[at + 5] >> 5 & 1) :]
    size = int.from_bytes(start[: 1 << (raw[at + 5] & 3)], "little")
    size += 6 + 16 * (raw[at + 5] >> 5 & 1) + (1 << (raw[at + 5] & 3)) + 4
    outside = bytes(raw[at : at + size])
    harmless = new_header(
        (1, struct.pack("<BBBBQ", 2, 1, 0, 1, 16)),
        (3, struct.pack("<B3BLHH", 0x10, 0, 0, 0, 1, 0, 8)),
        (8, struct.pack("<BBQQ", 4, 1, len(raw), 16)),
    )
    raw[at : at + len(harmless)] = harmless
    raw += bytes(16)
    image = bytearray(struct.pack("<4sBBQL", b"MDCI", 0, 0, 0, 1))
    image += struct.pack("<4B3HLQQ", 5, 3, 1, 0, 0, 0, 0, 1, at, len(outside)) + outside + bytes(4)
    struct.pack_into("<Q", image, 6, len(image))
    seal(image, 0, len(image))
    where = len(raw)
    raw += image
    struct.pack_into("<Q", raw, 20, len(raw))
    raw += new_header((0x18, struct.pack("<BQQ", 0, where, len(image))))
    struct.pack_into("<Q", raw, 28, len(raw))
    seal(raw, 0, 48)
    path.write_bytes(raw)


@case(".keras", ck.ForbiddenContent)
def keras_cache_image(path: Path) -> None:
    inside = path.with_name("inside.tmp")
    cache_image(inside)
    archive(path, members={"model.weights.h5": inside.read_bytes()})
    inside.unlink()


def _extension(kind: int, what: str, body: bytes) -> None:
    @case(".weights.h5", ck.ForbiddenContent, f"h5_superblock_{what}")
    def build(path: Path) -> None:
        extended(path, kind, body)


_extension(0x0F, "shared_messages", struct.pack("<BQB", 0, 48, 1))
_extension(0x13, "sizes_of_nodes", struct.pack("<BHHH", 0, 65535, 65535, 65535))
_extension(0x14, "family", struct.pack("<B8sHQ", 0, b"NCSAfami", 8, 1 << 20))
_extension(0x14, "multi", struct.pack("<B8sH8s", 0, b"NCSAmult", 8, b"\1\2\3\4\5\6\0\0"))
_extension(0x1A, "unknown", bytes(8))


@case(".weights.h5", ck.ForbiddenContent)
def h5_driver_of_several_files(path: Path) -> None:
    keras(path).close()
    raw = bytearray(path.read_bytes())
    struct.pack_into("<Q", raw, 48, len(raw))
    raw += struct.pack("<B3xL8sQ", 0, 8, b"NCSAfami", 1 << 20)
    struct.pack_into("<Q", raw, 40, len(raw))
    path.write_bytes(raw)


def _superblock(name: str, error: type[ck.CheckpointError], at: int, code: str, value: int) -> None:
    @case(".weights.h5", error, f"h5_superblock_{name}")
    def build(path: Path) -> None:
        def change(raw: bytearray) -> None:
            struct.pack_into(code, raw, at, value)
            seal(raw, 0, 48)

        changed(path, change)


_superblock("open_for_writing", ck.MalformedFile, 11, "<B", 5)
_superblock("behind_user_block", ck.UnsupportedFormat, 12, "<Q", 512)
_superblock("of_four_byte_addresses", ck.UnsupportedFormat, 9, "<B", 4)
_superblock("of_version_9", ck.MalformedFile, 8, "<B", 9)
_superblock("ends_early", ck.MalformedFile, 28, "<Q", 200)
_superblock("root_outside", ck.MalformedFile, 36, "<Q", 2**63)
_superblock("root_is_superblock", ck.MalformedFile, 36, "<Q", 0)


@case(".weights.h5", ck.UnsupportedFormat)
def h5_user_block(path: Path) -> None:
    with h5py.File(path, "w", userblock_size=512) as file:
        file["layers/dense/vars/0"] = np.zeros(3)


def dense(path: Path, link: Any = None) -> None:
    """So many links that they lie in a heap."""
    with h5py.File(path, "w", libver="latest") as file:
        for i in range(40):
            file[f"layer_{i}"] = np.zeros(3)
        if link is not None:
            file["other"] = link


raw_cases(
    "h5_", ".weights.h5",
    ("cache_image", Code, lambda path: cache_image(path)),
    ("superblock_checksum", Bad,
     lambda path: changed(path, lambda raw: raw.__setitem__(44, raw[44] ^ 1))),
    ("dense_external_link", Code, lambda path: dense(path, h5py.ExternalLink("/etc/passwd", "/"))),
    ("dense_soft_link", Code, lambda path: dense(path, h5py.SoftLink("/layer_1"))),
)  # fmt: skip


def _dense(name: str, signature: bytes, change: Callable[[bytearray, int], None]) -> None:
    error = ck.AmbiguousFile if name == "one_object" else ck.MalformedFile

    @case(".weights.h5", error, f"h5_dense_{name}")
    def build(path: Path) -> None:
        dense(path)
        raw = bytearray(path.read_bytes())
        change(raw, raw.index(signature))
        path.write_bytes(raw)


def _one_object(raw: bytearray, at: int) -> None:
    """All records of a leaf are the first."""
    raw[at + 6 : at + 6 + 40 * 11] = raw[at + 6 : at + 17] * 40
    seal(raw, at, 6 + 40 * 11 + 4)


def _table_of_itself(raw: bytearray, at: int) -> None:
    """The table of a heap is a block of itself."""
    heap = raw.index(b"FRHP")
    offset = -(-int.from_bytes(raw[heap + 128 : heap + 130], "little") // 8)
    rows, width = (int.from_bytes(raw[heap + p :][:2], "little") for p in (140, 110))
    struct.pack_into("<Q", raw, at + 13 + offset, at)
    seal(raw, at, 13 + offset + 8 * rows * width + 4)


def _loop(raw: bytearray, at: int) -> None:
    """A tree whose root is an inner node that is its own child."""
    tree = raw.index(b"BTHD")
    struct.pack_into("<H", raw, tree + 12, 1)
    seal(raw, tree, 38)
    raw[at : at + 4] = b"BTIN"
    start = at + 6 + 40 * 11
    raw[start : start + 41 * 9] = struct.pack("<QB", at, 40) * 41
    seal(raw, at, 6 + 40 * 11 + 41 * 9 + 4)


_dense("one_object", b"BTLF", _one_object)
_dense("table_of_itself", b"FHIB", _table_of_itself)
_dense("tree_loop", b"BTLF", _loop)
_dense("checksum", b"BTLF", lambda raw, at: raw.__setitem__(at + 6, raw[at + 6] ^ 1))
