"""Hostile arrays of zarr, and folders and databases of tensorstore that hold them."""

import gzip
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Big, Code, Gone, case, raw_cases
from tests.checkpoint.hostile.indexes import W
from tests.checkpoint.hostile.orbax_folders import crc32c, orbax

TWO = {"shape": [8], "chunks": [4], "dtype": "<f4"}
MISSING = 2**64 - 1


def lost_chunk(path: Path, stray: str) -> None:
    """Of two chunks the first is lost, and a stray file lies in its place."""
    orbax(path, array=TWO)
    (path / "w" / "0.0").unlink()
    (path / "w" / "1").write_bytes(np.ones(4, "<f4").tobytes())
    (path / "w" / stray).parent.mkdir(exist_ok=True)
    (path / "w" / stray).write_bytes(np.ones(4, "<f4").tobytes())


def _register(name: str, stray: str) -> None:
    @case(".orbax", ck.IncompleteCheckpoint, f"zarr_lost_chunk_and_{name}")
    def build(path: Path) -> None:
        lost_chunk(path, stray)


for _name, _stray in {
    "rsync": ".0.Xy12ab",
    "backup": "0.bak",
    "attributes": ".zattrs",
    "folder": "x/y",
    "number": "2",
    "padded": "00",
    "other_rank": "0.0",
    "other_separator": "0/0",
    "other_version": "c/0",
    "unicode": "\u0660",
}.items():
    _register(_name, _stray)


def zarr3(path: Path, array: dict[str, Any], chunks: dict[str, bytes]) -> None:
    """A folder of one array of version 3."""
    orbax(path, tree={"use_zarr3": True})
    (path / "w" / ".zarray").unlink()
    (path / "w" / "0.0").unlink()
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [2, 3],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    (path / "w" / "zarr.json").write_text(json.dumps(document | array))
    for key, data in chunks.items():
        (path / "w" / key).parent.mkdir(parents=True, exist_ok=True)
        (path / "w" / key).write_bytes(data)


def sharded(inner: tuple[int, int], at_end: bool = True) -> dict[str, Any]:
    """The codec of chunks within chunks."""
    settings = {
        "chunk_shape": list(inner),
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "index_codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "index_location": "end" if at_end else "start",
    }
    return {"codecs": [{"name": "sharding_indexed", "configuration": settings}]}


def shard(parts: list[bytes | None], at_end: bool = True) -> bytes:
    """A chunk of inner chunks, of which some may be missing."""
    position = 0 if at_end else 16 * len(parts) + 4
    index = b""
    for part in parts:
        index += struct.pack(
            "<2Q", *((MISSING, MISSING) if part is None else (position, len(part)))
        )
        position += len(part or b"")
    index += crc32c(index).to_bytes(4, "little")
    data = b"".join(part or b"" for part in parts)
    return data + index if at_end else index + data


ROWS = [W[i : i + 1].tobytes() for i in range(2)]


@case(".orbax")
def sound_zarr3(path: Path) -> None:
    zarr3(path, {}, {"c/0/0": W.tobytes()})


@case(".orbax")
def sound_zarr3_of_old_keys(path: Path) -> None:
    encoding = {"name": "v2", "configuration": {"separator": "."}}
    zarr3(path, {"chunk_key_encoding": encoding}, {"0.0": W.tobytes()})


@case(".orbax")
def sound_zarr3_sharded(path: Path) -> None:
    zarr3(path, sharded((1, 3)), {"c/0/0": shard(list(ROWS))})


@case(".orbax")
def sound_zarr3_sharded_from_the_start(path: Path) -> None:
    zarr3(path, sharded((1, 3), at_end=False), {"c/0/0": shard(list(ROWS), at_end=False)})


@case(".orbax")
def sound_zarr_with_legal_files(path: Path) -> None:
    orbax(path)
    for file in (".zattrs", ".zgroup", ".zmetadata", "w/.zattrs", "w/.0.0.Xy12ab", "zarr.json"):
        (path / file).write_text("{}")


@case(".orbax", ck.IncompleteCheckpoint)
def zarr3_inner_chunk_is_missing_from_the_start(path: Path) -> None:
    parts = [None, ROWS[1]]
    zarr3(path, sharded((1, 3), at_end=False), {"c/0/0": shard(parts, at_end=False)})


def overlapping(path: Path, *places: tuple[int, int]) -> None:
    """Two inner chunks at the given offsets and lengths of one chunk."""
    index = b"".join(struct.pack("<2Q", *place) for place in places)
    data = W.tobytes() + index + crc32c(index).to_bytes(4, "little")
    zarr3(path, sharded((1, 3)), {"c/0/0": data})


@case(".orbax", ck.MalformedFile)
def zarr3_shard_behind_another_codec(path: Path) -> None:
    outer = sharded((1, 3))["codecs"]
    nested = [{"name": "transpose", "configuration": {"order": [0, 1]}}, *outer]
    zarr3(path, {"codecs": nested}, {"c/0/0": shard([ROWS[0], None])})


def compressed(path: Path, shape: int, chunk: int, kept: int) -> None:
    """Floats in chunks of zlib, of which every chunk is the same file."""
    settings = {"shape": [shape], "chunks": [chunk], "compressor": {"id": "zlib", "level": 1}}
    orbax(path, array={**settings, "dtype": "<f4"})
    for i in range(kept):
        (path / "w" / f"{i}").write_bytes(zlib.compress(bytes(4 * chunk), 1))


raw_cases(
    "zarr_", ".orbax",
    ("unknown_separator", Bad, lambda path: orbax(path, array={"dimension_separator": "-"})),
    ("inflates_to_more_than_the_watch", Big,  # 60 MiB
     lambda path: compressed(path, 15 << 20, 1 << 20, 15)),
    ("one_chunk_inflates_to_more_than_the_watch", Big,  # 40 MiB, and as much for the chunk
     lambda path: compressed(path, 10 << 20, 10 << 20, 1)),
)  # fmt: skip


def squeezed(times: int) -> bytes:
    """The chunk after many empty blocks of gzip, with gzip around it: a thousandth each time."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = b"\0\0\0\xff\xff" * 100_000 + deflate.compress(W.tobytes()) + deflate.flush()
    end = struct.pack("<2L", zlib.crc32(W.tobytes()), W.nbytes)
    made = b"\x1f\x8b\x08" + bytes(6) + b"\xff" + body + end
    for _ in range(times - 1):
        made = gzip.compress(made, mtime=0)
    return made


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_GZIP = {"name": "gzip", "configuration": {"level": 1}}
_ZSTD = {"name": "zstd", "configuration": {"level": 1}}


@case(".orbax")
def sound_zarr3_gzip(path: Path) -> None:
    zarr3(path, {"codecs": [_BYTES, _GZIP]}, {"c/0/0": squeezed(1)})


raw_cases(
    "zarr3_", ".orbax",
    ("inner_chunk_is_missing", Gone,
     lambda path: zarr3(path, sharded((1, 3)), {"c/0/0": shard([ROWS[0], None])})),
    ("inner_chunks_are_one", Bad, lambda path: overlapping(path, (0, 12), (0, 12))),
    ("inner_chunks_overlap", Bad, lambda path: overlapping(path, (12, 12), (8, 12))),
    ("inner_chunks_overlap_beyond_2_64", Bad,
     lambda path: overlapping(path, (4, 2**64 - 8), (12, 12))),
    ("chunk_under_the_old_key", Gone, lambda path: zarr3(path, {}, {"0.0": W.tobytes()})),
    ("gzip_in_gzip", Code,
     lambda path: zarr3(path, {"codecs": [_BYTES, _GZIP, _GZIP]}, {"c/0/0": squeezed(2)})),
    ("zstd_in_gzip", Code,
     lambda path: zarr3(path, {"codecs": [_BYTES, _ZSTD, _GZIP]}, {"c/0/0": squeezed(2)})),
)  # fmt: skip


@case(".orbax", ck.ForbiddenContent)
def zarr3_gzip_in_gzip_of_inner_chunks(path: Path) -> None:
    document = sharded((1, 3))
    document["codecs"][0]["configuration"]["codecs"] = [_BYTES, _GZIP, _GZIP]
    zarr3(path, document, {"c/0/0": shard(list(ROWS))})
