"""Hostile .weights.h5 files, damaged after h5py wrote them or written as h5py allows."""

import struct
from pathlib import Path

import h5py
import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case


def keras(path: Path) -> h5py.File:
    file = h5py.File(path, "w")
    layer = file.create_group("layers/dense/vars")
    layer.attrs["name"] = "out"
    layer["0"] = np.arange(6, dtype="f4").reshape(2, 3)
    return file


@case(".weights.h5")
def sound_keras(path: Path) -> None:
    keras(path).close()


@case(".weights.h5", ck.ForbiddenContent)
def h5_soft_link(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = h5py.SoftLink("/layers/dense/vars/0")


@case(".weights.h5", ck.ForbiddenContent)
def h5_soft_link_loop(path: Path) -> None:
    with keras(path) as file:
        file["layers/loop"] = h5py.SoftLink("/layers/loop")


@case(".weights.h5", ck.ForbiddenContent)
def h5_external_link(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = h5py.ExternalLink("/etc/passwd", "/")


@case(".weights.h5", ck.ForbiddenContent)
def h5_external_storage(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset(
            "1", (16,), "u1", external=[("/etc/hostname", 0, 16)]
        )


@case(".weights.h5", ck.ForbiddenContent)
def h5_virtual(path: Path) -> None:
    layout = h5py.VirtualLayout((6,), "f4")
    layout[:] = h5py.VirtualSource("/tmp/other.h5", "x", (6,))
    with keras(path) as file:
        file["layers/dense/vars"].create_virtual_dataset("1", layout)


def damaged_virtual(path: Path, at: int, byte: int) -> None:
    """One byte of the list of sources of a virtual dataset changed."""
    h5_virtual(path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"GCOL") + at] = byte
    path.write_bytes(raw)


@case(".weights.h5", ck.ForbiddenContent)
def h5_virtual_that_hangs(path: Path) -> None:
    """16 million sources: the library allocates and decodes them where it opens the dataset."""
    damaged_virtual(path, 59, 0xFF)


@case(".weights.h5", ck.ForbiddenContent)
def h5_virtual_that_crashes(path: Path) -> None:
    """2**62 sources: h5py alone ends with a segmentation fault."""
    damaged_virtual(path, 64, 0x40)


@case(".weights.h5", ck.BudgetExceeded)
def h5_shape_bomb(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset("1", (2**20, 2**20), "f4")


@case(".weights.h5", ck.MalformedFile)
def h5_never_written(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset("1", (2**10, 2**10), "f4")


@case(".weights.h5", ck.MalformedFile)
def h5_chunks_never_written(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset(
            "1", (2**13, 2**13), "f4", chunks=(16, 16), compression="gzip"
        )


@case(".weights.h5", ck.BudgetExceeded)
def h5_chunk_bomb(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset(
            "1", (1,), "f4", chunks=(2**29,), maxshape=(None,), compression="gzip"
        )


@case(".weights.h5", ck.ForbiddenContent)
def h5_unknown_filter(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset(
            "1", (6,), "i4", chunks=(6,), scaleoffset=4, data=np.arange(6, dtype="i4")
        )


@case(".weights.h5", ck.ForbiddenContent)
def h5_text(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = "text"


@case(".weights.h5", ck.ForbiddenContent)
def h5_vlen(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset("1", (2,), h5py.vlen_dtype(np.int32))


@case(".weights.h5", ck.ForbiddenContent)
def h5_reference(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset("1", (2,), h5py.ref_dtype)


@case(".weights.h5", ck.ForbiddenContent)
def h5_compound(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = np.zeros(3, [("a", "f4"), ("b", "i4")])


@case(".weights.h5", ck.ForbiddenContent)
def h5_enumeration(path: Path) -> None:
    with keras(path) as file:
        kind = h5py.enum_dtype({"RED": 0, "BLUE": 1, "GREEN": 2}, "i4")
        file["layers/dense/vars"].create_dataset("1", (2,), kind, data=np.zeros(2, "i4"))


@case(".weights.h5", ck.ForbiddenContent)
def h5_named_type(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/kind"] = np.dtype("f4")


@case(".weights.h5", ck.MalformedFile)
def h5_null(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = h5py.Empty("f4")


@case(".weights.h5", ck.UnsupportedDtype)
def h5_bfloat16_without_attribute(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = np.zeros(3, "V2")


@case(".weights.h5", ck.AmbiguousFile)
def h5_cycle(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/again"] = file["layers"]


@case(".weights.h5", ck.BudgetExceeded)
def h5_deep(path: Path) -> None:
    with keras(path) as file:
        file.create_group("/".join("a" * 80))


@case(".weights.h5", ck.MalformedFile)
def h5_long_attribute(path: Path) -> None:
    with keras(path) as file:
        del file["layers/dense/vars"].attrs["name"]
        file["layers/dense/vars"].attrs["name"] = np.bytes_(b"x" * 60_000)


@case(".weights.h5", ck.MalformedFile)
def h5_attribute_not_text(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].attrs["name"] = np.arange(4)


def text_of_attribute(path: Path, length: int, heap: int = 0, index: int = 1) -> bytearray:
    """A sound file in which the `name` says that it lies elsewhere."""
    keras(path).close()
    raw = bytearray(path.read_bytes())
    at = raw.index(struct.pack("<LQL", 3, raw.index(b"GCOL"), 1))
    struct.pack_into("<LQL", raw, at, length, raw.index(b"GCOL") + heap, index)
    return raw


@case(".weights.h5", ck.MalformedFile)
def h5_attribute_of_4_gib(path: Path) -> None:
    path.write_bytes(text_of_attribute(path, 2**32 - 1))


@case(".weights.h5", ck.MalformedFile)
def h5_attribute_beyond_file(path: Path) -> None:
    path.write_bytes(text_of_attribute(path, 3, heap=2**40))


@case(".weights.h5", ck.MalformedFile)
def h5_attribute_not_in_a_heap(path: Path) -> None:
    path.write_bytes(text_of_attribute(path, 3, heap=-8))


@case(".weights.h5", ck.MalformedFile)
def h5_heap_without_end(path: Path) -> None:
    """Free space of length zero: the HDF5 library never returns."""
    raw = text_of_attribute(path, 3, index=7)
    heap = raw.index(b"GCOL")
    struct.pack_into("<HHLQ", raw, heap + 40, 0, 0, 0, 0)
    path.write_bytes(raw)


@case(".weights.h5", ck.MalformedFile)
def h5_free_list_loop(path: Path) -> None:
    """The free blocks of a heap of names form a ring: the HDF5 library never returns."""
    keras(path).close()
    raw = bytearray(path.read_bytes())
    heap = raw.rindex(b"HEAP")
    free, data = struct.unpack_from("<QQ", raw, heap + 16)
    struct.pack_into("<Q", raw, data + free, free)
    path.write_bytes(raw)


@case(".weights.h5", ck.MalformedFile)
def h5_tree_loop(path: Path) -> None:
    """A node of a tree that is its own child."""
    keras(path).close()
    raw = bytearray(path.read_bytes())
    tree = raw.rindex(b"TREE")
    raw[tree + 5] = 1
    struct.pack_into("<Q", raw, tree + 32, tree)
    path.write_bytes(raw)


@case(".weights.h5", ck.MalformedFile)
def h5_chunk_tree_loop(path: Path) -> None:
    with keras(path) as file:
        data = np.arange(64, dtype="f4")
        file["layers/dense/vars"].create_dataset("1", data=data, chunks=(4,))
    raw = bytearray(path.read_bytes())
    tree = raw.index(b"TREE\x01")
    raw[tree + 5] = 1
    struct.pack_into("<Q", raw, tree + 24 + 24, tree)
    path.write_bytes(raw)


@case(".weights.h5", ck.MalformedFile)
def h5_continuation_loop(path: Path) -> None:
    """An object header whose last message continues at the header itself."""
    raw = text_of_attribute(path, 3)
    at = raw.index(b"name\0\0\0\0") - 16  # the message of the attribute
    header = raw.rindex(b"\x01\x00", 0, at - 8)
    struct.pack_into("<HHLQQ", raw, at, 0x10, 16, 0, header + 16, at + 24 - header - 16)
    path.write_bytes(raw)


@case(".weights.h5", ck.IncompleteCheckpoint)
def h5_gap(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/2"] = np.zeros(3, "f4")


@case(".weights.h5", ck.UnsupportedFormat)
def h5_legacy(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = "2.13.1"
        file["model_weights/dense/dense/kernel:0"] = np.zeros((2, 3), "f4")


@case(".weights.h5", ck.MalformedFile)
def h5_truncated(path: Path) -> None:
    keras(path).close()
    path.write_bytes(path.read_bytes()[:-100])


@case(".weights.h5", ck.MalformedFile)
def h5_magic_alone() -> bytes:
    return b"\x89HDF\r\n\x1a\n" + bytes(20)
