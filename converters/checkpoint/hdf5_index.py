"""Indexes of HDF5 groups and chunks, checked before the HDF5 library follows them.

The library walks lists and trees by address without asking whether they end. One that leads back
to itself never returns, inside a call that nothing can interrupt.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
"""

import struct

from jaxmha.converters.checkpoint.errors import (
    ForbiddenContent,
    MalformedFile,
    UnsupportedFormat,
)
from jaxmha.converters.checkpoint.hdf5_header import (
    EXTERNAL_FILES,
    LAYOUT,
    LINK_INFO,
    SYMBOL_TABLE,
    UNDEFINED,
    messages,
)
from jaxmha.converters.checkpoint.source import Source

_GROUP, _CHUNK = 0, 1  # kinds of tree
_CHUNKED, _VIRTUAL = 2, 3
_END_OF_LIST = 1
_AGAIN = "save it again with model.save_weights"


def root_address(source: Source) -> int:
    """The address of the root group.

    Raises:
        MalformedFile, UnsupportedFormat: not a superblock with addresses of 8 bytes.
    """
    block = source.read(0, min(96, source.size))
    # By version: where the two sizes are, the base address, the root group.
    places = {0: (13, 24, 64), 1: (13, 28, 68), 2: (9, 12, 36), 3: (9, 12, 36)}
    if len(block) < 96 or block[8] not in places:
        raise MalformedFile(source.path, "no HDF5 superblock", _AGAIN)
    sizes, base, root = places[block[8]]
    if block[sizes : sizes + 2] != b"\x08\x08" or block[base : base + 8] != bytes(8):
        raise UnsupportedFormat(source.path, "HDF5 addresses of an unusual kind", _AGAIN)
    return int.from_bytes(block[root : root + 8], "little")


def check_index(source: Source, address: int, member: str, limit: int) -> None:
    """Checks that the index of the group or dataset at an address is finite.

    Raises:
        MalformedFile: it is not, or has more than `limit` nodes.
        UnsupportedFormat: an index of a kind that Keras does not write.
        ForbiddenContent: data in other files, whose lists the library follows when it opens them.
    """
    try:
        for kind, _, body in messages(source, address):
            if kind == SYMBOL_TABLE:
                tree, heap = struct.unpack_from("<QQ", body)
                names = _heap(source, heap)
                for node in _leaves(source, tree, _GROUP, 8, limit):
                    _check_names(source, node, names)
            elif kind == LINK_INFO and body[2 + 8 * (body[1] & 1) :][:8] != UNDEFINED:
                problem = "its links are stored densely"
                raise UnsupportedFormat(source.path, problem, _AGAIN, member)
            elif kind == EXTERNAL_FILES:
                raise ForbiddenContent(source.path, "the data is in another file", _AGAIN, member)
            elif kind == LAYOUT and body[1 if body[0] >= 3 else 2] == _VIRTUAL:
                problem = "a virtual dataset, made of other files"
                raise ForbiddenContent(source.path, problem, _AGAIN, member)
            elif kind == LAYOUT and body[1 if body[0] >= 3 else 2] == _CHUNKED:
                if body[0] != 3:
                    problem = "its chunks are indexed in a rare way"
                    raise UnsupportedFormat(source.path, problem, _AGAIN, member)
                if body[3:11] != UNDEFINED:
                    (tree,) = struct.unpack_from("<Q", body, 3)
                    _leaves(source, tree, _CHUNK, 8 + 8 * body[2], limit)
    except (ValueError, IndexError, struct.error) as e:
        if isinstance(e, UnsupportedFormat | ForbiddenContent):
            raise
        reason = e.problem if isinstance(e, MalformedFile) else e
        raise MalformedFile(source.path, f"its index is damaged ({reason})", _AGAIN, member) from e


def _heap(source: Source, address: int) -> bytes:
    """The names of a group. Free blocks between them form a list."""
    signature, size, free, data = struct.unpack("<4s4xQQQ", source.read(address, 32))
    if signature != b"HEAP":
        raise ValueError("no heap of names")
    names = source.read(data, size)
    for _ in range(size // 16 + 1):
        if free == _END_OF_LIST:
            return names
        if free + 16 > size:
            break
        (free,) = struct.unpack_from("<Q", names, free)
    raise ValueError("the list of free blocks does not end")


def _leaves(source: Source, root: int, kind: int, key: int, limit: int) -> list[int]:
    """The addresses below the lowest nodes of a tree, every node of which is seen once."""
    leaves: list[int] = []
    seen: set[int] = set()
    todo: list[tuple[int, int | None]] = [(root, None)]
    while todo:
        address, expected = todo.pop()
        signature, found, level, used = struct.unpack("<4sBBH", source.read(address, 8))
        if signature != b"TREE" or found != kind or expected not in (None, level):
            raise ValueError("no tree where one must be")
        if address in seen or len(seen) >= limit:
            raise ValueError("the tree does not end")
        seen.add(address)
        # Keys and children alternate, beginning with a key.
        raw = source.read(address + 24, used * (key + 8))
        children = [
            int.from_bytes(raw[at : at + 8], "little") for at in range(key, len(raw), key + 8)
        ]
        if level:
            todo += [(child, level - 1) for child in children]
        else:
            leaves += children
    if len(set(leaves)) != len(leaves):
        raise ValueError("the tree has a leaf twice")
    return leaves


def _check_names(source: Source, address: int, names: bytes) -> None:
    signature, version, used = struct.unpack("<4sBxH", source.read(address, 8))
    if signature != b"SNOD" or version != 1:
        raise ValueError("no node of names")
    raw = source.read(address + 8, 40 * used)
    for at in range(0, len(raw), 40):
        (name,) = struct.unpack_from("<Q", raw, at)
        if name >= len(names) or b"\0" not in names[name : name + 65536]:
            raise ValueError("a name is outside the heap")
