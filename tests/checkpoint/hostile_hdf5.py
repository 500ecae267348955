"""Hostile HDF5 files below what h5py writes: structures that overlap, loop, lie or lead elsewhere."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from jaxmha.converters import checkpoint as ck
from jaxmha.converters.checkpoint.hdf5_checksum import lookup3
from tests.checkpoint.hostile import case, keras
from tests.checkpoint.hostile_composed import archive

NOWHERE = 2**64 - 1
W = "layers/dense/vars/1"
SECRET = "/etc/passwd"


# --- files by hand -----------------------------------------------------------------------------


class Raw:
    """A file of the oldest version, structure by structure; trees have `most` children."""

    def __init__(self, most: int = 32) -> None:
        self.bytes, self.most = bytearray(96), most

    def put(self, data: bytes) -> int:
        """Appends a structure; its address."""
        self.bytes += bytes(-len(self.bytes) % 8)
        self.bytes += data
        return len(self.bytes) - len(data)

    def heap(self, names: bytes, free: int = 1) -> int:
        data = self.put(names)
        return self.put(struct.pack("<4s4xQQQ", b"HEAP", len(names), free, data))

    def tree(self, children: list[int], keys: list[int] | None = None) -> int:
        head = struct.pack("<4sBBHQQ", b"TREE", 0, 0, len(children), NOWHERE, NOWHERE)
        pairs = zip(children, keys or [0] * len(children), strict=True)
        node = head + bytes(8) + b"".join(struct.pack("<QQ", *pair) for pair in pairs)
        return self.put(node.ljust(32 + 16 * self.most, b"\0"))

    def names(self, entries: list[tuple[int, int]]) -> int:
        rows = b"".join(struct.pack("<QQL20x", name, target, 0) for name, target in entries)
        node = struct.pack("<4sBxH", b"SNOD", 1, len(entries)) + rows
        return self.put(node.ljust(8 + 40 * 8, b"\0"))

    def folder(self, names: bytes, entries: list[tuple[int, int]], *more: tuple[int, bytes]) -> int:
        """A group; its entries say where a name begins and what it leads to."""
        entries = [(place + 8, target) for place, target in entries]  # at 0 is the empty name
        parts = [entries[at : at + 8] for at in range(0, len(entries), 8)]
        tree = self.tree([self.names(part) for part in parts], [part[-1][0] for part in parts])
        return self.group(tree, self.heap(bytes(8) + names), *more)

    def header(self, *messages: tuple[int, bytes]) -> int:
        return self.put(header(*messages))

    def group(self, tree: int, heap: int, *more: tuple[int, bytes]) -> int:
        return self.header((0x11, struct.pack("<QQ", tree, heap)), *more)

    def write(self, path: Path, root: int) -> None:
        raw = self.bytes
        raw[:96] = struct.pack(
            "<8s8BHHL4QQQL20x",
            b"\x89HDF\r\n\x1a\n", *(0, 0, 0, 0, 0, 8, 8, 0), 4, self.most // 2, 0,
            *(0, NOWHERE, len(raw), NOWHERE), 0, root, 0,
        )  # fmt: skip
        path.write_bytes(raw)


def header(*messages: tuple[int, bytes]) -> bytes:
    padded = [(kind, body + bytes(-len(body) % 8)) for kind, body in messages]
    body = b"".join(struct.pack("<HHB3x", kind, len(data), 0) + data for kind, data in padded)
    return struct.pack("<BxHLL4x", 1, len(messages), 1, len(body)) + body


def numbered(count: int, tail: str = "") -> tuple[bytes, list[int]]:
    """Names in order, and where each begins."""
    names = [f"{i:05}{tail}".encode() + b"\0" for i in range(count)]
    return b"".join(names), [i * len(names[0]) for i in range(count)]


# --- structures that overlap: time and memory without end ---------------------------------------


@case(".weights.h5", ck.MalformedFile)
def h5_quadratic_names(path: Path) -> None:
    """20 000 nodes of 65 535 names, each 40 bytes behind the last."""
    raw, cell = Raw(20_000), struct.pack("<4sBxHQQL12x", b"SNOD", 1, 65535, 0, 0, 0)
    heap = raw.heap(bytes(8))
    first = raw.put(cell * (20_000 + 65_536))
    raw.write(path, raw.group(raw.tree([first + 40 * i for i in range(20_000)]), heap))


@case(".weights.h5", ck.MalformedFile)
def h5_leaf_bomb(path: Path) -> None:
    """30 000 nodes of 65 535 children, each 32 bytes behind the last."""
    raw = Raw(30_000)
    heap = raw.heap(bytes(8))
    first = raw.put(struct.pack("<4sBBH24x", b"TREE", 0, 0, 65535) * (30_000 + 32_800))
    tree = raw.tree([first + 32 * i for i in range(30_000)])
    raw.bytes[tree + 5] = 1
    raw.write(path, raw.group(tree, heap))


def nested_trees(path: Path, level: int) -> None:
    raw = Raw(64)
    heap = raw.heap(bytes(8))
    tree = raw.tree([0] * 64)
    raw.bytes[tree + 5] = level
    for i in range(64):
        struct.pack_into("<Q", raw.bytes, tree + 32 + 16 * i, tree)
    raw.write(path, raw.group(tree, heap))


@case(".weights.h5", ck.MalformedFile)
def h5_tree_of_itself(path: Path) -> None:
    nested_trees(path, 1)


@case(".weights.h5", ck.MalformedFile)
def h5_tree_of_level_255(path: Path) -> None:
    nested_trees(path, 255)


def shared(path: Path, groups: int, free: int) -> None:
    """Groups that share one heap, whose free blocks form a list."""
    raw = Raw(max(32, groups // 4))
    blocks = b"".join(
        struct.pack("<QQ", 16 * (i + 1) if i + 1 < free else 1, 16) for i in range(free)
    )
    heap, tree = raw.heap(blocks, 0), raw.tree([])
    children = [raw.group(tree, heap) for _ in range(groups)]
    names, places = numbered(groups)
    raw.write(path, raw.folder(names, list(zip(places, children, strict=True))))


@case(".weights.h5", ck.MalformedFile)
def h5_many_heaps(path: Path) -> None:
    shared(path, 3000, 65_000)


@case(".weights.h5", ck.MalformedFile)
def h5_shared_heap(path: Path) -> None:
    shared(path, 2, 1)


def texts(path: Path, groups: int, objects: int) -> None:
    """Layer names, each of which is the last of a long heap."""
    raw = Raw(max(32, groups // 4))
    cells = b"".join(struct.pack("<HH4xQ8s", i, 1, 3, b"out") for i in range(1, objects + 1))
    collection = raw.put(struct.pack("<4sB3xQ", b"GCOL", 1, 32 + len(cells)) + cells + bytes(16))
    text = struct.pack("<4BL4BLHH4x", 0x19, 1, 0, 0, 16, 0x10, 0, 0, 0, 1, 0, 8)
    value = struct.pack("<LQL", 3, collection, objects)
    name = struct.pack("<BxHHH8s", 1, 5, 24, 8, b"name") + text + b"\1\0\0\0\0\0\0\0" + value
    children = []
    for _ in range(groups):
        inner = raw.group(raw.tree([]), raw.heap(bytes(8)), (0x0C, name))
        children.append(raw.folder(b"vars\0\0\0\0", [(0, inner)]))
    names, places = numbered(groups)
    raw.write(path, raw.folder(names, list(zip(places, children, strict=True))))


@case(".weights.h5", ck.MalformedFile)
def h5_gcol_chain(path: Path) -> None:
    texts(path, 400, 65_500)


@case(".weights.h5", ck.MalformedFile)
def h5_text_of_two_layers(path: Path) -> None:
    texts(path, 2, 1)


def continued(path: Path, blocks: int, size: int, objects: int = 1) -> None:
    """Headers whose continuations are one block of empty messages."""
    raw = Raw()
    block = raw.put(struct.pack("<HHB3x", 0, 0, 0) * (size // 8))
    more = [(0x10, struct.pack("<QQ", block, size))] * blocks
    children = [raw.group(raw.tree([]), raw.heap(bytes(8)), *more) for _ in range(objects)]
    for at in children:  # the count of messages
        struct.pack_into("<H", raw.bytes, at + 2, min(65535, 1 + blocks + blocks * size // 8))
    names, places = numbered(objects)
    raw.write(path, raw.folder(names, list(zip(places, children, strict=True))))


@case(".weights.h5", ck.MalformedFile)
def h5_header_bomb(path: Path) -> None:
    continued(path, 63, 1 << 20, 4)


@case(".weights.h5", ck.MalformedFile)
def h5_two_headers_continue_in_one_block(path: Path) -> None:
    continued(path, 1, 8, 2)


def header_of_nothing(path: Path, messages: int) -> None:
    """A header of empty messages, each of which is there once."""
    raw = Raw()
    block = raw.put(struct.pack("<HHB3x", 0, 0, 0) * messages)
    root = raw.group(
        raw.tree([]), raw.heap(bytes(8)), (0x10, struct.pack("<QQ", block, 8 * messages))
    )
    struct.pack_into("<H", raw.bytes, root + 2, messages + 2)
    raw.write(path, root)


@case(".weights.h5", ck.MalformedFile)
def h5_many_attributes(path: Path) -> None:
    raw = Raw()
    name = struct.pack("<BxHHH8s", 1, 5, 8, 8, b"name") + bytes(16)
    root = raw.group(raw.tree([]), raw.heap(bytes(8)), *[(0x0C, name)] * 3_000)
    raw.write(path, root)


@case(".weights.h5", ck.MalformedFile)
def h5_names_that_share_their_tail(path: Path) -> None:
    """Each name is the last but one letter of the name before."""
    raw = Raw()
    letters = bytes(range(97, 97 + 26))
    empty = [raw.group(raw.tree([]), raw.heap(bytes(8))) for _ in letters]
    raw.write(path, raw.folder(letters + b"\0" * 6, list(enumerate(empty))))


@case(".weights.h5", ck.MalformedFile)
def h5_names_out_of_order(path: Path) -> None:
    raw = Raw()
    empty = [raw.group(raw.tree([]), raw.heap(bytes(8))) for _ in range(2)]
    entries = [(8, empty[0]), (0, empty[1])]
    raw.write(path, raw.folder(b"a\0\0\0\0\0\0\0b\0\0\0\0\0\0\0", entries))


@case(".weights.h5", ck.MalformedFile)
def h5_root_is_a_dataset(path: Path) -> None:
    raw = Raw()
    kind = struct.pack("<B3BLHH", 0x10, 8, 0, 0, 4, 0, 32)
    layout = struct.pack("<BBQQ", 3, 1, 8, 4)
    raw.write(path, raw.header((1, b"\1\0\0\0\0\0\0\0"), (3, kind), (8, layout)))


@case(".weights.h5", ck.MalformedFile)
def h5_group_and_dataset(path: Path) -> None:
    raw = Raw()
    layout = struct.pack("<BBQQ", 3, 1, 8, 4)
    raw.write(path, raw.group(raw.tree([]), raw.heap(bytes(8)), (8, layout)))


@case(".weights.h5", ck.MalformedFile)
def h5_two_symbol_tables(path: Path) -> None:
    raw = Raw()
    table = (0x11, struct.pack("<QQ", raw.tree([]), raw.heap(bytes(8))))
    raw.write(path, raw.header(table, table))


@case(".weights.h5", ck.ForbiddenContent)
def h5_unknown_message(path: Path) -> None:
    raw = Raw()
    raw.write(path, raw.group(raw.tree([]), raw.heap(bytes(8)), (0x0F, bytes(16))))


@case(".weights.h5", ck.ForbiddenContent)
def h5_cached_soft_link(path: Path) -> None:
    raw = Raw()
    node = raw.names([(0, NOWHERE)])
    struct.pack_into("<L", raw.bytes, node + 8 + 16, 2)
    raw.write(path, raw.group(raw.tree([node]), raw.heap(b"a\0\0\0\0\0\0\0")))


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


@case(".weights.h5", ck.ForbiddenContent)
def h5_cache_image(path: Path) -> None:
    cache_image(path)


@case(".keras", ck.ForbiddenContent)
def keras_cache_image(path: Path) -> None:
    inside = path.with_name("inside.tmp")
    cache_image(inside)
    archive(path, members={"model.weights.h5": inside.read_bytes()})
    inside.unlink()


def _extension(kind: int, what: str, body: bytes) -> None:
    def build(path: Path) -> None:
        extended(path, kind, body)

    build.__name__ = f"h5_superblock_{what}"
    case(".weights.h5", ck.ForbiddenContent)(build)


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
    def build(path: Path) -> None:
        def change(raw: bytearray) -> None:
            struct.pack_into(code, raw, at, value)
            seal(raw, 0, 48)

        changed(path, change)

    build.__name__ = f"h5_superblock_{name}"
    case(".weights.h5", error)(build)


_superblock("open_for_writing", ck.MalformedFile, 11, "<B", 5)
_superblock("behind_user_block", ck.UnsupportedFormat, 12, "<Q", 512)
_superblock("of_four_byte_addresses", ck.UnsupportedFormat, 9, "<B", 4)
_superblock("of_version_9", ck.MalformedFile, 8, "<B", 9)
_superblock("ends_early", ck.MalformedFile, 28, "<Q", 200)
_superblock("root_outside", ck.MalformedFile, 36, "<Q", 2**63)
_superblock("root_is_superblock", ck.MalformedFile, 36, "<Q", 0)


@case(".weights.h5", ck.MalformedFile)
def h5_superblock_checksum(path: Path) -> None:
    changed(path, lambda raw: raw.__setitem__(44, raw[44] ^ 1))


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


@case(".weights.h5", ck.ForbiddenContent)
def h5_dense_external_link(path: Path) -> None:
    dense(path, h5py.ExternalLink("/etc/passwd", "/"))


@case(".weights.h5", ck.ForbiddenContent)
def h5_dense_soft_link(path: Path) -> None:
    dense(path, h5py.SoftLink("/layer_1"))


def _dense(name: str, signature: bytes, change: Callable[[bytearray, int], None]) -> None:
    def build(path: Path) -> None:
        dense(path)
        raw = bytearray(path.read_bytes())
        change(raw, raw.index(signature))
        path.write_bytes(raw)

    build.__name__ = f"h5_dense_{name}"
    error = ck.AmbiguousFile if name == "one_object" else ck.MalformedFile
    case(".weights.h5", error)(build)


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


@case(".weights.h5", ck.MalformedFile)
def h5_deflate_bomb(path: Path) -> None:
    filtered(path, inflating(2 << 30), _deflated(1))


@case(".weights.h5", ck.MalformedFile)
def h5_deflate_bomb_in_new_layout(path: Path) -> None:
    filtered(path, inflating(2 << 30), _deflated(1), "latest")


@case(".weights.h5", ck.ForbiddenContent)
def h5_deflate_bomb_twice(path: Path) -> None:
    filtered(path, zlib.compress(inflating(2 << 30), 9), _deflated(2))


@case(".weights.h5", ck.ForbiddenContent)
def h5_deflate_bomb_thrice(path: Path) -> None:
    filtered(path, zlib.compress(zlib.compress(inflating(8 << 30), 9), 9), _deflated(3))


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


@case(".weights.h5", ck.MalformedFile)
def h5_deflated_too_short(path: Path) -> None:
    filtered(path, zlib.compress(bytes(1000)), _deflated(1))


@case(".weights.h5", ck.MalformedFile)
def h5_deflated_with_more_behind(path: Path) -> None:
    filtered(path, zlib.compress(bytes(1024)) + b"more", _deflated(1))


@case(".weights.h5", ck.MalformedFile)
def h5_chunk_checksum(path: Path) -> None:
    filtered(path, bytes(1024) + b"\1\0\0\0", lambda plist: plist.set_fletcher32())


@case(".weights.h5", ck.ForbiddenContent)
def h5_shuffled_twice(path: Path) -> None:
    def change(plist: Any) -> None:
        plist.set_shuffle()
        plist.set_shuffle()

    filtered(path, bytes(1024), change)


def lzf(path: Path, chunk: bytes) -> None:
    filtered(path, chunk, lambda plist: plist.set_filter(32000, 1, (4, 261, 1024)))


@case(".weights.h5", ck.MalformedFile)
def h5_lzf_bomb(path: Path) -> None:
    lzf(path, b"\x00a" + b"\xe0\xff\x00" * 1_000_000)


@case(".weights.h5", ck.MalformedFile)
def h5_lzf_from_before_its_beginning(path: Path) -> None:
    lzf(path, b"\x00a\xff\xff\xff" + b"\xe0\xff\x00" * 4)


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
    def build(path: Path) -> None:
        def change(raw: bytearray) -> None:
            at = raw.index(struct.pack("<BBHHH", 2, 1, 1, 1, 1)) + 2
            struct.pack_into("<H", raw, at, number)
            seal_header(raw, raw.rindex(b"OHDR", 0, at))

        changed(path, change, chunks=(7, 11), compression="gzip")

    build.__name__ = f"h5_filter_{name}"
    case(".weights.h5", ck.ForbiddenContent)(build)


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


@case(".weights.h5", ck.MalformedFile)
def h5_chunks_overlap(path: Path) -> None:
    two_places(path, True, "earliest")


@case(".weights.h5", ck.MalformedFile)
def h5_datasets_overlap(path: Path) -> None:
    two_places(path, False, "earliest")


@case(".weights.h5", ck.MalformedFile)
def h5_data_over_structure(path: Path) -> None:
    keras(path).close()
    with h5py.File(path) as file:
        at = file["layers/dense/vars/0"].id.get_offset()
    raw = path.read_bytes()
    path.write_bytes(raw.replace(struct.pack("<QQ", at, 24), struct.pack("<QQ", 96, 24)))


def _shape(name: str, error: type[ck.CheckpointError], *sizes: int) -> None:
    def build(path: Path) -> None:
        with keras(path) as file:
            file["layers/dense/vars"].create_dataset("1", data=np.zeros((3, 5), "f4"))
        raw = path.read_bytes()
        old = struct.pack("<4Q", 3, 5, 3, 5)
        assert raw.count(old) == 1
        path.write_bytes(raw.replace(old, struct.pack("<4Q", *sizes, *sizes)))

    build.__name__ = f"h5_shape_{name}"
    case(".weights.h5", error)(build)


_shape("whose_product_wraps", ck.BudgetExceeded, 2**33, 2**33)
_shape("whose_product_wraps_to_itself", ck.BudgetExceeded, 2**60 + 15, 16)
_shape("of_nothing_times_much", ck.BudgetExceeded, 0, 2**62)
_shape("of_one_more", ck.MalformedFile, 4, 5)
_shape("of_one_less", ck.MalformedFile, 3, 4)


def _array(name: str, signature: bytes, at: int, value: int, size: int, **settings: Any) -> None:
    def build(path: Path) -> None:
        def change(raw: bytearray, begin: int) -> None:
            raw[begin + at] = value
            seal(raw, begin, size)

        _patched(path, signature, change, chunks=(3, 7), **settings)

    build.__name__ = f"h5_chunk_{name}"
    case(".weights.h5", ck.MalformedFile)(build)


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


@case(".weights.h5", ck.UnsupportedDtype)
def h5_narrow_integers(path: Path) -> None:
    with keras(path) as file:
        kind = h5py.h5t.STD_I32LE.copy()
        kind.set_precision(17)
        space = h5py.h5s.create_simple((3,))
        h5py.h5d.create(file["layers/dense/vars"].id, b"1", kind, space)


@case(".weights.h5", ck.UnsupportedDtype)
def h5_floats_of_another_bias(path: Path) -> None:
    with keras(path) as file:
        kind = h5py.h5t.IEEE_F32LE.copy()
        kind.set_ebias(100)
        space = h5py.h5s.create_simple((3,))
        h5py.h5d.create(file["layers/dense/vars"].id, b"1", kind, space)


@case(".weights.h5", ck.MalformedFile)
def h5_compact_of_another_size(path: Path) -> None:
    with keras(path) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        file["layers/dense/vars"].create_dataset("1", (3,), "u1", dcpl=plist)[:] = 7
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"\3\0\3\0\7\7\7") + 2] = 2
    path.write_bytes(raw)
