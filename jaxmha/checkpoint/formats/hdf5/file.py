"""Reads the bytes and the superblock of an HDF5 file; each byte may belong to one structure only.

Every structure claims its bytes here, so that overlapping nodes, loops and lists with a common tail
are refused.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
"""

import contextlib
import struct
from array import array
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint.errors import (
    BudgetExceeded,
    CheckpointError,
    ForbiddenContent,
    MalformedFile,
    UnsupportedFormat,
)
from jaxmha.checkpoint.formats.hdf5.checksum import lookup3
from jaxmha.checkpoint.limits import Limits
from jaxmha.checkpoint.source import Source

MAGIC = b"\x89HDF\r\n\x1a\n"
UNDEFINED = 2**64 - 1  # the address of a missing structure
AGAIN = "save it again with model.save_weights"
_BYTES_PER_STEP = 8  # checksumming this many is one step of `Limits.steps`


class File:
    """Reads and claims byte ranges of an HDF5 file. Error messages name the object `member`."""

    def __init__(self, source: Source, limits: Limits) -> None:
        self.source, self.limits = source, limits
        self.member = "/"
        self._starts, self._sizes = array("Q"), array("Q")  # of the claimed byte ranges
        self._taken = self._steps = 0
        self.end = source.size
        with self.damage("/"):
            self.root = self._superblock()

    @contextlib.contextmanager
    def damage(self, member: str) -> Iterator[None]:
        """Converts ValueError, IndexError and struct.error to MalformedFile of `member`."""
        self.member = member or "/"
        try:
            yield
        except CheckpointError:
            raise
        except (ValueError, IndexError, struct.error) as e:
            raise MalformedFile(self.source.path, f"is damaged ({e})", AGAIN, self.member) from e

    def fail(self, kind: type[CheckpointError], problem: str, remedy: str = AGAIN) -> NoReturn:
        """Raises an error about the current member."""
        raise kind(self.source.path, problem, remedy, self.member)

    def forbid(self, problem: str) -> NoReturn:
        """Raises ForbiddenContent for a feature that checkpoints do not use."""
        self.fail(ForbiddenContent, problem)

    def step(self, count: int = 1) -> None:
        """Counts steps of work; `Limits.steps` is their limit.

        Raises:
            BudgetExceeded.
        """
        self._steps += count
        if self._steps > self.limits.steps:
            remedy = "if the file is trusted, raise checkpoint.Limits(steps=...)"
            problem = f"its structure takes more than {self.limits.steps:,} steps to read"
            self.fail(BudgetExceeded, problem, remedy)

    def claim(self, address: int, size: int) -> None:
        """Claims a byte range for one structure.

        Raises:
            ValueError: the range exceeds the file, or all claims together are larger than the file.
        """
        if address + size > self.end:
            raise ValueError(f"bytes {address} to {address + size} of {self.end} are needed")
        self._taken += size
        if self._taken > self.end:
            raise ValueError("its parts overlap: together they are larger than the file")
        self._starts.append(address)
        self._sizes.append(size)

    def claim_all(self, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> None:
        """Claims several ranges at once."""
        end = np.uint64(self.end)
        if (addresses > end).any() or (sizes > end - np.minimum(addresses, end)).any():
            raise ValueError("a chunk is outside the file")
        self._taken += sum(sizes.tolist())
        if self._taken > self.end:
            raise ValueError("its chunks overlap: together they are larger than the file")
        self._starts.frombytes(addresses.tobytes())
        self._sizes.frombytes(sizes.tobytes())

    def take(self, address: int, size: int) -> bytes:
        """Claims and reads the bytes of a structure."""
        self.step()
        self.claim(address, size)
        return self.source.read(address, size)

    def peek(self, address: int, size: int) -> bytes:
        """Reads up to `size` bytes without claiming them, to learn the length of a structure."""
        self.step()
        if address >= self.end:
            raise ValueError(f"the address {address} is behind the end of the file, {self.end}")
        return self.source.read(address, min(size, self.end - address))

    def checked(self, address: int, size: int, signature: bytes, version: int = 0) -> bytes:
        """Claims and reads a structure that begins with a signature and ends with a checksum."""
        raw = self.take(address, size)
        if raw[:4] != signature or (signature not in (b"OHDR", b"OCHK") and raw[4] != version):
            raise ValueError(f"no {signature.decode()} of version {version} at {address}")
        self.verify(raw)
        return raw

    def verify(self, raw: bytes) -> None:
        """Raises ValueError unless the last bytes of `raw` are the checksum of the others."""
        self.step(len(raw) // _BYTES_PER_STEP)
        if len(raw) < 4 or lookup3(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
            raise ValueError(f"the checksum of {raw[:4]!r} does not match")

    def check_overlaps(self) -> None:
        """Raises ValueError if two claimed ranges overlap."""
        starts, sizes = np.array(self._starts), np.array(self._sizes)
        order = np.lexsort((sizes, starts))  # at equal starts, empty ranges first
        starts, ends = starts[order], (starts + sizes)[order]
        if (starts[1:] < ends[:-1]).any():
            shared = starts[1:][starts[1:] < ends[:-1]][0]
            raise ValueError(f"two of its parts share the bytes at {shared}")

    def _superblock(self) -> int:
        """Reads the superblock; returns the address of the root group.

        Raises:
            UnsupportedFormat, ForbiddenContent; ValueError or struct.error: damaged.
        """
        block = self.peek(0, 96)
        if len(block) < 48 or not block.startswith(MAGIC) or block[8] > 3:
            raise ValueError("no HDF5 superblock")
        new = block[8] >= 2
        sizes = 9 if new else 13
        if block[sizes : sizes + 2] != b"\x08\x08":
            self.fail(UnsupportedFormat, "HDF5 addresses of an unusual size")
        if new:
            base, extension, end, root = struct.unpack_from("<4Q", block, 12)
            if block[11]:
                raise ValueError("it was not closed by its writer")
            self.verify(block[:48])
            self.claim(0, 48)
            drivers = UNDEFINED
        else:
            at = 28 if block[8] == 1 else 24
            base, _, end, drivers = struct.unpack_from("<4Q", block, at)
            extension = UNDEFINED
            (root,) = struct.unpack_from("<Q", block, at + 40)
            if any((block[9], block[10], block[12])):
                raise ValueError("an unknown version in its superblock")
            self.claim(0, at + 32 + 40)
        if base:
            self.fail(UnsupportedFormat, "its addresses do not begin at the start of the file")
        self.extension = int(extension)
        if drivers != UNDEFINED:
            self.forbid("a file driver, which may name other files")
        if end > self.source.size:
            raise ValueError(f"it is cut short: {self.source.size} of {end} bytes are present")
        self.end = end
        return int(root)
