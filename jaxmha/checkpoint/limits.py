"""Limits on memory and work for reading a file; readers charge a budget before they allocate."""

import math
import os
import re
from dataclasses import dataclass

import numpy as np

from jaxmha.checkpoint.errors import AmbiguousFile, BudgetExceeded, MalformedFile, PathEscape, shown
from jaxmha.checkpoint.tensor import TensorInfo

_RAISE = "if the file is trusted, read it in Python: checkpoint.open(path, limits=Limits(...))"
_DENSE = (
    "save it dense and not compressed, or if the file is trusted, read it in Python: "
    "checkpoint.open(path, limits=Limits(memory=...))"
)
_RENAME = "give the tensor a plain name"


@dataclass(frozen=True)
class Limits:
    """Limits for reading one file.

    Example:
        >>> Limits(tensors=10).tensors
        10
    """

    logical_bytes: int | None = None  # bytes of all tensors; None: max(4 * file size, 1 GiB)
    # Bytes of objects built from headers and pickles, and of the largest tensor; 2 * file size is
    # added to this limit.
    memory: int = 48 << 20
    header_bytes: int = 100_000_000  # bytes of a safetensors header or zip directory
    pickle_bytes: int = 64 << 20
    opcodes: int = 500_000  # opcodes of a pickle of 8,000 storages; in proportion if it has more
    tensors: int = 10**6
    aliases: int = 1000  # names of one tensor of a torch file (tied weights)
    index_bytes: int = 64 << 20
    document_bytes: int = 1 << 20  # bytes of a config.json or of the document of one zarr array
    files: int = 100_000  # files and folders inside a folder
    shards: int = 500  # files of one checkpoint
    members: int = 10**6  # zip members, HDF5 links
    depth: int = 64  # nesting depth of groups and containers
    tuple_depth: int = 8
    name_bytes: int = 1024
    rank: int = 32
    dimension: int = 2**53
    steps: int = 2 * 10**6  # messages, nodes, entries of an HDF5 file; Keras takes 40 per tensor
    chunk_bytes: int = 16 << 20  # bytes by which a chunk may exceed the size of its tensor


UNLIMITED = Limits(logical_bytes=2**63 - 1, memory=2**63 - 1)
_TENSOR = 512  # bytes of Python objects per tensor
_STORAGE = 4096  # bytes of Python objects per tensor in a pickle
_MOST_STORAGES = 100_000


class Budget:
    """Counts the memory and work that reading one file has taken so far."""

    def __init__(self, path: str | os.PathLike[str], file_bytes: int, limits: Limits) -> None:
        self.path = path
        self.limits = limits
        self.info: dict[str, TensorInfo] = {}
        self._logical = self._built = self._extra = self._loaded = 0
        self._file_bytes, self._most_built = file_bytes, limits.memory + 2 * file_bytes
        given = limits.logical_bytes
        self._allowed = max(4 * file_bytes, 1 << 30) if given is None else given

    def spend(
        self,
        what: str,
        amount: int,
        allowed: int,
        member: str | None = None,
        remedy: str = _RAISE,
    ) -> None:
        """Raises BudgetExceeded when amount > allowed."""
        if amount > allowed:
            problem = f"{what} is {amount:,}, the limit is {allowed:,}"
            raise BudgetExceeded(self.path, problem, remedy, member)

    def build(self, amount: int, what: str, member: str | None = None) -> None:
        """Charges the memory of objects built from the file before they are allocated.

        Raises:
            BudgetExceeded: all charges together exceed `Limits.memory` plus twice the file size.
        """
        self._built += amount
        if self._built + self._loaded > self._most_built:  # building a message takes longer
            taken = self._built + self._loaded
            self.spend(f"the memory to build with {what}", taken, self._most_built, member)

    def load(self, size: int, buffers: int, member: str) -> None:
        """Charges the memory to read one tensor, which may be far larger than its compressed bytes.

        Tensors are read one at a time, so only the largest charge counts. `buffers` are the bytes
        in memory next to the tensor; up to the size of the file they are free, because a tensor
        stored as one chunk is in memory twice. An empty tensor has no charge.

        Raises:
            BudgetExceeded: with `build`, more than `Limits.memory` plus twice the file size.
        """
        needed = size + max(0, buffers - self._file_bytes) if size else 0
        self._loaded = max(self._loaded, needed)
        taken = self._built + self._loaded
        self.spend("the memory to read it", taken, self._most_built, member, _DENSE)

    def read(self, extra: int, member: str) -> None:
        """Charges bytes read in addition to a tensor: gaps of a view, chunks that exceed the shape.

        Raises:
            BudgetExceeded: the extra bytes of all tensors exceed `Limits.logical_bytes`.
        """
        self._extra += extra
        what = "the bytes to read beyond those of the tensors"
        self.spend(what, self._extra, self._allowed, member)

    def give_back(self, amount: int) -> None:
        """Refunds a charge of `build` for objects that were freed."""
        self._built -= amount

    def grow_for_storages(self, count: int) -> None:
        """Raises the memory limit for the objects of `count` tensors in a pickle, up to 400 MB."""
        self._most_built += _STORAGE * min(count, _MOST_STORAGES)

    def grow(self, file_bytes: int) -> None:
        """Raises the memory limit for one more file of the same checkpoint."""
        self._most_built += 2 * file_bytes

    def tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> TensorInfo:
        """Checks a declared tensor against the limits, and adds it to `info`.

        Raises:
            BudgetExceeded, MalformedFile, PathEscape, AmbiguousFile.
        """
        check_name(self.path, name, self.limits)
        self.build(_TENSOR, "its tensors", name)
        if name in self.info:
            raise AmbiguousFile(self.path, "two tensors have this name", _RENAME, name)
        self.spend("the rank", len(shape), self.limits.rank, name)
        for size in shape:
            if size < 0:
                raise MalformedFile(
                    self.path, f"the shape {shape} is negative", "write it again", name
                )
            self.spend("a dimension", size, self.limits.dimension, name)
        # NumPy limits the product of the nonzero axes even for arrays without elements.
        strides_bytes = math.prod(size for size in shape if size) * dtype.itemsize
        self.spend("the byte size", strides_bytes, 2**63 - 1, name)
        info = TensorInfo(shape, dtype)
        self._logical += info.nbytes
        self.spend("the total byte size of all tensors", self._logical, self._allowed, name)
        self.info[name] = info
        self.spend("the number of tensors", len(self.info), self.limits.tensors)
        return info


def is_text(text: str) -> bool:
    """True if a string can be encoded as UTF-8, which excludes surrogates."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_name(path: str | os.PathLike[str], name: str, limits: Limits) -> None:
    """Raises unless a name is printable, short, and harmless as a relative path.

    Raises:
        MalformedFile, BudgetExceeded, PathEscape.
    """
    if not name:
        raise MalformedFile(path, "a tensor has an empty name", _RENAME)
    if len(name) > limits.name_bytes or len(name.encode("utf-8", "replace")) > limits.name_bytes:
        raise BudgetExceeded(path, f"a name is longer than {limits.name_bytes} bytes", _RAISE, name)
    if _CONTROL.search(name) or not is_text(name):
        raise MalformedFile(path, "a name has control or surrogate characters", _RENAME, name)
    parts = name.replace("\\", "/").split("/")
    if not parts[0] or any(part in (".", "..") for part in parts):
        raise PathEscape(path, f"the name {shown(name)} is a path", _RENAME)
