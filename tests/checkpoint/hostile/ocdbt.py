"""Hostile databases of tensorstore (OCDBT): nodes that share, loop, inflate or lead outside."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Big, case, raw_cases
from tests.checkpoint.hostile.indexes import W
from tests.checkpoint.hostile.orbax_folders import crc32c, orbax

FILE = "d/0"
NODE, MANIFEST = bytes.fromhex("0cdb20de"), bytes.fromhex("0cdb3a2a")
UUID, NEVER = b"u" * 16, b"\xff" * 9 + b"\x01"


def varint(n: int) -> bytes:
    out = b""
    while n >= 0x80:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


def varints(*ns: int) -> bytes:
    return b"".join(map(varint, ns))


def checksum(data: bytes) -> bytes:
    return crc32c(data).to_bytes(4, "little")


def zstd(*blocks: bytes, last: bytes = b"") -> bytes:
    """A frame of zstd of stored blocks, and of blocks of one byte that is repeated."""
    return bytes.fromhex("28b52ffd0058") + b"".join(blocks) + last


def stored(data: bytes, last: bool = False) -> bytes:
    return (len(data) << 3 | last).to_bytes(3, "little") + data


def repeated(byte: bytes, count: int) -> bytes:
    """Blocks of at most 128 kB."""
    out, most = b"", 128 << 10
    while count:
        size = min(count, most)
        out, count = out + (size << 3 | 2).to_bytes(3, "little") + byte, count - size
    return out


def frame(magic: bytes, inside: bytes, compression: int = 0, version: int = 0) -> bytes:
    head = struct.pack("<4sQBB", magic, 14 + len(inside) + 4, version, compression) + inside
    return head + checksum(head)


def table(*paths: bytes, base: int = 0) -> bytes:
    """The files that a node names, none sharing what is before."""
    count = len(paths)
    lengths = varints(count, *[0] * (count - 1), *map(len, paths), *[base] * count)
    return lengths + b"".join(paths)


def leaf(pairs: dict[bytes, bytes], paths: bytes = b"\0") -> bytes:
    """The content of a node of values."""
    n = len(pairs)
    lengths = varints(n, *[0] * (n - 1), *map(len, pairs))
    values = varints(*map(len, pairs.values())) + bytes(n)  # lengths, all within the node
    return b"\0" + paths + lengths + b"".join(pairs) + values + b"".join(pairs.values())


def inner(
    children: list[tuple[bytes, int, int]], height: int = 1, path: bytes = b"d/0", shared: int = 0
) -> bytes:
    """The content of a node of nodes: key, offset and length of each."""
    n = len(children)
    keys, offsets, sizes = zip(*children, strict=True)
    parts = [
        bytes([height]) + table(path),
        varints(n, *[0] * (n - 1), *map(len, keys), *[shared] * n),
        b"".join(keys),
        varints(*[0] * n, *offsets, *sizes, *[1] * n, *[1] * n, *[0] * n),
    ]
    return b"".join(parts)


def manifest(
    offset: int, size: int, height: int = 0, path: bytes = b"d/0", paths: bytes = b"", kind: int = 0
) -> bytes:
    """The content of a manifest of one version, whose root is in the first file."""
    config = UUID + varints(kind, 100, 8 << 20) + b"\4" + b"\0"
    # number of versions; generation, height, file, offset, length, keys, tree, values, time
    version = varints(1, 1) + bytes([height]) + varints(0, offset, size, 1, 1, 0) + bytes(8)
    return config + (paths or table(path)) + version + varints(0)


def database(path: Path, nodes: list[bytes], root: bytes) -> None:
    """A folder of one data file of nodes, and a manifest."""
    orbax(path)
    for name in ("w/.zarray", "w/0.0"):
        (path / name).unlink()
    (path / "w").rmdir()
    (path / "d").mkdir()
    (path / FILE).write_bytes(b"".join(nodes))
    (path / "manifest.ocdbt").write_bytes(frame(MANIFEST, root))


def array() -> dict[bytes, bytes]:
    """The files of a sound database."""
    document = {
        "zarr_format": 2, "shape": [2, 3], "chunks": [2, 3], "dtype": "<f4", "compressor": None,
        "filters": None, "fill_value": None, "order": "C", "dimension_separator": ".",
    }  # fmt: skip
    return {b"w/.zarray": json.dumps(document).encode(), b"w/0.0": W.tobytes()}


def one_node(path: Path, inside: bytes, compression: int = 0, height: int = 0) -> None:
    node = frame(NODE, inside, compression)
    database(path, [node], manifest(0, len(node), height))


@case(".orbax")
def sound_ocdbt_by_hand(path: Path) -> None:
    one_node(path, leaf(array()))


# --- nodes of nodes ------------------------------------------------------------------------------


@case(".orbax", ck.MalformedFile)
def ocdbt_billion_laughs(path: Path) -> None:
    """Thirty nodes, each of the one before twice."""
    nodes = [frame(NODE, leaf(array()))]
    at = 0
    for height in range(1, 30):
        children = [(b"a", at, len(nodes[-1])), (b"b", at, len(nodes[-1]))]
        at += len(nodes[-1])
        nodes.append(frame(NODE, inner(children, height)))
    database(path, nodes, manifest(at, len(nodes[-1]), 29))


@case(".orbax", ck.MalformedFile)
def ocdbt_node_holds_itself(path: Path) -> None:
    size = len(frame(NODE, inner([(b"a", 0, 100)])))
    node = frame(NODE, inner([(b"a", 0, size)]))
    database(path, [node], manifest(0, size, 1))


@case(".orbax", ck.MalformedFile)
def ocdbt_two_nodes_hold_each_other(path: Path) -> None:
    size = len(frame(NODE, inner([(b"a", 100, 100)])))
    nodes = [frame(NODE, inner([(b"a", at, size)])) for at in (size, 0)]
    database(path, nodes, manifest(0, size, 2))


@case(".orbax", ck.MalformedFile)
def ocdbt_height_of_a_child(path: Path) -> None:
    node = frame(NODE, leaf(array()))
    above = frame(NODE, inner([(b"w/.zarray", 0, len(node))], height=5))
    database(path, [node, above], manifest(len(node), len(above), 5))


# --- lengths of keys and paths --------------------------------------------------------------------

MANY = 20_000


def long_keys(interior: bool = False) -> bytes:
    """A key of 60 kB, and many that share all of it but a byte."""
    lengths = varints(MANY, *[59_999] * (MANY - 1), 60_000, *[1] * (MANY - 1))
    more = varints(*[0] * MANY) if interior else b""
    return (b"\1" if interior else b"\0") + b"\0" + lengths + more + b"a" * (60_000 + MANY)


def squeezed(inside: bytes) -> bytes:
    """As zstd, its long runs of one byte as a few."""
    body, at = b"", 0
    for run in re.finditer(rb"(.)\1{999,}", inside, re.DOTALL):
        body += stored(inside[at : run.start()]) + repeated(run[1], len(run[0]))
        at = run.end()
    return zstd(body, last=stored(inside[at:], last=True))


@case(".orbax", ck.BudgetExceeded)
def ocdbt_nodes_share_a_long_beginning(path: Path) -> None:
    """The short keys of a node are behind 60 kB that the node above says."""
    count = 20_000
    keys = {b"%05d" % i: b"" for i in range(count)}
    below = frame(NODE, leaf(keys))
    above = frame(NODE, inner([(b"a" * 60_000, 0, len(below))], shared=60_000))
    database(path, [below, above], manifest(len(below), len(above), 1))


def long_paths() -> bytes:
    lengths = varints(MANY, *[59_999] * (MANY - 1), 60_000, *[1] * (MANY - 1), *[0] * MANY)
    return lengths + b"a" * (60_000 + MANY)


# --- what a node inflates to ------------------------------------------------------------------------


raw_cases(
    "ocdbt_", ".orbax",
    ("height_of_the_root", Bad, lambda path: one_node(path, leaf(array()), height=3)),
    ("child_outside", Bad,
     lambda path: one_node(path, inner([(b"a", 0, 100)], path=b"../m"), height=1)),
    ("keys_share_their_beginning", Big, lambda path: one_node(path, long_keys())),
    ("keys_of_nodes_share_their_beginning", Big,
     lambda path: one_node(path, long_keys(interior=True), height=1)),
    ("keys_share_their_beginning_in_zstd", Big,
     lambda path: one_node(path, squeezed(long_keys()), 1)),
    ("paths_share_their_beginning", Big, lambda path: one_node(path, leaf(array(), long_paths()))),
    ("2_60_keys", Big, lambda path: one_node(path, b"\0\0" + varint(2**60) + bytes(100))),
    ("2_60_paths", Big, lambda path: one_node(path, b"\0" + varint(2**60) + bytes(100))),
    ("more_keys_than_bytes", Bad,
     lambda path: one_node(path, b"\0\0" + varint(50_000) + bytes(100))),
    ("number_without_end", Bad, lambda path: one_node(path, b"\0\0" + b"\xff" * 200)),
    ("paths_of_the_manifest_share_their_beginning", Big,
     lambda path: database(path, [], manifest(0, 100, paths=long_paths()))),
    # Zeros written as long as numbers may be.
    ("lengths_in_ten_bytes_each", Bad,
     lambda path: one_node(path, b"\0\0" + varint(10_000) + (b"\x80" * 9 + b"\0") * 20_000)),
    ("node_inflates_to_a_gibibyte", Big,
     lambda path: one_node(path, zstd(repeated(b"\0", 1 << 30), last=stored(b"", last=True)), 1)),
)  # fmt: skip


@case(".orbax", ck.BudgetExceeded)
def ocdbt_manifest_inflates_to_a_gibibyte(path: Path) -> None:
    database(path, [], b"")
    inside = zstd(repeated(b"\0", 1 << 30), last=stored(b"", last=True))
    (path / "manifest.ocdbt").write_bytes(frame(MANIFEST, inside, 1))


def whole(inside: bytes, descriptor: str = "00", more: str = "58") -> bytes:
    """A frame of one stored block, with another descriptor."""
    return bytes.fromhex("28b52ffd" + descriptor + more) + stored(inside, last=True)


def packed(inside: bytes) -> Callable[[Path], None]:
    return lambda path: one_node(path, inside, 1)


SOUND = leaf(array())
raw_cases(
    "ocdbt_zstd_", ".orbax",
    ("of_two_frames", Bad, packed(whole(SOUND) + whole(SOUND))),
    ("after_a_skippable_frame", Bad, packed(bytes.fromhex("502a4d1804000000abcdabcd") + whole(SOUND))),
    ("with_a_dictionary", Bad, packed(whole(SOUND, "01", "5807"))),
    ("of_another_content_size", Bad, packed(whole(SOUND, "20", "07"))),
    ("of_a_huge_content_size", Bad, packed(whole(SOUND, "e0", "ff" * 7 + "7f"))),
    ("with_a_reserved_bit", Bad, packed(whole(SOUND, "08"))),
    ("with_a_reserved_block", Bad, packed(bytes.fromhex("28b52ffd0058") + b"\7\0\0" + SOUND)),
    ("with_a_window_of_exbibytes", Bad, packed(whole(SOUND, more="ff"))),
    ("cut_short", Bad, packed(whole(SOUND)[:-10])),
    ("without_a_last_block", Bad, packed(zstd(stored(SOUND)))),
    ("of_another_format", Bad, packed(b"\x1f\x8b" + SOUND)),
    ("with_bytes_behind", Bad, packed(whole(SOUND) + bytes(40))),
)  # fmt: skip
