"""Digests: one per tensor, and one over the names, dtypes, shapes and digests of all tensors.

A digest is a string: the algorithm, a colon, hexadecimal digits. The algorithm hashes the elements
as little-endian bytes in C order, so that equal tensors have equal digests in every format.
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxmha.checkpoint.errors import IntegrityError, MissingDependency, UnsupportedFormat
from jaxmha.checkpoint.tensor import TensorInfo, blocks, to_bytes

# Hexadecimal digits per algorithm. xxh3 is limited only by memory bandwidth; SHA-256 also resists
# deliberate collisions.
LENGTHS = {"xxh3_128": 32, "sha256": 64}
ALGORITHMS = tuple(LENGTHS)
KEY = "jaxmha.digests"  # metadata key of the JSON text with all digests
_AGAIN = "copy the file again from where it was written"


def usual() -> str:
    """The default algorithm: xxh3_128 if xxhash is installed, else sha256."""
    return "xxh3_128" if importlib.util.find_spec("xxhash") else "sha256"


def hasher(algorithm: str, path: str | os.PathLike[str]) -> Any:
    """A hash object of the algorithm, as in hashlib; `path` goes into error messages.

    Raises:
        MissingDependency: xxhash is not installed.  UnsupportedFormat: unknown algorithm.
    """
    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm != "xxh3_128":
        known = ", ".join(LENGTHS)
        raise UnsupportedFormat(path, f"no digest {algorithm[:40]!r}", f"use one of {known}")
    try:
        import xxhash
    except ImportError as e:
        remedy = "pip install 'jaxmha[files]', or in Python checkpoint.open(path, verify=False)"
        raise MissingDependency(path, "checking its digests needs xxhash", remedy) from e
    return xxhash.xxh3_128()


def digest(array: np.ndarray, algorithm: str | None = None) -> str:
    """The digest of one array.

    Args:
        array: of any shape and any dtype of NumPy or ml_dtypes.
        algorithm: "xxh3_128" or "sha256"; None: the result of `usual`.

    Raises:
        CheckpointError: MissingDependency, UnsupportedFormat.

    Example:
        >>> digest(np.arange(3, dtype=np.int32), "sha256")[:14]
        'sha256:ad5dc14'
    """
    algorithm = algorithm or usual()
    state = hasher(algorithm, "")
    for block in blocks(array):
        state.update(to_bytes(block).data)
    return f"{algorithm}:{state.hexdigest()}"


def manifest(
    info: Mapping[str, TensorInfo],
    digests: Mapping[str, str],
    texts: Iterable[tuple[str, str]],
    algorithm: str,
    path: str | os.PathLike[str],
) -> str:
    """One digest over the names, dtypes, shapes and digests of all tensors, and over `texts`."""
    text = {dtype: str(dtype) for dtype in {i.dtype for i in info.values()}}
    tensors = [[n, text[i.dtype], list(i.shape), digests.get(n)] for n, i in sorted(info.items())]
    state = hasher(algorithm, path)
    state.update(json.dumps([tensors, sorted(texts)]).encode())
    return f"{algorithm}:{state.hexdigest()}"


def check_manifest(
    kept: str,
    info: Mapping[str, TensorInfo],
    digests: Mapping[str, str],
    texts: Iterable[tuple[str, str]],
    path: str | os.PathLike[str],
) -> None:
    """Raises IntegrityError unless `kept`, the stored manifest digest, matches the file."""
    for text in (kept, *digests.values()):
        check_form(text, path)
    algorithm = kept.partition(":")[0]
    if digests.keys() != info.keys() or kept != manifest(info, digests, texts, algorithm, path):
        problem = "names, dtypes, shapes or digests are not those that were written"
        raise IntegrityError(path, problem, _AGAIN)


def check_form(text: Any, path: str | os.PathLike[str]) -> None:
    """Raises IntegrityError unless a text from a file has the form of a digest."""
    if not is_digest(text):
        raise IntegrityError(path, f"{str(text)[:80]!r} is not a digest", _AGAIN)


def is_digest(text: Any) -> bool:
    """True if a value from a file has the form of a digest."""
    algorithm, _, digits = text.partition(":") if isinstance(text, str) else ("", "", "")
    return LENGTHS.get(algorithm) == len(digits) and set(digits) <= set("0123456789abcdef")


def check(array: np.ndarray, kept: str, path: str | os.PathLike[str], name: str) -> None:
    """Raises IntegrityError unless the digest of an array equals `kept`, the stored digest."""
    check_form(kept, path)
    state = hasher(kept.partition(":")[0], path)
    for block in blocks(array):
        state.update(to_bytes(block).data)
    if state.hexdigest() != kept.partition(":")[2]:
        raise IntegrityError(path, "the digest does not match: the data is damaged", _AGAIN, name)


def blank(algorithm: str) -> str:
    """A placeholder of the same length as a digest of the algorithm."""
    return f"{algorithm}:{'0' * LENGTHS[algorithm]}"
