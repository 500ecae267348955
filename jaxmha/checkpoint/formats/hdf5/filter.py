"""Undoes the filters of HDF5 chunks; refuses chunks that inflate beyond the declared size.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html#FilterMessage
"""

import struct
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint.formats.hdf5.checksum import fletcher32
from jaxmha.checkpoint.formats.hdf5.file import File

_GZIP, _SHUFFLE, _FLETCHER32, _LZF = 1, 2, 3, 32000
_COMPRESSORS = frozenset({_GZIP, _LZF})
_KNOWN = _COMPRESSORS | {_SHUFFLE, _FLETCHER32}
_NAMES = {4: " (szip)", 5: " (nbit)", 6: " (scale-offset)"}
_CHECKSUM = 4
_BLOCK = 1 << 20
_STEP = 8  # stored bytes of LZF whose unpacking takes as long as a step
_MOST_DEFLATED = 1032  # largest ratio of inflated to deflated bytes


class Filter(NamedTuple):
    """The ID of a filter and its first parameter, which for shuffle is the element size."""

    id: int
    width: int


def pipeline(file: File, body: bytes) -> tuple[Filter, ...]:
    """Parses a filter pipeline message: the filters in the order in which they were applied.

    Raises:
        ForbiddenContent: an unknown filter, a repeated filter, or two compressors.
        ValueError, IndexError or struct.error: damaged.
    """
    version, count = body[:2]
    if version not in (1, 2):
        raise ValueError(f"filters of version {version}")
    at = 8 if version == 1 else 2
    found: list[Filter] = []
    for _ in range(count):
        (id,), at = struct.unpack_from("<H", body, at), at + 2
        named = version == 1 or id >= 256
        length, at = int.from_bytes(body[at : at + 2], "little") * named, at + 2 * named
        _, values = struct.unpack_from("<HH", body, at)
        at += 4 + (-(-length // 8) * 8 if version == 1 else length)
        if id not in _KNOWN:
            file.forbid(f"the filter {id}{_NAMES.get(id, '')}, which is not read here")
        if any(one.id == id for one in found):
            file.forbid(f"the filter {id} twice")
        found.append(Filter(id, struct.unpack_from("<L", body, at)[0] if values else 0))
        at += 4 * (values + (values % 2 if version == 1 else 0))
        if at > len(body):
            raise ValueError("its filters are cut short")
    if len(_COMPRESSORS.intersection(one.id for one in found)) > 1:
        file.forbid("two filters that compress")
    return tuple(found)


def most(filters: tuple[Filter, ...], stored: int) -> int:
    """Upper bound of the size of `stored` bytes after undoing the filters."""
    return stored * (_MOST_DEFLATED if any(one.id in _COMPRESSORS for one in filters) else 1)


def unpacking_steps(filters: tuple[Filter, ...], stored: int) -> int:
    """Steps of work to unpack `stored` bytes of LZF; 0 for other filters."""
    return stored // _STEP if any(one.id == _LZF for one in filters) else 0


def shuffled(filters: tuple[Filter, ...]) -> bool:
    """True if one of the filters is shuffle."""
    return any(one.id == _SHUFFLE for one in filters)


def undo(
    raw: NDArray[np.uint8], filters: tuple[Filter, ...], mask: int, size: int
) -> NDArray[np.uint8]:
    """Undoes the filters of a chunk of `size` bytes; bits in `mask` mark filters that were skipped.

    Raises:
        ValueError: the chunk has another size, or its checksum does not match.
    """
    used = [one for i, one in enumerate(filters) if not mask >> i & 1]
    if mask >> len(filters):
        raise ValueError("a chunk leaves out filters that there are not")
    sizes = [size]  # size of the input of each filter; only the compressor uses it
    for one in used:
        sizes.append(sizes[-1] + _CHECKSUM * (one.id == _FLETCHER32))
    for one, expected in zip(reversed(used), reversed(sizes[:-1]), strict=True):
        if one.id == _FLETCHER32:
            raw, kept = raw[:-_CHECKSUM], raw[-_CHECKSUM:].tobytes()
            if fletcher32(raw).to_bytes(_CHECKSUM, "little") != kept:
                raise ValueError("the checksum of a chunk does not match")
        elif one.id == _SHUFFLE:
            raw = _unshuffled(raw, one.width)
        else:
            expand = _inflated if one.id == _GZIP else _unpacked
            raw = expand(raw.data, expected)
    if raw.size != size:
        raise ValueError(f"a chunk has {raw.size} bytes instead of {size}")
    return raw


def _unshuffled(raw: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Undoes shuffle, which stores the first bytes of all elements, then all second bytes, etc.

    A remainder shorter than `width` bytes is not shuffled.
    """
    if width <= 1:
        return raw
    count = raw.size // width
    out = np.empty_like(raw)
    out[: count * width].reshape(count, width)[...] = raw[: count * width].reshape(width, count).T
    out[count * width :] = raw[count * width :]
    return out


def _inflated(raw: memoryview, size: int) -> NDArray[np.uint8]:
    state, out, done, at = zlib.decompressobj(), np.empty(size, np.uint8), 0, 0
    try:
        while not state.eof:
            block: bytes | memoryview = state.unconsumed_tail
            if not block:
                block, at = raw[at : at + _BLOCK], at + _BLOCK
            # Request one byte more than is left, to notice a longer stream.
            piece = state.decompress(block, min(_BLOCK, size - done + 1))
            if done + len(piece) > size or not (block or piece):
                break
            out[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
    except zlib.error as e:
        raise ValueError(f"a chunk cannot be inflated: {e}") from e
    if done != size or not state.eof or at < len(raw) or state.unused_data:
        raise ValueError(f"a chunk inflates to another size than {size}")
    return out


def _unpacked(raw: memoryview, size: int) -> NDArray[np.uint8]:
    """Decompresses LZF: runs of literal bytes, and copies of earlier output."""
    out, at, end = bytearray(), 0, len(raw)
    while at < end and len(out) <= size:
        control, at = raw[at], at + 1
        if control < 32:
            out += raw[at : at + control + 1]
            at += control + 1
        else:
            length = control >> 5
            if length == 7:
                length, at = length + raw[at], at + 1
            start, at = len(out) - ((control & 31) << 8) - raw[at] - 1, at + 1
            length += 2
            if start < 0:
                raise ValueError("a chunk copies from before its beginning")
            copied = out[start : start + length]  # shorter if it overlaps the end of `out`
            out += (copied * -(-length // len(copied)))[:length]
    if len(out) != size or at != end:
        raise ValueError(f"a chunk unpacks to another size than {size}")
    return np.frombuffer(out, np.uint8)
