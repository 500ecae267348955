"""What the documents of zarr arrays, version 2 and 3, say of shape, dtype and chunks.

Format: https://zarr-specs.readthedocs.io/en/latest/
"""

import contextlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxmha.converters.checkpoint.casting import DTYPES
from jaxmha.converters.checkpoint.errors import ForbiddenContent, MalformedFile, UnsupportedDtype
from jaxmha.converters.checkpoint.tensor import BFLOAT16, FLOAT8, TensorInfo

_CODECS = frozenset(["bytes", "zstd", "gzip", "zlib", "crc32c", "transpose", "sharding_indexed"])
_AGAIN = "save it again with orbax"
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def written(dtype: np.dtype) -> str:
    """A dtype as .zarray documents name it."""
    return str(dtype) if dtype in (BFLOAT16, *FLOAT8) else dtype.newbyteorder("<").str


def read2(path: Path, name: str, document: dict[str, Any]) -> tuple[TensorInfo, tuple[int, ...]]:
    """Shape, dtype and chunk of a .zarray document.

    Raises:
        MalformedFile, ForbiddenContent, UnsupportedDtype.
    """
    compressor = document.get("compressor")
    codecs = [] if compressor is None else [compressor]
    if document.get("filters") not in (None, []):
        raise ForbiddenContent(path, "a zarr filter", _AGAIN, name)
    _check_codecs(path, name, codecs, "id")
    dtype = _dtype(path, name, document.get("dtype"))
    return _shapes(path, name, document.get("shape"), document.get("chunks"), dtype)


def read3(path: Path, name: str, document: dict[str, Any]) -> tuple[TensorInfo, tuple[int, ...]]:
    """Shape, dtype and chunk of a zarr.json document; raises as `read2`."""
    try:
        grid = document["chunk_grid"]
        chunk = grid["configuration"]["chunk_shape"]
        codecs = list(document["codecs"])
        for codec in codecs:  # the chunks inside of a chunk have codecs too
            if isinstance(codec, dict) and codec.get("name") == "sharding_indexed":
                inner = codec["configuration"]
                codecs += [*inner["codecs"], *inner.get("index_codecs", [])]
    except (TypeError, KeyError):
        _damaged(path, name)
    if grid.get("name") != "regular" or document.get("storage_transformers") or len(codecs) > 20:
        raise ForbiddenContent(path, "an unusual zarr array", _AGAIN, name)
    _check_codecs(path, name, codecs, "name")
    dtype = _dtype(path, name, document.get("data_type"))
    return _shapes(path, name, document.get("shape"), chunk, dtype)


def _check_codecs(path: Path, name: str, codecs: list[Any], key: str) -> None:
    for codec in codecs:
        kind = codec.get(key) if isinstance(codec, dict) else codec
        if not isinstance(kind, str) or kind not in _CODECS:
            raise ForbiddenContent(path, f"the codec {str(kind)[:40]!r}", _AGAIN, name)


def _dtype(path: Path, name: str, text: Any) -> np.dtype:
    named: np.dtype | None = DTYPES.get(text) if isinstance(text, str) else None
    if named is None and isinstance(text, str) and text[:1] in "<>|":
        with contextlib.suppress(TypeError, ValueError):
            named = np.dtype(text).newbyteorder("=")
    if named not in NAMES or named is None:
        raise UnsupportedDtype(path, f"the dtype {str(text)[:40]!r}", _AGAIN, name)
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
