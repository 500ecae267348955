"""The three heaps of HDF5: local (names), global (texts), and fractal (many links or attributes).

The objects read from a heap may not exceed its size in total, which refuses overlapping objects.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#LocalHeap
"""

import bisect
import struct

from jaxmha.checkpoint.formats.hdf5.file import UNDEFINED, File

_END_OF_LIST = 1
_DIRECT_CHECKSUM = 0x02


class Names:
    """A local heap: the names of the links in a group that has a symbol table."""

    def __init__(self, file: File, address: int) -> None:
        signature, version, size, free, data = struct.unpack("<4sB3xQQQ", file.take(address, 32))
        if signature != b"HEAP" or version:
            raise ValueError("no heap of names")
        self.raw, self.left = file.take(data, size), size
        self.most = file.limits.name_bytes
        for _ in range(size // 16 + 1):
            if free in (_END_OF_LIST, UNDEFINED):
                return
            if free + 16 > size:
                break
            (free,) = struct.unpack_from("<Q", self.raw, free)
        raise ValueError("the list of free blocks does not end")

    def take(self, at: int) -> bytes:
        """The name at an offset in the heap."""
        end = self.raw.find(b"\0", at, at + self.most + 1)
        self.left -= end + 1 - at
        if end < 0 or self.left < 0:
            raise ValueError("a name is outside the heap, too long, or part of another")
        return self.raw[at:end]


class Texts:
    """The global heap: collections of texts, each of which is read once."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.collections: dict[int, dict[int, bytes | None]] = {}

    def take(self, address: int, index: int, size: int, most: int) -> bytes:
        """The first `size` bytes of the object `index` in the collection at `address`.

        Raises ValueError if the object is missing, too long, or taken a second time.
        """
        if address not in self.collections:
            self.collections[address] = self._collection(address, most)
        objects = self.collections[address]
        raw = objects.get(index)
        if raw is None or size > len(raw):
            raise ValueError("a text is not in its heap, is too long, or has two uses")
        objects[index] = None
        return raw[:size]

    def _collection(self, address: int, most: int) -> dict[int, bytes | None]:
        signature, version, size = struct.unpack("<4sB3xQ", self.file.peek(address, 16))
        if signature != b"GCOL" or version != 1 or size < 16:
            raise ValueError("no heap of texts")
        raw = self.file.take(address, size)
        self.file.step(size // 16)
        objects: dict[int, bytes | None] = {}
        at = 16
        while at + 16 <= size:
            index, length = struct.unpack_from("<H6xQ", raw, at)
            if index == 0:  # index 0 marks free space, which ends the list
                break
            at += 16
            if index in objects or length > size - at:
                raise ValueError("a heap of texts has an object twice, or one cut short")
            objects[index] = raw[at : at + length] if length <= most + 8 else None
            at += -(-length // 8) * 8
        return objects


class Dense:
    """A fractal heap: the links or attributes of an object that has many."""

    def __init__(self, file: File, address: int) -> None:
        self.file, self.address = file, address
        self.starts: list[int] = []
        self.blocks: list[bytes] = []
        fixed = file.peek(address, 9)
        (filters,) = struct.unpack_from("<H", fixed, 7)
        if filters:
            file.forbid("a heap that is compressed")
        raw = file.checked(address, 146, b"FRHP")
        self.flags, largest_object = struct.unpack_from("<BL", raw, 9)
        self.width, self.first, self.largest, bits = struct.unpack_from("<HQQH", raw, 110)
        root, rows = struct.unpack_from("<QH", raw, 132)
        self.offset_bytes = -(-bits // 8)
        sizes = (self.first, self.largest)
        if (
            not 0 < bits <= 64
            or not self.width
            or any(size & (size - 1) or not size for size in sizes)
        ):
            raise ValueError("a heap whose sizes are no powers of 2")
        self.length_bytes = min(
            -(-(self.largest.bit_length() - 1) // 8), -(-largest_object.bit_length() // 8)
        )
        self.direct_rows = (self.largest // self.first).bit_length() + 1
        if root != UNDEFINED:
            self._indirect(root, 0, rows) if rows else self._direct(root, 0, self.first)
        self.left = sum(map(len, self.blocks))

    def take(self, key: bytes) -> bytes:
        """The object with the heap ID `key`."""
        kind = key[0] >> 4
        if kind == 2:  # the ID contains the object
            length = (key[0] & 15) + 1
            if length > len(key) - 1:
                raise ValueError("an object is longer than its ID")
            return key[1 : 1 + length]
        if kind:
            self.file.forbid("an object too large for its heap")
        at = int.from_bytes(key[1 : 1 + self.offset_bytes], "little")
        length = int.from_bytes(key[1 + self.offset_bytes :][: self.length_bytes], "little")
        i = bisect.bisect_right(self.starts, at) - 1
        self.left -= length
        if i < 0 or self.left < 0 or at + length > self.starts[i] + len(self.blocks[i]):
            raise ValueError("an object is outside its heap, or part of another")
        return self.blocks[i][at - self.starts[i] :][:length]

    def _direct(self, address: int, start: int, size: int) -> None:
        raw = self.file.take(address, size)
        self._check(raw, b"FHDB", start)
        if self.flags & _DIRECT_CHECKSUM:
            at = 13 + self.offset_bytes
            whole = raw[:at] + bytes(4) + raw[at + 4 :]
            self.file.verify(whole + raw[at : at + 4])
        self.starts.append(start)
        self.blocks.append(raw)

    def _indirect(self, address: int, start: int, rows: int) -> None:
        """Reads the blocks below an indirect block; block sizes double per row from the third."""
        if rows > 64:
            raise ValueError("a heap of too many rows")
        size = 13 + self.offset_bytes + 8 * rows * self.width + 4
        raw = self.file.checked(address, size, b"FHIB")
        self._check(raw, b"FHIB", start)
        children = struct.unpack_from(f"<{rows * self.width}Q", raw, 13 + self.offset_bytes)
        self.file.step(len(children))
        for i, child in enumerate(children):
            row = i // self.width
            size = self.first << max(0, row - 1)
            if child == UNDEFINED:
                pass
            elif row < self.direct_rows:
                self._direct(child, start, size)
            else:
                below = (size // (self.first * self.width)).bit_length()
                if not 0 < below < rows:
                    raise ValueError("a heap whose tables do not get smaller")
                self._indirect(child, start, below)
            start += size

    def _check(self, raw: bytes, signature: bytes, start: int) -> None:
        """Raises ValueError unless a block has this signature, heap address and offset."""
        found, version, heap = struct.unpack_from("<4sBQ", raw)
        offset = int.from_bytes(raw[13 : 13 + self.offset_bytes], "little")
        if (found, version, heap, offset) != (signature, 0, self.address, start):
            raise ValueError("a block of another heap")
