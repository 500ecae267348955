"""Reads shape, dtype and chunks from the documents of zarr arrays, versions 2 and 3.

Format: https://zarr-specs.readthedocs.io/en/latest/
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint.casting import DTYPES
from jaxmha.checkpoint.errors import ForbiddenContent, MalformedFile, UnsupportedDtype
from jaxmha.checkpoint.tensor import BFLOAT16, FLOAT8, TensorInfo

_COMPRESSORS = frozenset(["zstd", "gzip", "zlib"])
_CODECS = _COMPRESSORS | {"bytes", "crc32c", "transpose", "sharding_indexed"}
_SHARDED = "sharding_indexed"
_MISSING = np.uint64(2**64 - 1)  # offset and length of an inner chunk that is not stored
_AGAIN = "save it again with orbax"
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def written(dtype: np.dtype) -> str:
    """The name of a dtype in .zarray documents."""
    return str(dtype) if dtype in (BFLOAT16, *FLOAT8) else dtype.newbyteorder("<").str


class Shard(NamedTuple):
    """The inner chunks of each chunk: their shape; position and checksum flag of their index."""

    chunk: tuple[int, ...]
    at_end: bool
    checksum: bool


class Array(NamedTuple):
    """An array as its document declares it.

    The key of a chunk is `first` and then its grid position, joined by `separator`.
    """

    info: TensorInfo
    chunk: tuple[int, ...]
    first: tuple[str, ...]
    separator: str
    inner: Shard | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.info.shape, self.chunk, strict=True))

    def chunks(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the key and grid position of every chunk."""
        # `product` stores the range of every axis; one may be long although the array is empty.
        axes = self.grid if all(self.grid) else (0,)
        for numbers in itertools.product(*map(range, axes)):
            key = self.separator.join([*self.first, *map(str, numbers)])
            yield key or "0", numbers  # "0" for an array without axes

    def index_bytes(self) -> int:
        """The bytes of the index of inner chunks in each chunk."""
        assert self.inner is not None
        count = math.prod(c // i for c, i in zip(self.chunk, self.inner.chunk, strict=True))
        return 16 * count + 4 * self.inner.checksum

    def is_whole(self, index: bytes, numbers: tuple[int, ...]) -> bool:
        """True if the chunk at position `numbers` stores every inner chunk inside the array."""
        assert self.inner is not None
        if len(index) < self.index_bytes():
            return False
        each = [c // i for c, i in zip(self.chunk, self.inner.chunk, strict=True)]
        places = self._places(index).reshape(*each, 2)
        ends = (n - k * c for n, k, c in zip(self.info.shape, numbers, self.chunk, strict=True))
        inside = (slice(-(-end // i)) for end, i in zip(ends, self.inner.chunk, strict=True))
        return not bool((places[tuple(inside)] == _MISSING).any())

    def shares_bytes(self, index: bytes) -> bool:
        """True if two inner chunks of a chunk are stored at the same bytes."""
        places = self._places(index)
        stored = places[(places != _MISSING).all(-1)]
        first, count = stored[np.argsort(stored[:, 0], kind="stable")].T
        return bool((count[:-1] > np.diff(first)).any())  # `first + count` may overflow

    def _places(self, index: bytes) -> NDArray[np.uint64]:
        """Offset and length of every inner chunk, in C order."""
        return np.frombuffer(index, "<u8", self.index_bytes() // 16 * 2).reshape(-1, 2)


def read2(path: Path, name: str, document: dict[str, Any]) -> Array:
    """The array that a .zarray document declares.

    Raises:
        MalformedFile, ForbiddenContent, UnsupportedDtype.
    """
    compressor = document.get("compressor")
    codecs = [] if compressor is None else [compressor]
    if document.get("filters") not in (None, []):
        raise ForbiddenContent(path, "a zarr filter", _AGAIN, name)
    _check_codecs(path, name, codecs, "id")
    dtype = _dtype(path, name, document.get("dtype"))
    info, chunk = _shapes(path, name, document.get("shape"), document.get("chunks"), dtype)
    return Array(info, chunk, (), _separator(path, name, document, "dimension_separator", "."))


def read3(path: Path, name: str, document: dict[str, Any]) -> Array:
    """The array that a zarr.json document declares; raises the errors of `read2`."""
    inner = None
    try:
        grid = document["chunk_grid"]
        chunk = grid["configuration"]["chunk_shape"]
        codecs = list(document["codecs"])
        if any(_kind(codec) == _SHARDED for codec in codecs):
            (inner,) = codecs
            codecs += [*inner["configuration"]["codecs"]]
        encoding = document["chunk_key_encoding"]
        first = {"default": ("c",), "v2": ()}[encoding["name"]]
        options = encoding.get("configuration", {})
    except (TypeError, KeyError, ValueError, AttributeError):
        _damaged(path, name)
    if (
        grid.get("name") != "regular"
        or document.get("storage_transformers")
        or document.get("node_type") != "array"
        or len(codecs) > 20
        or sum(_kind(codec) == _SHARDED for codec in codecs) > 1
    ):
        raise ForbiddenContent(path, "an unusual zarr array", _AGAIN, name)
    _check_codecs(path, name, codecs, "name")
    dtype = _dtype(path, name, document.get("data_type"))
    info, chunk = _shapes(path, name, document.get("shape"), chunk, dtype)
    separator = _separator(path, name, options, "separator", "/" if first else ".")
    shard = None if inner is None else _shard(path, name, inner["configuration"], chunk)
    return Array(info, chunk, first, separator, shard)


def is_group(document: dict[str, Any]) -> bool:
    """True if a zarr.json document describes a folder, not an array."""
    return document.get("node_type") == "group"


def _shard(path: Path, name: str, settings: dict[str, Any], chunk: tuple[int, ...]) -> Shard:
    inner, place = settings.get("chunk_shape"), settings.get("index_location", "end")
    codecs = settings.get("index_codecs", [{"name": "bytes"}, {"name": "crc32c"}])
    if (
        not isinstance(inner, list)
        or any(type(n) is not int or n < 1 for n in inner)
        or len(inner) != len(chunk)
        or any(c % i for c, i in zip(chunk, inner, strict=True))
        or place not in ("start", "end")
        or not isinstance(codecs, list)
    ):
        _damaged(path, name)
    kinds = [_kind(codec) for codec in codecs]
    order = codecs[0].get("configuration", {}) if kinds[:1] == ["bytes"] else None
    if kinds not in (["bytes"], ["bytes", "crc32c"]) or order not in ({}, {"endian": "little"}):
        raise ForbiddenContent(path, "an unusual index of inner chunks", _AGAIN, name)
    return Shard(tuple(inner), place == "end", len(kinds) == 2)


def _separator(path: Path, name: str, settings: Any, key: str, usual: str) -> str:
    found = settings.get(key, usual) if isinstance(settings, dict) else None
    if found not in (".", "/"):
        _damaged(path, name)
    return str(found)


def _kind(codec: Any) -> Any:
    return codec.get("name") if isinstance(codec, dict) else codec


def _check_codecs(path: Path, name: str, codecs: list[Any], key: str) -> None:
    compressors = 0
    for codec in codecs:
        kind = codec.get(key) if isinstance(codec, dict) else codec
        if not isinstance(kind, str) or kind not in _CODECS:
            raise ForbiddenContent(path, f"the codec {str(kind)[:40]!r}", _AGAIN, name)
        compressors += kind in _COMPRESSORS
    # Each may inflate its input a thousandfold, and the last result may still be small.
    if compressors > 1:
        raise ForbiddenContent(path, "two compressors of one array", _AGAIN, name)


def _dtype(path: Path, name: str, text: Any) -> np.dtype:
    named: np.dtype | None = DTYPES.get(text) if isinstance(text, str) else None
    if named is None and isinstance(text, str) and text[:1] in "<>|":
        with contextlib.suppress(TypeError, ValueError):
            named = np.dtype(text).newbyteorder("=")
    if named not in NAMES or named is None:
        remedy = "convert the array to another dtype, such as int8 or float32, before saving it"
        raise UnsupportedDtype(path, f"the dtype {str(text)[:40]!r}", remedy, name)
    return named


def _shapes(
    path: Path, name: str, shape: Any, chunk: Any, dtype: np.dtype
) -> tuple[TensorInfo, tuple[int, ...]]:
    for numbers, least in ((shape, 0), (chunk, 1)):
        if not isinstance(numbers, list) or any(type(n) is not int or n < least for n in numbers):
            _damaged(path, name)
    if len(shape) != len(chunk):
        _damaged(path, name)
    return TensorInfo(tuple(shape), dtype), tuple(chunk)


def _damaged(path: Path, name: str) -> NoReturn:
    raise MalformedFile(path, "its zarr document is damaged", _AGAIN, name)
