"""Reads the addresses of the chunks of an HDF5 dataset from its chunk index.

Layout version 3 has one kind of index, version 4 five others.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#AppC
"""

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint.formats.hdf5.array_index import Run, fixed_array, growing_array
from jaxmha.checkpoint.formats.hdf5.file import UNDEFINED, File
from jaxmha.checkpoint.formats.hdf5.tree import CHUNKS, new_records, old_leaves

_SINGLE, _IMPLICIT, _FIXED, _GROWING, _TREE = range(1, 6)
_SINGLE_FILTERED = 0x02
_STEPS = 4  # steps charged per chunk, since a chunk takes more memory than other structures
_UNLIMITED = 2**64 - 1
_RECORDS, _FILTERED_RECORDS = 10, 11  # record types of version 2 B-trees of chunks


class Grid(NamedTuple):
    """The division of a dataset into chunks."""

    shape: tuple[int, ...]
    largest: tuple[int, ...]  # the maximal shape
    chunk: tuple[int, ...]
    nbytes: int  # bytes of one chunk
    filtered: bool

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @property
    def most(self) -> tuple[int, ...]:
        """The number of chunks along each axis of the largest shape; 0 for an unlimited axis."""
        return tuple(
            0 if n == _UNLIMITED else -(-n // c)
            for n, c in zip(self.largest, self.chunk, strict=True)
        )


class Chunks(NamedTuple):
    """The address, stored bytes and mask of skipped filters of each chunk, in C order."""

    grid: Grid
    addresses: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    masks: NDArray[np.uint32]

    @property
    def bytes(self) -> int:
        """The bytes of all chunks in the file."""
        return sum(self.sizes.tolist())


def find_chunks(file: File, grid: Grid, version: int, body: bytes) -> Chunks:
    """Finds all chunks of a dataset, none of which may be missing.

    Args:
        version: version of the layout message.
        body: the bytes of the layout message that locate the chunk index.

    Raises:
        ValueError or struct.error: damaged, or a chunk is missing.
    """
    count = math.prod(grid.counts)
    file.step(_STEPS * count)
    if count * (1 if grid.filtered else grid.nbytes) > file.end:
        raise ValueError(f"declares {count} chunks in a file of {file.end} bytes")
    table = _Table(grid, count)
    if count and version == 3:
        _old_tree(file, table, *struct.unpack_from("<Q", body))
    elif count:
        _new_index(file, table, body)
    found = Chunks(grid, table.addresses, table.sizes, table.masks)
    if count and found.addresses.max() == UNDEFINED:
        raise ValueError("a chunk was never written, or is lost")
    if not grid.filtered and (found.sizes != grid.nbytes).any():
        raise ValueError("a chunk of another size")
    file.claim_all(found.addresses, found.sizes)
    return found


class _Table:
    """The chunks found so far, by their position in the grid."""

    def __init__(self, grid: Grid, count: int) -> None:
        self.grid = grid
        self.addresses = np.full(count, UNDEFINED, np.uint64)
        self.sizes = np.full(count, grid.nbytes, np.uint64)
        self.masks = np.zeros(count, np.uint32)

    def put(self, scaled: tuple[int, ...], address: int, size: int, mask: int) -> None:
        """Records the address, stored bytes and filter mask of the chunk at a grid position."""
        at = 0
        for i, n in zip(scaled, self.grid.counts, strict=True):
            if i >= n:
                raise ValueError("a chunk is outside the dataset")
            at = at * n + i
        if self.addresses[at] != UNDEFINED:
            raise ValueError("a chunk is stored twice")
        self.addresses[at], self.sizes[at], self.masks[at] = address, size, mask

    def fill(self, runs: Iterable[Run], entry: int, axis: int) -> None:
        """Records the chunks of all `runs`, whose entries have `entry` bytes.

        Entries are numbered as chunks of the largest shape, with `axis` varying slowest.
        """
        if not (13 <= entry <= 20 if self.grid.filtered else entry == 8):
            raise ValueError(f"its index has entries of {entry} bytes")
        places = self.places(axis)
        order = np.argsort(places)
        ascending = places[order]
        for start, raw in runs:
            if start > ascending[-1]:
                break
            cells = np.frombuffer(raw, np.uint8).reshape(-1, entry)
            first, last = np.searchsorted(ascending, (start, start + len(cells)))
            here = order[first:last]
            cells = cells[places[here] - start]
            self.addresses[here] = _number(cells[:, :8])
            if self.grid.filtered:
                self.sizes[here] = _number(cells[:, 8:-4])
                self.masks[here] = _number(cells[:, -4:])

    def places(self, axis: int) -> NDArray[np.int64]:
        """The number of each chunk in the grid of the largest shape; `axis` varies slowest."""
        counts, most = self.grid.counts, self.grid.most
        order = [axis, *(i for i in range(len(counts)) if i != axis)]
        down, step = [0] * len(counts), 1
        for i in reversed(order):
            down[i] = step
            step *= most[i] if i != order[0] else 1
        last = sum((n - 1) * s for n, s in zip(counts, down, strict=True))
        if not 0 <= last < 2**62 or 0 in (most[i] for i in order[1:]):
            raise ValueError("its shape may become too large for its index")
        places = np.zeros(1, np.int64)
        for n, s in zip(counts, down, strict=True):
            along = np.arange(n) * (s if n > 1 else 0)
            places = (places[:, None] + along).reshape(-1)
        return places


def _number(cells: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Decodes each row of up to 8 bytes as a little-endian number."""
    wide = np.zeros((len(cells), 8), np.uint8)
    wide[:, : cells.shape[1]] = cells
    return wide.view("<u8").reshape(-1)


def _old_tree(file: File, table: _Table, root: int) -> None:
    if root == UNDEFINED:
        return
    chunk = table.grid.chunk
    for key, address in old_leaves(file, root, CHUNKS, 16 + 8 * len(chunk)):
        size, mask, *offsets = struct.unpack(f"<LL{len(chunk) + 1}Q", key)
        scaled = tuple(at // n for at, n in zip(offsets, chunk, strict=False))
        if [*(i * n for i, n in zip(scaled, chunk, strict=True)), 0] != offsets:
            raise ValueError("a chunk does not begin at a multiple of its size")
        table.put(scaled, address, size, mask)


def _new_index(file: File, table: _Table, body: bytes) -> None:
    flags, kind, at = body[0], body[1], 2
    grid = table.grid
    if flags & ~_SINGLE_FILTERED or (flags and kind != _SINGLE):
        file.forbid("chunks at the edge that are stored in another way")
    if kind == _SINGLE:
        size, mask = grid.nbytes, 0
        if bool(flags) != grid.filtered:
            raise ValueError("one chunk with other filters than the dataset")
        if flags:
            size, mask = struct.unpack_from("<QL", body, at)
            at += 12
        (address,) = struct.unpack_from("<Q", body, at)
        table.put(tuple(0 for _ in grid.chunk), address, size, mask)
        if len(table.addresses) != 1:
            raise ValueError("one chunk where there are several")
        return
    lengths = {_IMPLICIT: 0, _FIXED: 1, _GROWING: 5, _TREE: 6}
    if kind not in lengths:
        file.forbid(f"an unknown index of chunks, {kind}")
    parameters, at = body[at : at + lengths[kind]], at + lengths[kind]
    (address,) = struct.unpack_from("<Q", body, at)
    if address == UNDEFINED:
        return
    if kind == _IMPLICIT:
        if 0 in grid.most or grid.filtered:
            raise ValueError("chunks in one piece that may grow, or that filters have changed")
        places = table.places(0)
        if int(places[-1]) * grid.nbytes + address > file.end:
            raise ValueError("chunks in one piece that is larger than the file")
        table.addresses[...] = places * grid.nbytes + address
    elif kind == _FIXED:
        entry, runs = fixed_array(file, address, grid.filtered)
        table.fill(runs, entry, 0)
    elif kind == _GROWING:
        entry, runs = growing_array(file, address, grid.filtered, parameters)
        table.fill(runs, entry, grid.most.index(0))
    else:
        _new_tree(file, table, address)


def _new_tree(file: File, table: _Table, root: int) -> None:
    rank, filtered = len(table.grid.chunk), table.grid.filtered
    kind = _FILTERED_RECORDS if filtered else _RECORDS
    for _, record in new_records(file, root, (kind,)):
        if not (13 <= len(record) - 8 * rank <= 20 if filtered else len(record) == 8 + 8 * rank):
            raise ValueError("a chunk of another rank")
        (address,), size, mask = struct.unpack_from("<Q", record), table.grid.nbytes, 0
        places = record[-8 * rank :]
        if filtered:
            size = int.from_bytes(record[8 : -8 * rank - 4], "little")
            (mask,) = struct.unpack_from("<L", record, len(record) - 8 * rank - 4)
        table.put(struct.unpack(f"<{rank}Q", places), address, size, mask)
