"""The messages of an HDF5 object header, of either version.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#ObjectHeader
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from jaxmha.checkpoint.formats.hdf5.file import File

NIL, DATASPACE, LINK_INFO, DATATYPE, OLD_FILL, FILL, LINK, EXTERNAL_FILES = range(8)
LAYOUT, GROUP_INFO, FILTERS, ATTRIBUTE = 0x08, 0x0A, 0x0B, 0x0C
CONTINUATION, SYMBOL_TABLE, ATTRIBUTE_INFO = 0x10, 0x11, 0x15
# Comments, times and reference counts do not affect the data.
_IDLE = frozenset({NIL, 0x0D, 0x0E, 0x12, 0x16})
_KNOWN = frozenset(
    {DATASPACE, LINK_INFO, DATATYPE, OLD_FILL, FILL, LINK, LAYOUT, GROUP_INFO, FILTERS}
) | {ATTRIBUTE, SYMBOL_TABLE, ATTRIBUTE_INFO}
_REPEATED = frozenset({LINK, ATTRIBUTE})
SHARED = 0x02
_FREE_SPACE = 0x17
_PREFIX = 64
_STEPS = 10  # steps charged per object, in addition to its structures


class Header(NamedTuple):
    """The messages of one object: unrepeated messages by type, links, and attributes."""

    one: dict[int, bytes]
    links: list[bytes]
    attributes: list[bytes]


def read_header(file: File, address: int) -> Header:
    """The messages of the object header at an address.

    Raises:
        ForbiddenContent: a message of an unknown kind, or one stored in another object.
        ValueError, IndexError or struct.error: damaged.
    """
    file.step(_STEPS)
    header = Header({}, [], [])
    for kind, flags, body in _messages(file, address):
        if kind in _IDLE:
            continue
        if kind == EXTERNAL_FILES:
            file.forbid("the data is in another file")
        if kind not in _KNOWN:
            file.forbid(f"a header message of the unknown kind {kind:#x}")
        if flags & SHARED:
            what = (
                "its type, a committed one,"
                if kind == DATATYPE
                else f"its header message {kind:#x}"
            )
            file.forbid(f"{what} is stored elsewhere")
        if kind in _REPEATED:
            (header.links if kind == LINK else header.attributes).append(body)
        elif kind in header.one:
            raise ValueError(f"it has the header message {kind:#x} twice")
        else:
            header.one[kind] = body
    return header


def check_extension(file: File, address: int) -> None:
    """Raises unless the superblock extension only describes free space in the file.

    Other messages change the meaning of the file: a cache image that replaces structures, messages
    shared between objects, or a driver for several files.

    Raises:
        ForbiddenContent; ValueError, IndexError or struct.error: damaged.
    """
    for kind, _, _ in _messages(file, address):
        if kind not in (NIL, _FREE_SPACE):
            file.forbid(f"an extension of the superblock of the kind {kind:#x}")


def _messages(file: File, address: int) -> Iterator[tuple[int, int, bytes]]:
    prefix = file.peek(address, _PREFIX)
    return _new(file, address, prefix) if prefix[:4] == b"OHDR" else _old(file, address, prefix)


def _old(file: File, address: int, prefix: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields type, flags and content of each message in an object header of version 1."""
    version, expected, _, size = struct.unpack_from("<BxHLL", prefix)
    if version != 1:
        raise ValueError(f"an object header of version {version}")
    blocks = [file.take(address, 16 + size)[16:]]
    count = 0
    for block in blocks:
        at = 0
        while at + 8 <= len(block):
            kind, length, flags = struct.unpack_from("<HHB", block, at)
            body = block[at + 8 : at + 8 + length]
            at += 8 + length
            count += 1
            file.step()
            if at > len(block) or count > expected:
                raise ValueError("its header is cut short")
            if kind == CONTINUATION:
                blocks.append(file.take(*struct.unpack("<QQ", body)))
            else:
                yield kind, flags, body
    if count != expected:
        raise ValueError(f"its header has {count} of {expected} messages")


def _new(file: File, address: int, prefix: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields type, flags and content of each message in an object header of version 2."""
    version, flags = prefix[4], prefix[5]
    if version != 2 or flags & 0xC0:
        raise ValueError(f"an object header of version {version} with flags {flags:#x}")
    at = 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1)
    width = 1 << (flags & 3)
    size = int.from_bytes(prefix[at : at + width], "little")
    at += width
    blocks = [file.checked(address, at + size + 4, b"OHDR")[at:-4]]
    header = 4 + 2 * (flags >> 2 & 1)  # 2 more if messages have a creation order
    for block in blocks:
        at = 0
        while at + header <= len(block):  # a gap at the end is smaller than a message header
            kind, length, bits = struct.unpack_from("<BHB", block, at)
            body = block[at + header : at + header + length]
            at += header + length
            file.step()
            if at > len(block):
                raise ValueError("its header is cut short")
            if kind == CONTINUATION:
                begin, length = struct.unpack("<QQ", body)
                blocks.append(file.checked(begin, length, b"OCHK")[4:-4])
            else:
                yield kind, bits, body
