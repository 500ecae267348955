"""Limits of the memory and work that a file may cause; readers charge a budget before they allocate."""

import math
import os
from dataclasses import dataclass

import numpy as np

from jaxmha.checkpoint.errors import AmbiguousFile, BudgetExceeded, MalformedFile, PathEscape, shown
from jaxmha.checkpoint.tensor import TensorInfo

_RAISE = "if the file is trusted, read it in Python: checkpoint.open(path, limits=Limits(...))"
_RENAME = "give the tensor a plain name"


@dataclass(frozen=True)
class Limits:
    """Budgets for one file.

    Example:
        >>> Limits(tensors=10).tensors
        10
    """

    logical_bytes: int | None = None  # of all tensors together; None: max(4 x file, 1 GiB)
    memory: int = 48 << 20  # of objects built from headers and pickles, beyond twice the file
    header_bytes: int = 100_000_000  # safetensors header, zip directory
    pickle_bytes: int = 64 << 20
    opcodes: int = 500_000  # of a pickle; torch.save takes some 40 per tensor
    tensors: int = 10**6
    aliases: int = 1000  # names of one tensor of a torch file (tied weights)
    index_bytes: int = 64 << 20
    document_bytes: int = 1 << 20  # a config.json, the document of one zarr array
    files: int = 100_000  # in a folder, with the folders in it
    shards: int = 500  # each is held open
    members: int = 10**6  # zip members, HDF5 links
    depth: int = 64  # nested groups and containers
    tuple_depth: int = 8
    name_bytes: int = 1024
    rank: int = 32
    dimension: int = 2**53
    steps: int = (
        2_000_000  # messages, nodes, entries of an HDF5 file; Keras takes some 25 per tensor
    )
    chunk_bytes: int = 64 << 20  # one HDF5 chunk beyond the size of its dataset


UNLIMITED = Limits(logical_bytes=2**63 - 1, memory=2**63 - 1)
_TENSOR = 512  # bytes of Python objects per tensor


class Budget:
    """Counts the memory and work that one file has caused so far."""

    def __init__(self, path: str | os.PathLike[str], file_bytes: int, limits: Limits) -> None:
        self.path = path
        self.limits = limits
        self.info: dict[str, TensorInfo] = {}
        self._logical = self._built = 0
        self._most_built = limits.memory + 2 * file_bytes
        given = limits.logical_bytes
        self._allowed = max(4 * file_bytes, 1 << 30) if given is None else given

    def spend(self, what: str, amount: int, allowed: int, member: str | None = None) -> None:
        """Raises BudgetExceeded when amount > allowed."""
        if amount > allowed:
            raise BudgetExceeded(
                self.path, f"{what} is {amount:,}, the limit is {allowed:,}", _RAISE, member
            )

    def build(self, amount: int, what: str, member: str | None = None) -> None:
        """Charges memory, before it is taken, for objects built from the file.

        Raises:
            BudgetExceeded: all charges of the file together are more than `Limits.memory` and twice
                its size.
        """
        self._built += amount
        if (
            self._built > self._most_built
        ):  # check here, because the message takes longer than the sum
            self.spend(f"the memory to build with {what}", self._built, self._most_built, member)

    def give_back(self, amount: int) -> None:
        """Takes back the charge of objects that were freed."""
        self._built -= amount

    def grow(self, file_bytes: int) -> None:
        """Allows the memory of one more file of the same checkpoint."""
        self._most_built += 2 * file_bytes

    def tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> TensorInfo:
        """Registers a declared tensor.

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
        # Zero-size arrays must stay below NumPy's own limit on the product of the other axes.
        strides_bytes = math.prod(size for size in shape if size) * dtype.itemsize
        self.spend("the byte size", strides_bytes, 2**63 - 1, name)
        info = TensorInfo(shape, dtype)
        self._logical += info.nbytes
        self.spend("the total byte size of all tensors", self._logical, self._allowed, name)
        self.info[name] = info
        self.spend("the number of tensors", len(self.info), self.limits.tensors)
        return info


def is_text(text: str) -> bool:
    """True if a string can be written as UTF-8: without surrogates."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def check_name(path: str | os.PathLike[str], name: str, limits: Limits) -> None:
    """Raises unless a name is printable, short, and harmless as a relative path.

    Raises:
        MalformedFile, BudgetExceeded, PathEscape.
    """
    if not name:
        raise MalformedFile(path, "a tensor has an empty name", _RENAME)
    if len(name) > limits.name_bytes or len(name.encode("utf-8", "replace")) > limits.name_bytes:
        raise BudgetExceeded(path, f"a name is longer than {limits.name_bytes} bytes", _RAISE, name)
    if any(ord(c) < 32 or ord(c) == 127 for c in name) or not is_text(name):
        raise MalformedFile(path, "a name has control or surrogate characters", _RENAME, name)
    parts = name.replace("\\", "/").split("/")
    if not parts[0] or any(part in (".", "..") for part in parts):
        raise PathEscape(path, f"the name {shown(name)} is a path", _RENAME)
