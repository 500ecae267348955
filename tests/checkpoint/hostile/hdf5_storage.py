"""Hostile HDF5 files whose storage, chunks or filters are not what they should be."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Code, case, raw_cases
from tests.checkpoint.hostile.hdf5 import SECRET, W
from tests.checkpoint.hostile.hdf5_changed import changed, seal, seal_header
from tests.checkpoint.hostile.keras_archives import archive
from tests.checkpoint.hostile.keras_weights import keras

# --- storage and filters -----------------------------------------------------------------------


def inflating(size: int) -> bytes:
    """A deflate stream of so many zeros, made without them: a block again and again."""
    state = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = state.compress(bytes(1 << 20)) + state.flush(zlib.Z_FULL_FLUSH)
    check = (size % 65521) << 16 | 1
    return b"\x78\xda" + block * (size >> 20) + b"\x03\x00" + check.to_bytes(4, "big")


def filtered(
    path: Path, chunk: bytes, change: Callable[[Any], None], libver: str = "earliest"
) -> None:
    """A dataset of 1024 bytes whose chunk is what was given."""
    with h5py.File(path, "w", libver=libver) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((1024,))
        change(plist)
        data = file.create_dataset(W, (1024,), "u1", dcpl=plist)
        data.id.write_direct_chunk((0,), chunk)
        file["layers/dense/vars/0"] = np.zeros(3)


def _deflated(times: int) -> Callable[[Any], None]:
    def change(plist: Any) -> None:
        for _ in range(times):
            plist.set_deflate(4)

    return change


@case(".keras", ck.MalformedFile)
def keras_deflate_bomb(path: Path) -> None:
    inside = path.with_name("inside.tmp")
    filtered(inside, inflating(1 << 30), _deflated(1))
    archive(path, members={"model.weights.h5": inside.read_bytes()})
    inside.unlink()


@case(".weights.h5", ck.MalformedFile)
def h5_deflate_bomb_with_checksum(path: Path) -> None:
    def change(plist: Any) -> None:
        plist.set_fletcher32()
        plist.set_deflate(4)

    filtered(path, inflating(1 << 30), change)


@case(".weights.h5", ck.ForbiddenContent)
def h5_shuffled_twice(path: Path) -> None:
    def change(plist: Any) -> None:
        plist.set_shuffle()
        plist.set_shuffle()

    filtered(path, bytes(1024), change)


def lzf(path: Path, chunk: bytes) -> None:
    filtered(path, chunk, lambda plist: plist.set_filter(32000, 1, (4, 261, 1024)))


@case(".weights.h5", ck.ForbiddenContent)
def h5_two_compressors(path: Path) -> None:
    def change(plist: Any) -> None:
        plist.set_deflate(4)
        plist.set_filter(32000, 1, (4, 261, 1024))

    filtered(path, bytes(9), change)


def _patched(
    path: Path, signature: bytes, change: Callable[[bytearray, int], None], **settings: Any
) -> None:
    """A dataset of h5py's, with a change behind a signature."""

    def patch(raw: bytearray) -> None:
        change(raw, raw.index(signature))

    changed(path, patch, **settings)


def _number(name: str, number: int) -> None:
    @case(".weights.h5", ck.ForbiddenContent, f"h5_filter_{name}")
    def build(path: Path) -> None:
        def change(raw: bytearray) -> None:
            at = raw.index(struct.pack("<BBHHH", 2, 1, 1, 1, 1)) + 2
            struct.pack_into("<H", raw, at, number)
            seal_header(raw, raw.rindex(b"OHDR", 0, at))

        changed(path, change, chunks=(7, 11), compression="gzip")


_number("szip", 4)
_number("n_bit", 5)
_number("scale_offset", 6)
_number("reserved", 200)


@case(".weights.h5", ck.ForbiddenContent)
def h5_new_virtual(path: Path) -> None:
    layout = h5py.VirtualLayout((6,), "f4")
    layout[:] = h5py.VirtualSource(SECRET, "x", (6,))
    with h5py.File(path, "w", libver="latest") as file:
        file.create_virtual_dataset("w", layout)


@case(".weights.h5", ck.ForbiddenContent)
def h5_new_external_storage(path: Path) -> None:
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("w", (16,), "u1", external=[(SECRET, 0, 16)])


@case(".weights.h5", ck.ForbiddenContent)
def h5_type_in_another_object(path: Path) -> None:
    with keras(path) as file:
        file["kind"] = np.dtype("f4")
        file["layers/dense/vars"].create_dataset("1", (3,), file["kind"], data=np.zeros(3))
        del file["kind"]


@case(".weights.h5", ck.MalformedFile)
def h5_lost_chunk(path: Path) -> None:
    """Read as its fill value it would be zeros that nobody wrote."""
    with keras(path) as file:
        data = file["layers/dense/vars"].create_dataset("1", (20,), "f4", chunks=(4,))
        data[:16] = 1


@case(".weights.h5", ck.MalformedFile)
def h5_grown_and_never_written(path: Path) -> None:
    with h5py.File(path, "w", libver="latest") as file:
        data = file.create_dataset("w", data=np.ones(20), chunks=(4,), maxshape=(None,))
        data.resize((40,))


def two_places(path: Path, chunks: bool, libver: str) -> None:
    """Two pieces of data at one address."""
    with h5py.File(path, "w", libver=libver) as file:
        if chunks:
            data = file.create_dataset("w", data=np.arange(40, dtype="f8"), chunks=(10,))
            first, second = (data.id.get_chunk_info(i).byte_offset for i in range(2))
        else:
            ones, twos = (file.create_dataset(n, data=np.ones(4)) for n in "ab")
            first, second = ones.id.get_offset(), twos.id.get_offset() - 8
    raw, old = path.read_bytes(), struct.pack("<Q", first) + struct.pack("<Q", 32) * (not chunks)
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, struct.pack("<Q", second) + old[8:]))


raw_cases(
    "h5_", ".weights.h5",
    ("deflate_bomb", Bad, lambda path: filtered(path, inflating(2 << 30), _deflated(1))),
    ("deflate_bomb_in_new_layout", Bad,
     lambda path: filtered(path, inflating(2 << 30), _deflated(1), "latest")),
    ("deflate_bomb_twice", Code,
     lambda path: filtered(path, zlib.compress(inflating(2 << 30), 9), _deflated(2))),
    ("deflate_bomb_thrice", Code,
     lambda path: filtered(path, zlib.compress(zlib.compress(inflating(8 << 30), 9), 9), _deflated(3))),
    ("deflated_too_short", Bad,
     lambda path: filtered(path, zlib.compress(bytes(1000)), _deflated(1))),
    ("deflated_with_more_behind", Bad,
     lambda path: filtered(path, zlib.compress(bytes(1024)) + b"more", _deflated(1))),
    ("chunk_checksum", Bad,
     lambda path: filtered(path, bytes(1024) + b"\1\0\0\0", lambda plist: plist.set_fletcher32())),
    ("lzf_bomb", Bad, lambda path: lzf(path, b"\x00a" + b"\xe0\xff\x00" * 1_000_000)),
    ("lzf_from_before_its_beginning", Bad,
     lambda path: lzf(path, b"\x00a\xff\xff\xff" + b"\xe0\xff\x00" * 4)),
    ("chunks_overlap", Bad, lambda path: two_places(path, True, "earliest")),
    ("datasets_overlap", Bad, lambda path: two_places(path, False, "earliest")),
)  # fmt: skip


@case(".weights.h5", ck.MalformedFile)
def h5_data_over_structure(path: Path) -> None:
    keras(path).close()
    with h5py.File(path) as file:
        at = file["layers/dense/vars/0"].id.get_offset()
    raw = path.read_bytes()
    path.write_bytes(raw.replace(struct.pack("<QQ", at, 24), struct.pack("<QQ", 96, 24)))


def _shape(name: str, error: type[ck.CheckpointError], *sizes: int) -> None:
    @case(".weights.h5", error, f"h5_shape_{name}")
    def build(path: Path) -> None:
        with keras(path) as file:
            file["layers/dense/vars"].create_dataset("1", data=np.zeros((3, 5), "f4"))
        raw = path.read_bytes()
        old = struct.pack("<4Q", 3, 5, 3, 5)
        assert raw.count(old) == 1
        path.write_bytes(raw.replace(old, struct.pack("<4Q", *sizes, *sizes)))


_shape("whose_product_wraps", ck.BudgetExceeded, 2**33, 2**33)
_shape("whose_product_wraps_to_itself", ck.BudgetExceeded, 2**60 + 15, 16)
_shape("of_nothing_times_much", ck.BudgetExceeded, 0, 2**62)
_shape("of_one_more", ck.MalformedFile, 4, 5)
_shape("of_one_less", ck.MalformedFile, 3, 4)


def _array(name: str, signature: bytes, at: int, value: int, size: int, **settings: Any) -> None:
    @case(".weights.h5", ck.MalformedFile, f"h5_chunk_{name}")
    def build(path: Path) -> None:
        def change(raw: bytearray, begin: int) -> None:
            raw[begin + at] = value
            seal(raw, begin, size)

        _patched(path, signature, change, chunks=(3, 7), **settings)


_array("array_pages", b"FAHD", 7, 60, 28)
_array("array_of_many", b"FAHD", 14, 0xFF, 28)
_array("array_entries", b"FAHD", 6, 3, 28)
_array("array_address", b"FAHD", 23, 0x80, 28)
_array("growing_bits", b"EAHD", 7, 255, 72, maxshape=(None, 30))
_array("growing_blocks", b"EAHD", 9, 0, 72, maxshape=(None, 30))
_array("growing_itself", b"EAHD", 60, 48, 72, maxshape=(None, 30))
_array("tree_depth", b"BTHD", 12, 60, 38, maxshape=(None, None))
_array("tree_records", b"BTHD", 24, 0xFF, 38, maxshape=(None, None))
_array("tree_kind", b"BTHD", 5, 11, 38, maxshape=(None, None))


@case(".weights.h5", ck.MalformedFile)
def h5_boolean_of_two(path: Path) -> None:
    with keras(path) as file:
        data = file["layers/dense/vars"].create_dataset("1", data=np.ones(9, bool))
        at = data.id.get_offset()
    raw = bytearray(path.read_bytes())
    raw[at] = 2
    path.write_bytes(raw)


def h5_of_type(path: Path, kind: h5py.h5t.TypeID) -> None:
    """A second variable of a type that h5py has no dtype for."""
    with keras(path) as file:
        space = h5py.h5s.create_simple((3,))
        h5py.h5d.create(file["layers/dense/vars"].id, b"1", kind, space)


@case(".weights.h5", ck.UnsupportedDtype)
def h5_narrow_integers(path: Path) -> None:
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_precision(17)
    h5_of_type(path, kind)


@case(".weights.h5", ck.UnsupportedDtype)
def h5_floats_of_another_bias(path: Path) -> None:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_ebias(100)
    h5_of_type(path, kind)


@case(".weights.h5", ck.MalformedFile)
def h5_compact_of_another_size(path: Path) -> None:
    with keras(path) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        file["layers/dense/vars"].create_dataset("1", (3,), "u1", dcpl=plist)[:] = 7
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"\3\0\3\0\7\7\7") + 2] = 2
    path.write_bytes(raw)


for _name, _chunk, _options in (
    ("in_many_chunks", 1 << 18, {"compression": "gzip"}),  # 60 MiB
    ("in_many_lzf_chunks", 1 << 18, {"compression": "lzf"}),
    ("shuffled_in_one_chunk", 5 << 20, {"compression": "gzip", "shuffle": True}),  # thrice 20 MiB
):

    @case(".weights.h5", ck.BudgetExceeded, f"h5_inflates_{_name}")
    def _inflates(path: Path, chunk: int = _chunk, options: dict[str, Any] = _options) -> None:
        with h5py.File(path, "w") as file:
            count = 5 << 20 if chunk == 5 << 20 else 15 << 20
            file.create_dataset("vars/0", data=np.ones(count, "f"), chunks=(chunk,), **options)


def _many_names(
    path: Path, count: int, chunk: bytes, size: int, change: Callable[[Any], None]
) -> None:
    """A dataset of one chunk that as many names share."""
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((size,))
        change(plist)
        data = file.create_dataset("vars/0", (size,), "u1", dcpl=plist)
        data.id.write_direct_chunk((0,), chunk)
        for i in range(count):
            file[f"layer_{i}/vars/0"] = data


@case(".weights.h5", ck.BudgetExceeded)
def h5_lzf_of_many_names(path: Path) -> None:
    """Every pair of bytes copies three, in a loop of Python."""
    count = 1 << 16
    chunk = b"\0a\0a\0a" + b"\x20\x00" * count

    def change(plist: Any) -> None:
        plist.set_filter(32000, 0, (4, 261, 3 + 3 * count))

    _many_names(path, 200, chunk, 3 + 3 * count, change)


@case(".weights.h5", ck.BudgetExceeded)
def h5_empty_blocks_of_many_names(path: Path) -> None:
    """A chunk of 64 kB after a megabyte of empty blocks, which each name inflates again."""
    deflate, data = zlib.compressobj(9, zlib.DEFLATED, -15), bytes(1 << 16)
    body = b"\0\0\0\xff\xff" * 200_000 + deflate.compress(data) + deflate.flush()
    chunk = b"\x78\xda" + body + struct.pack(">L", zlib.adler32(data))
    _many_names(path, 1200, chunk, len(data), _deflated(1))
