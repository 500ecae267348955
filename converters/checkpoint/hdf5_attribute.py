"""Short text attributes of HDF5 objects, read without the HDF5 library.

The library trusts the lengths of texts: a damaged one makes it allocate 4 GiB, or follow a chain
that never ends inside a call that nothing can interrupt.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
"""

import struct

from jaxmha.converters.checkpoint.errors import MalformedFile, UnsupportedFormat
from jaxmha.converters.checkpoint.hdf5_header import (
    ATTRIBUTE,
    ATTRIBUTE_INFO,
    UNDEFINED,
    messages,
)
from jaxmha.converters.checkpoint.source import Source

_SHARED = 0x02
_TEXT, _VARIABLE = 3, 9  # datatype classes
_LONGEST_TEXT = 1024
_AGAIN = "save it again with model.save_weights"


def text_attribute(source: Source, address: int, key: str, member: str) -> str | None:
    """The attribute of the object whose header is at an address; None where there is none.

    Raises:
        MalformedFile: damaged, not a scalar text, or too long.
        UnsupportedFormat: the object has so many attributes that they lie elsewhere.
    """
    try:
        for kind, flags, body in messages(source, address):
            if kind == ATTRIBUTE_INFO and body[2 + 2 * (body[1] & 1) :][:8] != UNDEFINED:
                problem = "its attributes are stored densely"
                raise UnsupportedFormat(source.path, problem, _AGAIN, member)
            if kind == ATTRIBUTE:
                name, datatype, dataspace, data = _parts(body)
                if name == key.encode():
                    if flags & _SHARED or not _is_scalar(dataspace):
                        raise ValueError("not one text")
                    return _text(source, datatype, data)
    except (ValueError, IndexError, struct.error) as e:
        if isinstance(e, MalformedFile | UnsupportedFormat):
            raise
        problem = f"the attribute {key!r} is not a short text ({e})"
        raise MalformedFile(source.path, problem, _AGAIN, member) from e
    return None


def _parts(body: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Name, datatype, dataspace and data of an attribute message."""
    version, _, *sizes = struct.unpack_from("<BB3H", body)
    if version not in (1, 2, 3):
        raise ValueError(f"version {version}")
    at = 9 if version == 3 else 8
    parts = []
    for size in sizes:
        parts.append(body[at : at + size])
        at += -(-size // 8) * 8 if version == 1 else size
    return parts[0].rstrip(b"\0"), parts[1], parts[2], body[at:]


def _is_scalar(dataspace: bytes) -> bool:
    version, rank = dataspace[0], dataspace[1]
    return rank == 0 and (version == 1 or (version == 2 and dataspace[3] == 0))


def _text(source: Source, datatype: bytes, data: bytes) -> str:
    kind, variant = datatype[0] & 15, datatype[1] & 15
    (size,) = struct.unpack_from("<L", datatype, 4)
    if kind == _TEXT:
        raw = data[:size] if size <= len(data) else b""
    elif kind == _VARIABLE and variant == 1:
        size, address, index = struct.unpack_from("<LQL", data)
        raw = _heap_object(source, address, index, size) if size else b""
    else:
        raise ValueError(f"datatype class {kind}")
    if len(raw) != size or size > _LONGEST_TEXT:
        raise ValueError(f"{size} bytes")
    return raw.rstrip(b"\0 " if kind == _TEXT else b"\0").decode()


def _heap_object(source: Source, address: int, index: int, size: int) -> bytes:
    """The beginning of one object in a heap collection, a chain of objects by length."""
    signature, end = struct.unpack("<4s4xQ", source.read(address, 16))
    if signature != b"GCOL" or address + end > source.size or size > _LONGEST_TEXT:
        raise ValueError("the heap is damaged")
    at = 16
    for _ in range(1 << 16):  # indices have 16 bits
        if at + 16 > end:
            break
        found, length = struct.unpack("<H6xQ", source.read(address + at, 16))
        if found == index and size <= length <= end - at - 16:
            return source.read(address + at + 16, size)
        if found == 0:  # free space ends the chain
            break
        at += 16 + -(-length // 8) * 8
    raise ValueError("the heap is damaged")
