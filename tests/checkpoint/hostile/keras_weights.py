"""Hostile .weights.h5 files, damaged after h5py wrote them or written as h5py allows."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Big, Code, Gone, case, raw_cases


def keras(path: Path) -> h5py.File:
    file = h5py.File(path, "w")
    layer = file.create_group("layers/dense/vars")
    layer.attrs["name"] = "out"
    layer["0"] = np.arange(6, dtype="f4").reshape(2, 3)
    return file


def having(value: object, key: str = "vars/1") -> Callable[[Path], None]:
    """Another entry in the layer."""

    def build(path: Path) -> None:
        with keras(path) as file:
            file[f"layers/dense/{key}"] = value

    return build


def made(shape: tuple[int, ...], kind: Any, **options: Any) -> Callable[[Path], None]:
    """Another dataset in the layer, made with options of h5py."""

    def build(path: Path) -> None:
        with keras(path) as file:
            file["layers/dense/vars"].create_dataset("1", shape, kind, **options)

    return build


def text_of_attribute(path: Path, length: int, heap: int = 0, index: int = 1) -> bytearray:
    """A sound file in which the `name` says that it lies elsewhere."""
    keras(path).close()
    raw = bytearray(path.read_bytes())
    at = raw.index(struct.pack("<LQL", 3, raw.index(b"GCOL"), 1))
    struct.pack_into("<LQL", raw, at, length, raw.index(b"GCOL") + heap, index)
    return raw


def attribute(*place: int) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(text_of_attribute(path, *place))


PACKED = {"compression": "gzip"}
COLOURS = h5py.enum_dtype({"RED": 0, "BLUE": 1, "GREEN": 2}, "i4")
raw_cases(
    "h5_", ".weights.h5",
    ("soft_link", Code, having(h5py.SoftLink("/layers/dense/vars/0"))),
    ("soft_link_loop", Code, having(h5py.SoftLink("/layers/dense/loop"), "loop")),
    ("external_link", Code, having(h5py.ExternalLink("/etc/passwd", "/"))),
    ("external_storage", Code, made((16,), "u1", external=[("/etc/hostname", 0, 16)])),
    ("shape_bomb", Big, made((2**20, 2**20), "f4")),
    ("never_written", Bad, made((2**10, 2**10), "f4")),
    ("chunks_never_written", Bad, made((2**13, 2**13), "f4", chunks=(16, 16), **PACKED)),
    ("chunk_bomb", Big, made((1,), "f4", chunks=(2**29,), maxshape=(None,), **PACKED)),
    ("unknown_filter", Code, made((6,), "i4", chunks=(6,), scaleoffset=4, data=np.arange(6))),
    ("text", Code, having("text")),
    ("vlen", Code, made((2,), h5py.vlen_dtype(np.int32))),
    ("reference", Code, made((2,), h5py.ref_dtype)),
    ("compound", Code, having(np.zeros(3, [("a", "f4"), ("b", "i4")]))),
    ("enumeration", Code, made((2,), COLOURS, data=np.zeros(2, "i4"))),
    ("named_type", Code, having(np.dtype("f4"), "kind")),
    ("null", Bad, having(h5py.Empty("f4"))),
    ("bfloat16_without_attribute", ck.UnsupportedDtype, having(np.zeros(3, "V2"))),
    ("gap", Gone, having(np.zeros(3, "f4"), "vars/2")),
    ("attribute_of_4_gib", Bad, attribute(2**32 - 1)),
    ("attribute_beyond_file", Bad, attribute(3, 2**40)),
    ("attribute_not_in_a_heap", Bad, attribute(3, -8)),
    ("magic_alone", Bad, b"\x89HDF\r\n\x1a\n" + bytes(20)),
)  # fmt: skip


@case(".weights.h5")
def sound_keras(path: Path) -> None:
    keras(path).close()


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


raw_cases(
    "h5_", ".weights.h5",
    # 16 million sources: the library allocates and decodes them where it opens the dataset.
    ("virtual_that_hangs", Code, lambda path: damaged_virtual(path, 59, 0xFF)),
    # 2**62 sources: h5py alone ends with a segmentation fault.
    ("virtual_that_crashes", Code, lambda path: damaged_virtual(path, 64, 0x40)),
)  # fmt: skip


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


@case(".weights.h5", ck.UnsupportedFormat)
def h5_legacy(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = "2.13.1"
        file["model_weights/dense/dense/kernel:0"] = np.zeros((2, 3), "f4")


@case(".weights.h5", ck.MalformedFile)
def h5_truncated(path: Path) -> None:
    keras(path).close()
    path.write_bytes(path.read_bytes()[:-100])
