"""Short text attributes of HDF5 objects.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#AttributeMessage
"""

import struct

from jaxmha.checkpoint.errors import MalformedFile
from jaxmha.checkpoint.formats.hdf5.file import UNDEFINED, File
from jaxmha.checkpoint.formats.hdf5.header import ATTRIBUTE_INFO, SHARED, Header
from jaxmha.checkpoint.formats.hdf5.heap import Dense, Texts
from jaxmha.checkpoint.formats.hdf5.tree import new_records

_TEXT, _VARIABLE = 3, 9  # datatype classes
_LONGEST_TEXT = 1024
_BY_NAME = 8  # record type of a version 2 B-tree that indexes attributes by name
_TRACKED = 0x01  # flag: the creation order of attributes is tracked


class Attributes:
    """The attributes of one object, stored in its header or in a fractal heap.

    Raises:
        ForbiddenContent: an attribute is stored in another object.
        ValueError, IndexError or struct.error: damaged, or two attributes with one name.
    """

    def __init__(self, file: File, header: Header, texts: Texts) -> None:
        self.file, self.texts = file, texts
        bodies = list(header.attributes)
        info = header.one.get(ATTRIBUTE_INFO)
        if info is not None:
            heap, tree = struct.unpack_from("<QQ", info, 2 + 2 * (info[1] & _TRACKED))
            if info[0]:
                raise ValueError(f"attributes of version {info[0]}")
            if heap != UNDEFINED:
                objects = Dense(file, heap)
                for _, record in new_records(file, tree, (_BY_NAME,)):
                    if record[8] & SHARED:
                        file.forbid("an attribute that is stored elsewhere")
                    bodies.append(objects.take(record[:8]))
        self._parts: dict[bytes, tuple[int, bytes]] = {}
        for body in bodies:
            start, *sizes = _sizes(body)
            name = body[start : start + sizes[0]].partition(b"\0")[0]
            if name in self._parts:
                raise ValueError("two of its attributes have one name")
            self._parts[name] = start, body

    def __contains__(self, key: str) -> bool:
        return key.encode() in self._parts

    def text(self, key: str) -> str | None:
        """The value of a scalar text attribute; None if the object has no attribute of this name.

        Raises:
            MalformedFile: the attribute is not a scalar text, or is too long.
        """
        if key.encode() not in self._parts:
            return None
        try:
            return self._text(*self._parts[key.encode()])
        except (ValueError, IndexError, struct.error) as e:
            self.file.fail(MalformedFile, f"the attribute {key!r} is not a short text ({e})")

    def _text(self, at: int, body: bytes) -> str:
        version = body[0]
        if version > 1 and body[1]:
            raise ValueError("its type is stored elsewhere")
        parts = []
        for size in _sizes(body)[1:]:
            parts.append(body[at : at + size])
            at += -(-size // 8) * 8 if version == 1 else size
        datatype, dataspace, data = parts[1], parts[2], body[at:]
        if not _is_scalar(dataspace):
            raise ValueError("not one text")
        kind, variant = datatype[0] & 15, datatype[1] & 15
        (size,) = struct.unpack_from("<L", datatype, 4)
        if kind == _TEXT:
            raw = data[:size]
        elif kind == _VARIABLE and variant == 1:
            size, address, index = struct.unpack_from("<LQL", data)
            raw = self.texts.take(address, index, size, _LONGEST_TEXT) if size else b""
        else:
            raise ValueError(f"datatype class {kind}")
        if len(raw) != size or size > _LONGEST_TEXT:
            raise ValueError(f"{size} bytes")
        return raw.rstrip(b"\0 " if kind == _TEXT else b"\0").decode()


def _sizes(body: bytes) -> tuple[int, int, int, int]:
    """The offset of the name in an attribute message; the sizes of name, datatype and dataspace."""
    version, _, *sizes = struct.unpack_from("<BB3H", body)
    if version not in (1, 2, 3):
        raise ValueError(f"an attribute of version {version}")
    return (9 if version == 3 else 8), sizes[0], sizes[1], sizes[2]


def _is_scalar(dataspace: bytes) -> bool:
    version, rank = dataspace[0], dataspace[1]
    return rank == 0 and (version == 1 or (version == 2 and dataspace[3] == 0))
