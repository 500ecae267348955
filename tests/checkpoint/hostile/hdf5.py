"""Hostile HDF5 files below what h5py writes: structures that overlap, loop, lie or lead elsewhere."""

import struct
from pathlib import Path

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, case, raw_cases

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


raw_cases(
    "h5_", ".weights.h5",
    ("tree_of_itself", Bad, lambda path: nested_trees(path, 1)),
    ("tree_of_level_255", Bad, lambda path: nested_trees(path, 255)),
    ("many_heaps", Bad, lambda path: shared(path, 3000, 6_500)),
    ("shared_heap", Bad, lambda path: shared(path, 2, 1)),
    ("gcol_chain", Bad, lambda path: texts(path, 400, 6_500)),
    ("text_of_two_layers", Bad, lambda path: texts(path, 2, 1)),
    ("header_bomb", Bad, lambda path: continued(path, 63, 1 << 20, 4)),
    ("two_headers_continue_in_one_block", Bad, lambda path: continued(path, 1, 8, 2)),
)  # fmt: skip


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
