"""Databases of tensorstore (OCDBT) whose frames, places or values are not what they should be."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Gone, Two, case, raw_cases
from tests.checkpoint.hostile.indexes import W
from tests.checkpoint.hostile.ocdbt import (
    MANIFEST,
    NEVER,
    NODE,
    UUID,
    array,
    checksum,
    database,
    frame,
    leaf,
    manifest,
    one_node,
    table,
    varints,
)


def outside(pairs: dict[bytes, bytes], path: bytes, offset: int, size: int) -> bytes:
    """The content of a node whose last value lies in a file."""
    n = len(pairs)
    names = list(pairs)
    lengths = varints(n, *[0] * (n - 1), *map(len, names)) + b"".join(names)
    inside = [pairs[name] for name in names[:-1]]
    values = varints(*map(len, inside), size) + bytes(n - 1) + b"\1" + varints(0, offset)
    return b"\0" + table(path) + lengths + values + b"".join(inside)


# --- frames ---------------------------------------------------------------------------------------


def framed(at: int, data: bytes) -> Callable[[Path], None]:
    """Bytes of the frame of a node changed, before its checksum is taken."""
    raw = bytearray(frame(NODE, leaf(array()))[:-4])
    raw[at : at + len(data)] = data
    node = bytes(raw) + checksum(bytes(raw))
    return lambda path: database(path, [node], manifest(0, len(node)))


raw_cases(
    "ocdbt_frame_", ".orbax",
    ("of_a_manifest", Bad, framed(0, MANIFEST)),
    ("of_another_length", Bad, framed(4, struct.pack("<Q", 2**62))),
    ("of_another_version", Bad, framed(12, b"\1")),
    ("of_an_unknown_compression", Bad, framed(13, b"\7")),
)  # fmt: skip


@case(".orbax", ck.MalformedFile)
def ocdbt_frame_checksum(path: Path) -> None:
    node = frame(NODE, leaf(array()))
    database(path, [node[:-1] + bytes([node[-1] ^ 1])], manifest(0, len(node)))


# --- places -----------------------------------------------------------------------------------------


def placed(file: bytes, offset: int = 0, size: int = 0) -> Callable[[Path], None]:
    node = frame(NODE, leaf(array()))
    root = manifest(offset, size or len(node), path=file)
    return lambda path: database(path, [node], root)


raw_cases(
    "ocdbt_root_", ".orbax",
    ("in_a_folder_outside", Bad, placed(b"../../etc/passwd")),
    ("of_an_absolute_path", Gone, placed(b"/etc/passwd")),
    ("of_a_url", Gone, placed(b"http://localhost/x")),
    ("of_an_encoded_path", Gone, placed(b"%2e%2e/x")),
    ("of_a_path_with_nul", Gone, placed(b"d/0\0")),
    ("of_a_path_of_dots", Gone, placed(b"d/./0")),
    ("of_no_path", Bad, placed(b"")),
    ("of_no_text", Gone, placed(b"\xff\xfe")),
    ("in_no_file", Gone, placed(b"d/1")),
    ("in_the_manifest", Bad, placed(b"manifest.ocdbt")),
    ("beyond_the_file", Bad, placed(b"d/0", 10**9, 0)),
    ("of_2_62_bytes", Bad, placed(b"d/0", 0, 2**62)),
    ("that_overflows", Bad, placed(b"d/0", 2**63 - 10, 2**63 - 10)),
)  # fmt: skip


def valued(file: bytes, offset: int, size: int) -> Callable[[Path], None]:
    """The chunk lies in a file that the node names."""

    def build(path: Path) -> None:
        one_node(path, outside(array(), file, offset, size))
        path.with_name("secret").write_bytes(W.tobytes())

    return build


raw_cases(
    "ocdbt_value_", ".orbax",
    ("in_a_folder_outside", Bad, valued(b"../secret", 0, 24)),
    ("of_an_absolute_path", Gone, valued(b"/etc/passwd", 0, 24)),
    ("of_a_path_back_and_forth", Bad, valued(b"d/../../secret", 0, 24)),
    ("in_no_file", Gone, valued(b"d/1", 0, 24)),
    ("beyond_the_file", Bad, valued(b"d/0", 10**6, 24)),
    ("of_2_50_bytes", Bad, valued(b"d/0", 0, 2**50)),
    ("of_one_byte_less", Bad, valued(b"d/0", 0, 23)),
)  # fmt: skip


# --- what is stored -----------------------------------------------------------------------------------


def having(pairs: dict[bytes, bytes]) -> Callable[[Path], None]:
    """Other files in the database, or more."""
    return lambda path: one_node(path, leaf(dict(sorted((array() | pairs).items()))))


raw_cases(
    "ocdbt_stored_", ".orbax",
    ("chunk_is_short", Bad, having({b"w/0.0": W.tobytes()[:-1]})),
    ("chunk_is_long", Bad, having({b"w/0.0": W.tobytes() + b"\0"})),
    ("chunk_is_empty", Bad, having({b"w/0.0": b""})),
    ("document_key_twice", Two, having({b"w/.zarray": b'{"shape": [], "shape": [2, 3]}'})),
    ("document_is_no_text", Bad, having({b"w/.zarray": b"\xff\xfe{}"})),
    ("array_not_in_the_tree", Gone, having({b"v/.zarray": b"{}"})),
    ("array_that_is_a_path", Gone, having({b"../v/.zarray": b"{}"})),
)  # fmt: skip


@case(".orbax", ck.MalformedFile)
def ocdbt_manifest_with_bytes_behind(path: Path) -> None:
    node = frame(NODE, leaf(array()))
    database(path, [node], manifest(0, len(node)) + b"\0")


@case(".orbax", ck.MalformedFile)
def ocdbt_manifest_of_no_version(path: Path) -> None:
    config = UUID + varints(0, 100, 8 << 20) + b"\4" + b"\0"
    root = varints(1) + NEVER + b"\0" + varints(0, 0, 0, 0, 0, 0) + bytes(8)
    database(path, [], config + table(b"") + root + varints(0))


def _one_value(path: Path, count: int, empty: int) -> None:
    """Chunks of one byte each, whose value is the same bytes: a byte after many empty blocks."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = b"\0\0\0\xff\xff" * empty + deflate.compress(b"\1") + deflate.flush()
    value = b"\x78\xda" + body + struct.pack(">L", zlib.adler32(b"\1"))
    squeezed: dict[str, object] = {"compressor": {"id": "zlib", "level": 1}}
    settings = squeezed | {"shape": [count], "chunks": [1], "dtype": "|u1"}
    document = json.dumps(json.loads(array()[b"w/.zarray"]) | settings).encode()
    keys = [b"w/.zarray", *sorted(b"w/%d" % i for i in range(count))]
    n = len(keys)
    node = b"\0" + table(b"d/0") + varints(n, *[0] * (n - 1), *map(len, keys)) + b"".join(keys)
    node += varints(len(document), *[len(value)] * count) + b"\0" + b"\1" * count
    node += bytes(count) + bytes(count) + document  # each in the first file, from its first byte
    database(path, [value, frame(NODE, node)], manifest(len(value), len(frame(NODE, node))))


raw_cases(
    "ocdbt_", ".orbax",
    ("frame_of_nothing", Bad, lambda path: database(path, [b"\0" * 10], manifest(0, 10))),
    ("keys_in_disorder", Bad, lambda path: one_node(path, leaf(dict(reversed(array().items()))))),
    ("manifest_in_parts", Bad,
     lambda path: database(path, [], UUID + varints(1, 100, 8 << 20) + b"\4" + b"\0")),
    ("manifest_of_another_kind", Bad,
     lambda path: database(path, [], UUID + varints(9, 100, 8 << 20) + b"\4" + b"\0")),
    ("values_share_their_bytes", Bad, lambda path: _one_value(path, 200, 1000)),
)  # fmt: skip
