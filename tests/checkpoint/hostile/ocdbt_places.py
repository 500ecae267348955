"""Databases of tensorstore (OCDBT) whose frames, places or values are not what they should be."""

import json
import struct
import zlib
from pathlib import Path

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
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


def _framed(name: str, change: dict[int, bytes], error: type[ck.CheckpointError]) -> None:
    """Bytes of the frame of a node changed, before its checksum is taken."""

    @case(".orbax", error, f"ocdbt_frame_{name}")
    def build(path: Path) -> None:
        raw = bytearray(frame(NODE, leaf(array()))[:-4])
        for at, data in change.items():
            raw[at : at + len(data)] = data
        database(path, [bytes(raw) + checksum(bytes(raw))], manifest(0, len(raw) + 4))


_framed("of_a_manifest", {0: MANIFEST}, ck.MalformedFile)
_framed("of_another_length", {4: struct.pack("<Q", 2**62)}, ck.MalformedFile)
_framed("of_another_version", {12: b"\1"}, ck.MalformedFile)
_framed("of_an_unknown_compression", {13: b"\7"}, ck.MalformedFile)


@case(".orbax", ck.MalformedFile)
def ocdbt_frame_checksum(path: Path) -> None:
    node = frame(NODE, leaf(array()))
    database(path, [node[:-1] + bytes([node[-1] ^ 1])], manifest(0, len(node)))


@case(".orbax", ck.MalformedFile)
def ocdbt_frame_of_nothing(path: Path) -> None:
    database(path, [b"\0" * 10], manifest(0, 10))


# --- places -----------------------------------------------------------------------------------------


def _placed(
    name: str, file: bytes, offset: int, size: int, error: type[ck.CheckpointError]
) -> None:
    @case(".orbax", error, f"ocdbt_root_{name}")
    def build(path: Path) -> None:
        node = frame(NODE, leaf(array()))
        database(path, [node], manifest(offset, size or len(node), path=file))


_placed("in_a_folder_outside", b"../../etc/passwd", 0, 0, ck.MalformedFile)
_placed("of_an_absolute_path", b"/etc/passwd", 0, 0, ck.IncompleteCheckpoint)
_placed("of_a_url", b"http://localhost/x", 0, 0, ck.IncompleteCheckpoint)
_placed("of_an_encoded_path", b"%2e%2e/x", 0, 0, ck.IncompleteCheckpoint)
_placed("of_a_path_with_nul", b"d/0\0", 0, 0, ck.IncompleteCheckpoint)
_placed("of_a_path_of_dots", b"d/./0", 0, 0, ck.IncompleteCheckpoint)
_placed("of_no_path", b"", 0, 0, ck.MalformedFile)
_placed("of_no_text", b"\xff\xfe", 0, 0, ck.IncompleteCheckpoint)
_placed("in_no_file", b"d/1", 0, 0, ck.IncompleteCheckpoint)
_placed("in_the_manifest", b"manifest.ocdbt", 0, 0, ck.MalformedFile)
_placed("beyond_the_file", b"d/0", 10**9, 0, ck.MalformedFile)
_placed("of_2_62_bytes", b"d/0", 0, 2**62, ck.MalformedFile)
_placed("that_overflows", b"d/0", 2**63 - 10, 2**63 - 10, ck.MalformedFile)


def _valued(
    name: str, file: bytes, offset: int, size: int, error: type[ck.CheckpointError]
) -> None:
    """The chunk lies in a file that the node names."""

    @case(".orbax", error, f"ocdbt_value_{name}")
    def build(path: Path) -> None:
        node = frame(NODE, outside(array(), file, offset, size))
        database(path, [node], manifest(0, len(node)))
        path.with_name("secret").write_bytes(W.tobytes())


_valued("in_a_folder_outside", b"../secret", 0, 24, ck.MalformedFile)
_valued("of_an_absolute_path", b"/etc/passwd", 0, 24, ck.IncompleteCheckpoint)
_valued("of_a_path_back_and_forth", b"d/../../secret", 0, 24, ck.MalformedFile)
_valued("in_no_file", b"d/1", 0, 24, ck.IncompleteCheckpoint)
_valued("beyond_the_file", b"d/0", 10**6, 24, ck.MalformedFile)
_valued("of_2_50_bytes", b"d/0", 0, 2**50, ck.MalformedFile)
_valued("of_one_byte_less", b"d/0", 0, 23, ck.MalformedFile)


# --- what is stored -----------------------------------------------------------------------------------


def _stored(name: str, pairs: dict[bytes, bytes], error: type[ck.CheckpointError]) -> None:
    @case(".orbax", error, f"ocdbt_stored_{name}")
    def build(path: Path) -> None:
        node = frame(NODE, leaf(dict(sorted((array() | pairs).items()))))
        database(path, [node], manifest(0, len(node)))


_stored("chunk_is_short", {b"w/0.0": W.tobytes()[:-1]}, ck.MalformedFile)
_stored("chunk_is_long", {b"w/0.0": W.tobytes() + b"\0"}, ck.MalformedFile)
_stored("chunk_is_empty", {b"w/0.0": b""}, ck.MalformedFile)
_stored("document_key_twice", {b"w/.zarray": b'{"shape": [], "shape": [2, 3]}'}, ck.AmbiguousFile)
_stored("document_is_no_text", {b"w/.zarray": b"\xff\xfe{}"}, ck.MalformedFile)
_stored("array_not_in_the_tree", {b"v/.zarray": b"{}"}, ck.IncompleteCheckpoint)
_stored("array_that_is_a_path", {b"../v/.zarray": b"{}"}, ck.IncompleteCheckpoint)


@case(".orbax", ck.MalformedFile)
def ocdbt_keys_in_disorder(path: Path) -> None:
    node = frame(NODE, leaf(dict(reversed(array().items()))))
    database(path, [node], manifest(0, len(node)))


@case(".orbax", ck.MalformedFile)
def ocdbt_manifest_in_parts(path: Path) -> None:
    database(path, [], UUID + varints(1, 100, 8 << 20) + b"\4" + b"\0")


@case(".orbax", ck.MalformedFile)
def ocdbt_manifest_of_another_kind(path: Path) -> None:
    database(path, [], UUID + varints(9, 100, 8 << 20) + b"\4" + b"\0")


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


@case(".orbax", ck.MalformedFile)
def ocdbt_values_share_their_bytes(path: Path) -> None:
    _one_value(path, 200, 1000)
