"""A toy format: the data of all tensors, one line of JSON for each, and the length of these lines."""

import json
from typing import BinaryIO

import numpy as np

from jaxmha.checkpoint.errors import MalformedFile
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.plan import Contents, WriteJob
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.tensor import from_bytes

MAGIC = b"toy file"


def read(source: Source, limits: Limits) -> Contents:
    """Reads the lines, and each tensor on demand."""
    budget = Budget(source.path, source.size, limits)
    length = int.from_bytes(source.read(source.size - 8, 8), "little")
    if length > source.size - 8 - len(MAGIC):
        raise MalformedFile(source.path, f"the length {length} leaves the file", "copy it again")
    budget.spend("the length", length, limits.header_bytes)
    offset, offsets, digests = len(MAGIC), dict[str, int](), dict[str, str]()
    for line in bytes(source.read(source.size - 8 - length, length)).decode().splitlines():
        name, digest, dtype, shape = json.loads(line)
        info, digests[name] = budget.tensor(name, tuple(shape), np.dtype(dtype)), digest
        offsets[name], offset = offset, offset + info.nbytes

    def load(name: str) -> np.ndarray:
        info = budget.info[name]
        raw = source.read_array(offsets[name], info.nbytes)
        return from_bytes(raw, info.dtype, "little", source.path, name).reshape(info.shape)

    return Contents(budget.info, load, digests=digests)


def check(plan: WriteJob) -> None:
    """Raises for tensors beyond the format: there are none."""


def write(file: BinaryIO, plan: WriteJob) -> None:
    """Writes the data, and then the lines with the digests, which are known by then."""
    file.write(MAGIC)
    for name in plan.info:
        file.writelines(plan.pieces(name))
    lines = "".join(
        json.dumps([name, plan.digests[name], info.dtype.name, info.shape]) + "\n"
        for name, info in plan.info.items()
    ).encode()
    file.write(lines + len(lines).to_bytes(8, "little"))
