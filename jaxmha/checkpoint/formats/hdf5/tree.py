"""The two kinds of B-trees of HDF5. Every node claims its bytes, so a walk visits no node twice.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#Btrees
"""

import struct
from collections.abc import Iterator

from jaxmha.checkpoint.formats.hdf5.file import UNDEFINED, File

GROUPS, CHUNKS = 0, 1  # node types of version 1 B-trees
_DEEPEST = 64


def old_leaves(
    file: File, root: int, kind: int, key: int, level: int | None = None
) -> Iterator[tuple[bytes, int]]:
    """Yields key and child address of each leaf entry of a version 1 B-tree, in order.

    `kind` is the node type, `key` the bytes of a key, `level` the level that the root must have.
    """
    signature, found, height, used = struct.unpack("<4sBBH", file.peek(root, 8))
    if signature != b"TREE" or found != kind or level not in (None, height) or height > _DEEPEST:
        raise ValueError("no tree where one must be")
    # Keys and children alternate, beginning and ending with a key.
    raw = file.take(root, 24 + used * (key + 8) + key)
    for at in range(24, len(raw) - key, key + 8):
        file.step()
        child = int.from_bytes(raw[at + key : at + key + 8], "little")
        if height:
            yield from old_leaves(file, child, kind, key, height - 1)
        else:
            yield raw[at : at + key], child


def new_records(file: File, address: int, kinds: tuple[int, ...]) -> Iterator[tuple[int, bytes]]:
    """Yields type and bytes of each record of a version 2 B-tree, in order."""
    raw = file.checked(address, 38, b"BTHD")
    kind, node, size, depth, _, _, root, used, total = struct.unpack_from("<BLHHBBQHQ", raw, 5)
    if kind not in kinds or not size or depth > _DEEPEST:
        raise ValueError(f"a tree of kind {kind} and depth {depth} where {kinds} must be")
    if root == UNDEFINED:
        return
    # A child pointer stores its record counts in as many bytes as the largest possible count needs.
    most = [(node - 10) // size]
    below = most[0]
    widths = [(0, 0)]
    for level in range(1, depth + 1):
        count, sum_ = _width(most[0]), _width(below) if level > 1 else 0
        widths.append((count, sum_))
        most.append((node - 10 - 8 - count - sum_) // (size + 8 + count + sum_))
        if most[-1] < 1:
            raise ValueError("its tree has nodes without room")
        below = most[-1] + (most[-1] + 1) * below
    seen = 0
    for record in _new_node(file, root, used, depth, kind, size, widths):
        file.step()
        seen += 1
        yield kind, record
    if seen != total:
        raise ValueError(f"its tree has {seen} of {total} records")


def _width(count: int) -> int:
    return max(1, -(-count.bit_length() // 8))


def _new_node(
    file: File,
    address: int,
    used: int,
    depth: int,
    kind: int,
    size: int,
    widths: list[tuple[int, int]],
) -> Iterator[bytes]:
    count, sum_ = widths[depth]
    pointer = 8 + count + sum_
    length = 6 + used * size + (pointer * (used + 1) if depth else 0) + 4
    raw = file.checked(address, length, b"BTIN" if depth else b"BTLF")
    if raw[5] != kind:
        raise ValueError("a node of another tree")
    records = [raw[at : at + size] for at in range(6, 6 + used * size, size)]
    if not depth:
        yield from records
        return
    for i in range(used + 1):
        at = 6 + used * size + i * pointer
        child = int.from_bytes(raw[at : at + 8], "little")
        number = int.from_bytes(raw[at + 8 : at + 8 + count], "little")
        yield from _new_node(file, child, number, depth - 1, kind, size, widths)
        if i < used:
            yield records[i]
