"""The two checksums of HDF5: Jenkins' lookup3 for structures, Fletcher's for chunks.

Sources: https://burtleburtle.net/bob/c/lookup3.c (hashlittle with the seed 0) and
https://en.wikipedia.org/wiki/Fletcher%27s_checksum
"""

import struct

import numpy as np
from numpy.typing import NDArray

_MASK = 0xFFFFFFFF
_LONGEST_SUM = 1 << 20  # 16-bit integers per step, so that their weighted sum stays below 2**64


def lookup3(data: bytes) -> int:
    """The lookup3 checksum of bytes.

    Example:
        >>> hex(lookup3(b"Four score and seven years ago"))
        '0x17770551'
    """
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    if not data:
        return c
    padded = data + bytes(-len(data) % 12)
    integers: tuple[int, ...] = struct.unpack(f"<{len(padded) // 4}L", padded)
    for at in range(0, len(integers) - 3, 3):
        a = (a + integers[at]) & _MASK
        b = (b + integers[at + 1]) & _MASK
        c = (c + integers[at + 2]) & _MASK
        a = (a - c) & _MASK ^ (c << 4 & _MASK | c >> 28)
        c = (c + b) & _MASK
        b = (b - a) & _MASK ^ (a << 6 & _MASK | a >> 26)
        a = (a + c) & _MASK
        c = (c - b) & _MASK ^ (b << 8 & _MASK | b >> 24)
        b = (b + a) & _MASK
        a = (a - c) & _MASK ^ (c << 16 & _MASK | c >> 16)
        c = (c + b) & _MASK
        b = (b - a) & _MASK ^ (a << 19 & _MASK | a >> 13)
        a = (a + c) & _MASK
        c = (c - b) & _MASK ^ (b << 4 & _MASK | b >> 28)
        b = (b + a) & _MASK
    a, b, c = ((x + y) & _MASK for x, y in zip((a, b, c), integers[-3:], strict=True))
    c = ((c ^ b) - (b << 14 & _MASK | b >> 18)) & _MASK
    a = ((a ^ c) - (c << 11 & _MASK | c >> 21)) & _MASK
    b = ((b ^ a) - (a << 25 & _MASK | a >> 7)) & _MASK
    c = ((c ^ b) - (b << 16 & _MASK | b >> 16)) & _MASK
    a = ((a ^ c) - (c << 4 & _MASK | c >> 28)) & _MASK
    b = ((b ^ a) - (a << 14 & _MASK | a >> 18)) & _MASK
    return ((c ^ b) - (b << 24 & _MASK | b >> 8)) & _MASK


def fletcher32(data: NDArray[np.uint8]) -> int:
    """Fletcher's checksum of a chunk, whose bytes are read as big-endian 16-bit integers."""
    if data.size % 2:
        data = np.append(data, np.uint8(0))
    integers = data.view(">u2")
    first = second = 0
    for at in range(0, integers.size, _LONGEST_SUM):
        part = integers[at : at + _LONGEST_SUM].astype(np.uint64)
        weights = np.arange(part.size, 0, -1, dtype=np.uint64)
        second += first * part.size + int((part * weights).sum())
        first += int(part.sum())
    # HDF5 folds the sums instead of reducing them modulo 65535: a nonzero multiple gives 65535.
    low, high = ((value - 1) % 65535 + 1 if value else 0 for value in (first, second))
    return high << 16 | low
