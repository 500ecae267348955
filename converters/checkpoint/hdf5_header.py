"""The messages of an HDF5 object header, read without the HDF5 library.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#ObjectHeader
"""

import struct
from collections.abc import Iterator

from jaxmha.converters.checkpoint.source import Source

LINK_INFO, EXTERNAL_FILES, LAYOUT, ATTRIBUTE, CONTINUATION, SYMBOL_TABLE = (
    0x02,
    0x07,
    0x08,
    0x0C,
    0x10,
    0x11,
)
ATTRIBUTE_INFO = 0x15
UNDEFINED = b"\xff" * 8  # the address of what is not there
_MOST_BLOCKS, _LARGEST_BLOCK = 64, 1 << 20


def messages(source: Source, address: int) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and content of the messages of an object header, of either version.

    Raises:
        ValueError, IndexError or struct.error: damaged.
    """
    prefix = source.read(address, min(64, source.size - address))
    new = prefix.startswith(b"OHDR")
    if new:
        at = 6 + 16 * (prefix[5] >> 5 & 1) + 4 * (prefix[5] >> 4 & 1)
        width = 1 << (prefix[5] & 3)
        size = int.from_bytes(prefix[at : at + width], "little")
        blocks = [(address + at + width, size)]
        header = 4 + 2 * (prefix[5] >> 2 & 1)
    else:
        if prefix[0] != 1:
            raise ValueError(f"object header version {prefix[0]}")
        blocks = [(address + 16, struct.unpack_from("<L", prefix, 8)[0])]
        header = 8
    for begin, size in blocks:
        if len(blocks) > _MOST_BLOCKS or size > _LARGEST_BLOCK:
            raise ValueError("its header is too large")
        block = source.read(begin, size)
        at = 0
        while at + header <= size:
            if new:
                kind, length, flags = struct.unpack_from("<BHB", block, at)
            else:
                kind, length, flags = struct.unpack_from("<HHB", block, at)
            body = block[at + header : at + header + length]
            at += header + length
            if at > size:
                raise ValueError("its header is cut short")
            if kind == CONTINUATION:
                begin, length = struct.unpack_from("<QQ", body)
                # Continuations of version 2 have a signature before and a checksum behind.
                blocks.append((begin + 4, length - 8) if new else (begin, length))
            yield kind, flags, body
