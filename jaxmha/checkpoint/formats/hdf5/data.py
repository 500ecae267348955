"""Checks where the elements of an HDF5 dataset are stored, and reads them.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#LayoutMessage
"""

import math
import struct
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint.errors import MalformedFile, UnsupportedFormat
from jaxmha.checkpoint.formats.hdf5.chunks import Chunks, Grid, find_chunks
from jaxmha.checkpoint.formats.hdf5.file import UNDEFINED, File
from jaxmha.checkpoint.formats.hdf5.filter import (
    Filter,
    most,
    pipeline,
    shuffled,
    undo,
    unpacking_steps,
)
from jaxmha.checkpoint.formats.hdf5.header import FILL, FILTERS, LAYOUT, Header
from jaxmha.checkpoint.formats.hdf5.type import Kind
from jaxmha.checkpoint.limits import Budget
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.tensor import TensorInfo, from_bytes, over

_COMPACT, _CONTIGUOUS, _CHUNKED, _VIRTUAL = range(4)
_SLAB = 4 << 20  # bytes per read when only a box of the elements is needed
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Dataset:
    """A dataset whose storage was checked; `stored` is its bytes, their address, or its chunks."""

    info: TensorInfo
    kind: Kind
    stored: bytes | int | Chunks
    filters: tuple[Filter, ...] = ()

    @property
    def overhang(self) -> int:
        """The bytes that are read or inflated in addition to the bytes of the dataset."""
        if not isinstance(self.stored, Chunks):
            return 0
        grid = self.stored.grid
        inflated = math.prod(grid.counts) * grid.nbytes
        return max(inflated, self.stored.bytes) - self.info.nbytes

    @property
    def steps(self) -> int:
        """The steps of work to undo the filters, as `File.step` counts them."""
        if not isinstance(self.stored, Chunks):
            return 0
        return unpacking_steps(self.filters, self.stored.bytes)

    @property
    def buffers(self) -> int:
        """The bytes in memory besides the dataset during a read: a chunk, and its shuffled form."""
        if not isinstance(self.stored, Chunks):
            return 0
        return self.stored.grid.nbytes * (2 if shuffled(self.filters) else 1)

    def view(self, source: Source) -> np.ndarray | None:
        """A view of the elements in a mapped file; None if chunked or not in native byte order."""
        if not isinstance(self.stored, int) or self.kind.order != sys.byteorder:
            return None
        return over(source, self.stored, *self.info)

    def read(self, file: File, name: str, box: Box = ()) -> np.ndarray:
        """Reads the elements inside `box`; an empty box reads all.

        Raises:
            MalformedFile, UnreadableFile, IntegrityError.
        """
        source, (shape, dtype) = file.source, self.info
        whole = all(part == slice(0, n) for part, n in zip(box, shape, strict=False))
        if whole:
            box = tuple(slice(0, n) for n in shape)
        box = tuple(slice(part.start, max(part.start, part.stop)) for part in box)
        raw: NDArray[np.uint8]
        if isinstance(self.stored, int) and whole:
            raw = source.read_array(self.stored, self.info.nbytes)
        else:
            out = np.empty([part.stop - part.start for part in box], _bits(dtype))
            if isinstance(self.stored, bytes):
                held = np.frombuffer(self.stored, out.dtype).reshape(shape)
                np.copyto(out, held[box])
            elif isinstance(self.stored, int):
                _copy_box(source, self.stored, shape, box, out)
            else:
                with file.damage(name):
                    self._copy_chunks(source, self.stored, box, out)
            raw = out.reshape(-1).view(np.uint8)
            shape = out.shape
        return from_bytes(raw, dtype, self.kind.order, source.path, name).reshape(shape)

    def _copy_chunks(self, source: Source, chunks: Chunks, box: Box, out: np.ndarray) -> None:
        """Reads the chunks that overlap the box; copies their elements inside the box to `out`."""
        counts, chunk = chunks.grid.counts, chunks.grid.chunk
        near = [
            range(part.start // n, -(-part.stop // n)) for part, n in zip(box, chunk, strict=True)
        ]
        if not out.size:
            return
        for place in np.ndindex(*map(len, near)):
            scaled = [steps[i] for steps, i in zip(near, place, strict=True)]
            at = int(np.ravel_multi_index(scaled, counts))
            where, mask = (int(chunks.addresses[at]), int(chunks.sizes[at])), int(chunks.masks[at])
            # Assign the compressed bytes to no name here, so that `undo` can free them early.
            raw = undo(source.read_array(*where), self.filters, mask, chunks.grid.nbytes)
            origin = [i * n for i, n in zip(scaled, chunk, strict=True)]
            spans = [
                (max(o, part.start), min(o + n, part.stop))
                for o, n, part in zip(origin, chunk, box, strict=True)
            ]
            into = tuple(
                slice(a - p.start, b - p.start) for (a, b), p in zip(spans, box, strict=True)
            )
            of = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, origin, strict=True))
            out[into] = raw.view(out.dtype).reshape(chunk)[of]


def dataset(
    file: File,
    header: Header,
    info: TensorInfo,
    largest: tuple[int, ...],
    kind: Kind,
    budget: Budget,
) -> Dataset:
    """Checks the storage of a dataset; `largest` is its maximal shape.

    Raises:
        ForbiddenContent, UnsupportedFormat, MalformedFile, BudgetExceeded.
        ValueError, IndexError or struct.error: damaged.
    """
    body = header.one[LAYOUT]
    if FILL in header.one and not 1 <= header.one[FILL][0] <= 3:
        raise ValueError(f"a fill value of version {header.one[FILL][0]}")
    version, layout = body[:2]
    if version in (1, 2):
        file.fail(UnsupportedFormat, "its layout is of before HDF5 1.6.3")
    if layout == _VIRTUAL:
        file.forbid("a virtual dataset, made of other files")
    if version not in (3, 4) or layout > _VIRTUAL:
        file.forbid(f"an unknown storage layout, {layout} of version {version}")
    filters = pipeline(file, header.one[FILTERS]) if FILTERS in header.one else ()
    if layout == _CHUNKED:
        return _chunked(file, body, info, largest, kind, filters, budget)
    if filters:
        raise ValueError("filters without chunks")
    if layout == _COMPACT:
        (size,) = struct.unpack_from("<H", body, 2)
        stored: bytes | int = body[4 : 4 + size]
        size = len(body[4 : 4 + size])
    else:
        address, size = struct.unpack_from("<QQ", body, 2)
        stored = address
        if address == UNDEFINED:
            stored, size = b"", 0
        else:
            file.claim(address, size)
    if size != info.nbytes:
        file.fail(MalformedFile, f"declares {info.nbytes} bytes and stores {size}")
    return Dataset(info, kind, stored)


def _chunked(
    file: File,
    body: bytes,
    info: TensorInfo,
    largest: tuple[int, ...],
    kind: Kind,
    filters: tuple[Filter, ...],
    budget: Budget,
) -> Dataset:
    if body[0] == 3:
        # In version 3, the address of the index is between the rank and the chunk shape.
        rank, rest = body[2], body[3:11]
        sizes = struct.unpack_from(f"<{rank}L", body, 11)
    else:
        flags, rank, width = body[2:5]
        if not 1 <= width <= 8:
            raise ValueError(f"chunk sizes of {width} bytes")
        end = 5 + rank * width
        sizes = tuple(
            int.from_bytes(body[at : at + width], "little") for at in range(5, end, width)
        )
        rest = bytes([flags]) + body[end:]
    chunk = sizes[:-1]
    if len(chunk) != len(info.shape) or not chunk or sizes[-1] != info.dtype.itemsize or 0 in chunk:
        raise ValueError(f"chunks of {sizes} in a dataset of {info.shape}")
    nbytes = math.prod(sizes)
    allowed = info.nbytes + file.limits.chunk_bytes
    budget.spend("the chunk size", nbytes, allowed, file.member)
    grid = Grid(info.shape, largest, chunk, nbytes, bool(filters))
    chunks = find_chunks(file, grid, body[0], rest)
    if info.nbytes > most(filters, chunks.bytes):
        file.fail(MalformedFile, f"declares {info.nbytes} bytes and stores {chunks.bytes}")
    return Dataset(info, kind, chunks, filters)


def _bits(dtype: np.dtype) -> np.dtype:
    """The integer dtype of the same size, which NumPy copies faster than a dtype of ml_dtypes."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.itemsize in (1, 2, 4, 8) else dtype


def _copy_box(source: Source, at: int, shape: tuple[int, ...], box: Box, out: np.ndarray) -> None:
    """Copies a box of an array stored in C order at `at`; reads little more than the box."""
    row = math.prod(shape[1:]) * out.itemsize
    rows = max(1, _SLAB // max(1, row))
    start, stop = box[0].start, box[0].stop
    if not out.size:
        return
    if rows == 1 and len(shape) > 1:
        for i in range(start, stop):
            _copy_box(source, at + i * row, shape[1:], box[1:], out[i - start])
        return
    for i in range(start, stop, rows):
        count = min(rows, stop - i)
        raw = source.read_array(at + i * row, count * row)
        slab = raw.view(out.dtype).reshape(count, *shape[1:])
        out[i - start : i - start + count] = slab[(slice(None), *box[1:])]
