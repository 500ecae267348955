"""Datatypes and dataspaces of HDF5; only numbers, complex numbers and Booleans are supported.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#DatatypeMessage
"""

import struct
from typing import Literal, NamedTuple, NoReturn

import numpy as np

from jaxmha.checkpoint.errors import MalformedFile, UnsupportedDtype
from jaxmha.checkpoint.formats.hdf5.file import File
from jaxmha.checkpoint.tensor import BFLOAT16

_INTEGER, _FLOAT, _OPAQUE, _COMPOUND, _ENUMERATION = 0, 1, 5, 6, 8
# Keys: bytes, sign position, exponent position and size, mantissa position and size, bias.
_FLOATS = {
    (2, 15, 10, 5, 0, 10, 15): np.dtype(np.float16),
    (2, 15, 7, 8, 0, 7, 127): BFLOAT16,
    (4, 31, 23, 8, 0, 23, 127): np.dtype(np.float32),
    (8, 63, 52, 11, 0, 52, 1023): np.dtype(np.float64),
}
_NORMALISED = 0x20  # flag: the leading bit of the mantissa is implied, not stored
_BOOLEANS = (b"FALSE", b"TRUE")
Order = Literal["little", "big"]


class Kind(NamedTuple):
    """A dtype and its byte order in the file; if `opaque`, an attribute must name the dtype."""

    dtype: np.dtype
    order: Order = "little"
    opaque: bool = False


def datatype(file: File, body: bytes) -> Kind:
    """The dtype of a datatype message.

    Raises:
        UnsupportedDtype: numbers that NumPy lacks.  ForbiddenContent: not a number type.
        ValueError, IndexError or struct.error: damaged.
    """
    version, kind = body[0] >> 4, body[0] & 15
    (size,) = struct.unpack_from("<L", body, 4)
    if not 1 <= version <= 4:
        raise ValueError(f"a datatype of version {version}")
    if kind in (_INTEGER, _FLOAT):
        return _number(file, body)
    if kind == _OPAQUE:
        if size != BFLOAT16.itemsize:
            no_dtype(file)
        return Kind(BFLOAT16, opaque=True)
    members = int.from_bytes(body[1:3], "little")
    # h5py stores complex numbers as a pair of floats, and Booleans as an enumeration of two values.
    if kind == _COMPOUND and members == 2:
        return _complex(file, body, version, size)
    if kind == _ENUMERATION and members == 2:
        return _boolean(file, body, version)
    _objects(file)


def no_dtype(file: File) -> NoReturn:
    """Raises UnsupportedDtype for opaque bytes whose dtype the file does not name."""
    file.fail(UnsupportedDtype, "bytes of a dtype that the file does not name")


def _objects(file: File) -> NoReturn:
    file.forbid("holds objects, text or records, not numbers")


def _number(file: File, body: bytes) -> Kind:
    kind, bits, (size,) = body[0] & 15, body[1], struct.unpack_from("<L", body, 4)
    order: Order = "big" if bits & 1 else "little"
    offset, precision = struct.unpack_from("<HH", body, 8)
    if (offset, precision) == (0, 8 * size):
        if kind == _INTEGER and size in (1, 2, 4, 8):
            return Kind(np.dtype(f"{'i' if bits & 8 else 'u'}{size}"), order)
        fields = (size, body[2], *struct.unpack_from("<4BL", body, 12)) if kind == _FLOAT else ()
        if fields in _FLOATS and bits & 0x70 == _NORMALISED:
            return Kind(_FLOATS[fields], order)
    file.fail(UnsupportedDtype, f"numbers of {precision} bits in {size} bytes of an unusual form")


def _complex(file: File, body: bytes, version: int, size: int) -> Kind:
    """Parses a compound of two floats named r and i, which is a complex dtype."""
    at, halves = 8, []
    for name in (b"r", b"i"):
        end = body.index(b"\0", at)
        if body[at:end] != name:
            _objects(file)
        at = end + 1 if version >= 3 else at + -(-(end + 1 - at) // 8) * 8
        width = -(-size.bit_length() // 8) if version >= 3 else 4
        place, at = int.from_bytes(body[at : at + width], "little"), at + width
        if version == 1:
            if body[at]:  # the member is an array
                _objects(file)
            at += 28
        if body[at] & 15 != _FLOAT:
            _objects(file)
        halves.append((place, _number(file, body[at:])))
        at += 20
    (begin, real), (middle, imaginary) = halves
    width = real.dtype.itemsize
    if real != imaginary or real.dtype.kind != "f" or width < 4:
        _objects(file)
    if (begin, middle, size) != (0, width, 2 * width):
        _objects(file)
    return Kind(np.dtype(f"c{2 * width}"), real.order)


def _boolean(file: File, body: bytes, version: int) -> Kind:
    """Parses an enumeration of FALSE and TRUE in one byte, which is a Boolean dtype."""
    if _number(file, body[8:]).dtype.itemsize != 1:
        _objects(file)
    at, names = 20, []
    for _ in _BOOLEANS:
        end = body.index(b"\0", at)
        names.append(body[at:end])
        at = end + 1 if version >= 3 else at + -(-(end + 1 - at) // 8) * 8
    if (*names, body[at : at + 2]) != (*_BOOLEANS, b"\0\1"):
        _objects(file)
    return Kind(np.dtype(np.bool_))


def dataspace(file: File, body: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parses a dataspace message: the shape, and the maximal shape.

    Raises:
        MalformedFile: the dataspace has no shape.  ValueError, IndexError or struct.error: damaged.
    """
    version, rank, flags = body[:3]
    if version not in (1, 2) or flags > 1:
        raise ValueError(f"a shape of version {version} with flags {flags:#x}")
    if version == 2 and body[3] == 2:
        file.fail(MalformedFile, "the dataset has no shape")
    if version == 2 and body[3] != (rank > 0):
        raise ValueError("a shape of an unknown kind")
    at = 8 if version == 1 else 4
    shape = struct.unpack_from(f"<{rank}Q", body, at)
    return shape, struct.unpack_from(f"<{rank}Q", body, at + 8 * rank) if flags else shape
