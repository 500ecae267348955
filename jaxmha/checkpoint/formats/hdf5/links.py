"""The links of an HDF5 group. Only hard links are allowed: addresses in the same file.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#OldGroups
"""

import struct
from collections.abc import Iterator

from jaxmha.checkpoint.errors import AmbiguousFile
from jaxmha.checkpoint.formats.hdf5.file import UNDEFINED, File
from jaxmha.checkpoint.formats.hdf5.header import LINK_INFO, SYMBOL_TABLE, Header
from jaxmha.checkpoint.formats.hdf5.heap import Dense, Names
from jaxmha.checkpoint.formats.hdf5.tree import GROUPS, new_records, old_leaves

_HARD, _SOFT, _EXTERNAL = 0, 1, 64
_WHAT = {_SOFT: "a soft link", _EXTERNAL: "a link to another file"}
_BY_NAME = 5  # record type of a version 2 B-tree that indexes links by name
_TRACKED = 0x01  # flag: the creation order of links is tracked


def links(file: File, header: Header) -> list[tuple[bytes, int]]:
    """The name and address of each link, in creation order if it is stored, else sorted by name.

    Raises:
        ForbiddenContent: a link that is not hard.  AmbiguousFile: two links with one name.
        ValueError, IndexError or struct.error: damaged.
    """
    if SYMBOL_TABLE in header.one:
        if LINK_INFO in header.one or header.links:
            raise ValueError("it is a group in two ways")
        return _unique(file, list(_old(file, header.one[SYMBOL_TABLE])))
    info = header.one[LINK_INFO]
    version, flags = info[:2]
    if version:
        raise ValueError(f"links of version {version}")
    heap, tree = struct.unpack_from("<QQ", info, 2 + 8 * (flags & _TRACKED))
    bodies = list(header.links)
    if heap != UNDEFINED:
        objects = Dense(file, heap)
        for _, record in new_records(file, tree, (_BY_NAME,)):
            bodies.append(objects.take(record[4:]))
    found = [_link(file, body) for body in bodies]
    found.sort(key=lambda entry: (entry[0] if flags & _TRACKED else 0, entry[1]))
    return _unique(file, [(name, address) for _, name, address in found])


def _unique(file: File, found: list[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    if len({name for name, _ in found}) != len(found):
        file.fail(AmbiguousFile, "two of its links have one name")
    return found


def _old(file: File, body: bytes) -> Iterator[tuple[bytes, int]]:
    tree, heap = struct.unpack_from("<QQ", body)
    names, last = Names(file, heap), b""
    for _, address in old_leaves(file, tree, GROUPS, 8):
        signature, version, used = struct.unpack("<4sBxH", file.peek(address, 8))
        if signature != b"SNOD" or version != 1:
            raise ValueError("no node of names")
        raw = file.take(address, 8 + 40 * used)
        for at in range(8, len(raw), 40):
            file.step()
            place, target, cached = struct.unpack_from("<QQL", raw, at)
            if cached not in (0, 1):
                file.forbid(_WHAT[_SOFT])
            name = names.take(place)
            if last and name <= last:
                raise ValueError("its names are not in order")
            last = name
            yield name, target


def _link(file: File, body: bytes) -> tuple[int, bytes, int]:
    """Parses a link message: creation order, name and address."""
    version, flags = body[:2]
    at, kind, order = 2, _HARD, 0
    if version != 1:
        raise ValueError(f"a link of version {version}")
    if flags & 0x08:
        kind, at = body[at], at + 1
    if flags & 0x04:
        (order,), at = struct.unpack_from("<q", body, at), at + 8
    at += flags >> 4 & 1  # skip the character set: names must be UTF-8
    width = 1 << (flags & 3)
    length, at = int.from_bytes(body[at : at + width], "little"), at + width
    if kind != _HARD:
        file.forbid(_WHAT.get(kind, "a user-defined link"))
    if at + length + 8 > len(body) or length > file.limits.name_bytes:
        raise ValueError("a link is cut short, or its name is too long")
    (address,) = struct.unpack_from("<Q", body, at + length)
    return order, body[at : at + length], address
