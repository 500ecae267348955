"""Chunk indexes that are arrays of chunk addresses: the fixed array and the extensible array.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#FArray
"""

import struct
from collections.abc import Iterator

from jaxmha.checkpoint.formats.hdf5.file import UNDEFINED, File

# The number of the first entry, and the bytes of that and the following entries.
Run = tuple[int, bytes]
_PREFIX = 14  # bytes of signature, version, client ID and header address
_CHECKSUM = 4


def fixed_array(file: File, address: int, filtered: bool) -> tuple[int, Iterator[Run]]:
    """Reads a fixed array; returns the size of an entry in bytes, and all entries in order.

    `filtered` is True if the chunks have filters.
    """
    raw = file.checked(address, 28, b"FAHD")
    client, entry, page_bits, count, data = struct.unpack_from("<BBBQQ", raw, 5)
    if client != filtered or page_bits > 32:
        raise ValueError("its index is of chunks of another kind")
    if data == UNDEFINED:
        return entry, iter(())
    page = 1 << page_bits
    paged = count > page
    pages = -(-count // page) if paged else 0
    bitmap = -(-pages // 8)
    rest = 0 if paged else count * entry
    block = file.checked(data, _PREFIX + bitmap + rest + _CHECKSUM, b"FADB")
    _check(block, client, address)
    if not paged:
        return entry, iter([(0, block[_PREFIX:-_CHECKSUM])])
    bits = block[_PREFIX : _PREFIX + bitmap]
    return entry, _pages(file, data + len(block), 0, count, page, entry, bits)


def growing_array(
    file: File, address: int, filtered: bool, parameters: bytes
) -> tuple[int, Iterator[Run]]:
    """Reads an extensible array; returns the size of an entry in bytes, and all entries in order.

    `filtered` is True if the chunks have filters. `parameters` are the parameters in the layout
    message; it raises ValueError if the header of the array has others.
    """
    raw = file.checked(address, 72, b"EAHD")
    client, entry, *shape = struct.unpack_from("<7B", raw, 5)
    bits, first, smallest, pointers, page_bits = shape
    if client != filtered or bytes((bits, first, pointers, smallest, page_bits)) != parameters:
        raise ValueError("its index is of chunks of another kind")
    (block,) = struct.unpack_from("<Q", raw, 60)
    return entry, iter(()) if block == UNDEFINED else _growing(
        file, address, block, client, entry, shape
    )


def _growing(
    file: File, header: int, address: int, client: int, entry: int, shape: list[int]
) -> Iterator[Run]:
    bits, first, smallest, pointers, page_bits = shape
    if not smallest or smallest & (smallest - 1) or not pointers or pointers & (pointers - 1):
        raise ValueError("its index has blocks whose sizes are no powers of 2")
    if bits > 64 or page_bits > 32:
        raise ValueError("its index is too large")
    offset = -(-bits // 8)
    levels = 1 + bits - (smallest.bit_length() - 1)
    direct = 2 * (pointers - 1)  # data blocks whose addresses are in the index block
    begin = 2 * (pointers.bit_length() - 1)  # first level whose addresses are in secondary blocks
    above = max(0, levels - begin)
    size = _PREFIX + first * entry + 8 * (direct + above) + _CHECKSUM
    raw = file.checked(address, size, b"EAIB")
    _check(raw, client, header)
    at = _PREFIX + first * entry
    yield 0, raw[_PREFIX:at]
    blocks = struct.unpack_from(f"<{direct + above}Q", raw, at)
    index, used = first, 0
    for level in range(levels):
        number = 1 << level // 2
        count = smallest << (level + 1) // 2
        page = 1 << page_bits
        pages = count // page if count > page else 0
        init = -(-pages // 8)
        bitmap = b""
        if level < begin:
            named = blocks[used : used + number]
            used += number
            if pages:
                raise ValueError("its index has pages where there cannot be any")
        else:
            upper = blocks[direct + level - begin]
            if upper == UNDEFINED:
                index += number * count
                continue
            length = _PREFIX + offset + number * (init + 8) + _CHECKSUM
            block = file.checked(upper, length, b"EASB")
            _check(block, client, header)
            bitmap = block[_PREFIX + offset :][: number * init]
            named = struct.unpack_from(f"<{number}Q", block, _PREFIX + offset + number * init)
        for i, child in enumerate(named):
            file.step()
            if child != UNDEFINED:
                rest = 0 if pages else count * entry
                block = file.checked(child, _PREFIX + offset + rest + _CHECKSUM, b"EADB")
                _check(block, client, header)
                if pages:
                    end = child + len(block)
                    yield from _pages(file, end, index, count, page, entry, bitmap, i * pages)
                else:
                    yield index, block[_PREFIX + offset : -_CHECKSUM]
            index += count


def _pages(
    file: File,
    address: int,
    index: int,
    count: int,
    page: int,
    entry: int,
    bitmap: bytes,
    bit: int = 0,
) -> Iterator[Run]:
    """Yields the pages of entries after a data block; bits in `bitmap` mark the stored pages."""
    for i, start in enumerate(range(0, count, page), bit):
        size = min(page, count - start) * entry + _CHECKSUM
        file.step()
        if bitmap[i // 8] & 0x80 >> i % 8:
            raw = file.take(address, size)
            file.verify(raw)
            yield index + start, raw[:-_CHECKSUM]
        address += size


def _check(raw: bytes, client: int, header: int) -> None:
    """Raises ValueError unless a block has the client ID and header address of this array."""
    if struct.unpack_from("<BQ", raw, 5) != (client, header):
        raise ValueError("a block of another index")
