"""Reads the directory of a zip file, and refuses ambiguous files.

Python's zipfile uses the central directory, other readers use local headers, and readers treat
duplicates differently. Here both must agree, and members may leave no gaps or overlaps.

Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import contextlib
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint import digests
from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    CheckpointError,
    ForbiddenContent,
    IntegrityError,
    MalformedFile,
    PathEscape,
    UnsupportedFormat,
)
from jaxmha.checkpoint.formats import texts
from jaxmha.checkpoint.limits import Budget
from jaxmha.checkpoint.plan import WriteJob
from jaxmha.checkpoint.source import Source

STORED, DEFLATED = 0, 8
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _DESCRIPTOR, _UTF8 = 0x1 | 0x40 | 0x2000, 0x8, 0x800
_HARMLESS_FLAGS = 0x6 | _DESCRIPTOR | _UTF8  # 0x6: compression level of deflate
_ZIP64, _UNICODE_PATH = 1, 0x7075
_DIGEST, _TEXTS = 0x6D6A, 0x746A  # IDs of extra fields, "jm" and "jt"; other readers skip them
_MOST_FIELDS = 64  # most extra fields of a header; writers add three
_BLOCK = 1 << 20
# Upper bounds of the memory in bytes per member, without names and digests: while the headers are
# compared, and while the file is open.
_COMPARED, _MEMBER = 660, 400
_AGAIN = "save it again with the library that made it"


class Member(NamedTuple):
    """One member whose two headers agree; `offset` is where its data begins."""

    name: str
    method: int
    crc: int
    size: int
    compressed: int
    offset: int
    digest: str | None
    texts: bytes | None


class _Entry(NamedTuple):
    """One record of the central directory."""

    name: str
    raw_name: bytes
    flags: int
    method: int
    crc: int
    compressed: int
    size: int
    offset: int
    digest: bytes | None
    texts: bytes | None


def members(source: Source, budget: Budget) -> dict[str, Member]:
    """Checks the zip directory; returns every member by name.

    Raises:
        MalformedFile, AmbiguousFile, ForbiddenContent, PathEscape, UnsupportedFormat,
        BudgetExceeded.
    """
    count, start, size = _end(source)
    budget.spend("the number of zip members", count, budget.limits.members)
    budget.spend("the zip directory", size, budget.limits.header_bytes)
    budget.build(2 * size + _COMPARED * count, "its zip directory")
    found: dict[str, Member] = {}
    position = 0
    for entry in sorted(
        _central(source, count, start, size, budget), key=lambda entry: entry.offset
    ):
        if entry.name in found:
            _fail(source, AmbiguousFile, "two zip members have this name", entry.name)
        if entry.offset < position:
            _fail(source, MalformedFile, "overlaps the zip member before it", entry.name)
        if entry.offset > position:
            _fail(source, MalformedFile, "bytes before this member belong to none", entry.name)
        data = _local(source, entry)
        position = data + entry.compressed
        if position > start:
            _fail(source, MalformedFile, "the member runs into the zip directory", entry.name)
        if entry.flags & _DESCRIPTOR:
            position += _descriptor(source, entry, position, start)
        found[entry.name] = Member(
            *(entry.name, entry.method, entry.crc, entry.size, entry.compressed, data),
            None if entry.digest is None else entry.digest.decode("ascii", "replace"),
            entry.texts,
        )
    if position != start:
        _fail(source, MalformedFile, "bytes before the zip directory belong to no member")
    budget.give_back(2 * size + (_COMPARED - _MEMBER) * count)
    return found


def read_member(source: Source, member: Member) -> NDArray[np.uint8]:
    """Reads the whole content of a member and verifies its checksum.

    Raises:
        IntegrityError: CRC-32 mismatch.  MalformedFile: a damaged deflate stream.
    """
    if member.method == STORED:
        raw = source.read_array(member.offset, member.size)
        check_crc(source, member, zlib.crc32(raw.data))
        return raw
    raw = np.empty(member.size, np.uint8)
    inflate = zlib.decompressobj(-15)
    done, position, end = 0, member.offset, member.offset + member.compressed
    try:
        while not inflate.eof:
            block = inflate.unconsumed_tail
            if not block:
                step = min(_BLOCK, end - position)
                block = source.read(position, step)
                position += step
            # Request one byte more than is left, to notice a longer stream.
            out = inflate.decompress(block, min(_BLOCK, member.size - done + 1))
            if done + len(out) > member.size or not (block or out):
                break
            raw[done : done + len(out)] = np.frombuffer(out, np.uint8)
            done += len(out)
    except zlib.error as e:
        _fail(source, MalformedFile, f"the deflate stream is damaged ({e})", member.name)
    if done != member.size or not inflate.eof or position != end or inflate.unused_data:
        _fail(source, MalformedFile, "the deflate stream is not of the declared size", member.name)
    check_crc(source, member, zlib.crc32(raw.data))
    return raw


def read_prefix(source: Source, member: Member, count: int) -> bytes:
    """Reads up to `count` bytes from the start of a member; does not verify its checksum."""
    if member.method == STORED:
        return source.read(member.offset, min(count, member.size))
    block = source.read(member.offset, min(member.compressed, count + _BLOCK))
    try:
        return zlib.decompressobj(-15).decompress(block, count)
    except zlib.error as e:
        _fail(source, MalformedFile, f"the deflate stream is damaged ({e})", member.name)


def is_member_name(name: str) -> bool:
    """True if a member of this name stays inside the folder of extraction on every system."""
    return "\\" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


def check_crc(source: Source, member: Member, crc: int) -> None:
    """Raises IntegrityError unless `crc` is the CRC-32 that the zip file records."""
    if crc != member.crc:
        remedy = "copy the file again"
        if not member.name.endswith(".npy"):
            remedy += ", or save it after torch.serialization.set_crc32_options(True)"
        raise IntegrityError(
            source.path, "CRC-32 mismatch: the data is damaged", remedy, member.name
        )


@contextlib.contextmanager
def writing(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, plan: WriteJob, name: str
) -> Iterator[IO[bytes]]:
    """Opens a new member for the tensor `name`.

    Its digest, and for the first tensor the metadata, go into both headers of the member.
    """
    rest = member.extra
    member.extra = _fields(plan, name, digests.blank(plan.algorithm)) + rest
    # Closing the member rewrites its local header, now with the checksum and the digest.
    with archive.open(member, "w", force_zip64=True) as out:
        yield out
        member.extra = _fields(plan, name, plan.digests[name]) + rest


# The records after the members of a zip file.
END_BYTES = _END.size + _END64.size + _LOCATOR64.size


def header_bytes(name: str, extra: int) -> int:
    """A bound on the bytes of both headers of a member with an ASCII name and extra fields."""
    return _LOCAL.size + _CENTRAL.size + 2 * (len(name) + extra) + 20 + 28  # the last two: ZIP64


def text_bytes(plan: WriteJob) -> int:
    """The bytes that the metadata adds to each header of the first member."""
    return 4 + len(texts.packed(plan.metadata)) if plan.metadata else 0


def field_bytes(plan: WriteJob, name: str) -> int:
    """The bytes that digest and metadata add to each header of the member of a tensor."""
    return len(_fields(plan, name, digests.blank(plan.algorithm)))


def _fields(plan: WriteJob, name: str, digest: str) -> bytes:
    made = b""
    if plan.keep_digests:
        made += struct.pack("<HH", _DIGEST, len(digest)) + digest.encode()
    if plan.metadata and name == next(iter(plan.info)):
        raw = texts.packed(plan.metadata)
        made += struct.pack("<HH", _TEXTS, len(raw)) + raw
    return made


def metadata(source: Source, found: Mapping[str, Member], budget: Budget) -> dict[str, str]:
    """Returns the metadata, which the headers of one member hold; {} if none does.

    Raises:
        AmbiguousFile: several members have metadata.  IntegrityError: the metadata is damaged.
    """
    several = [member for member in found.values() if member.texts is not None]
    if len(several) > 1:
        _fail(source, AmbiguousFile, "two members have metadata", several[1].name)
    return texts.unpacked(several[0].texts or b"", budget) if several else {}


def _fail(
    source: Source, kind: type[CheckpointError], problem: str, member: str | None = None
) -> NoReturn:
    raise kind(source.path, problem, _AGAIN, member)


def _end(source: Source) -> tuple[int, int, int]:
    """Number of entries, start and size of the central directory, which must end the file."""
    at = source.size - _END.size
    end = _END.unpack(source.read(at, _END.size)) if at >= 0 else (b"",)
    if end[0] != b"PK\5\6":
        _fail(source, MalformedFile, "cut short, or bytes follow the zip directory")
    _, disk, start_disk, here, count, size, start, comment = end
    if comment or disk or start_disk or here != count:
        _fail(source, MalformedFile, "the zip has a comment or several disks")
    locator_at = at - _LOCATOR64.size
    locator = source.read(locator_at, _LOCATOR64.size) if locator_at >= 0 else b""
    if locator.startswith(b"PK\6\7"):
        _, disk, at, disks = _LOCATOR64.unpack(locator)
        if disk or disks != 1 or at + _END64.size != locator_at:
            _fail(source, AmbiguousFile, "the ZIP64 locator does not point at the ZIP64 record")
        narrow = ((count, _FULL16), (size, _FULL32), (start, _FULL32))
        record = _END64.unpack(source.read(at, _END64.size))
        sig, length, _, _, disk, start_disk, here, count, size, start = record
        if sig != b"PK\6\6" or length != _END64.size - 12 or disk or start_disk or here != count:
            _fail(source, MalformedFile, "the ZIP64 record is damaged")
        for (short, full), wide in zip(narrow, (count, size, start), strict=True):
            if short not in (wide, full):
                _fail(source, AmbiguousFile, "the ZIP64 record contradicts the zip directory")
    if start + size != at:
        _fail(source, AmbiguousFile, "the zip directory is not where the file says it is")
    return count, start, size


def _central(source: Source, count: int, start: int, size: int, budget: Budget) -> list[_Entry]:
    raw = source.read(start, size)
    entries = []
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > size:
            _fail(source, MalformedFile, "the zip directory is cut short")
        fields = _CENTRAL.unpack_from(raw, at)
        sig, made_by, _, flags, method, _, _, crc, compressed, plain = fields[:10]
        name_len, extra_len, comment_len, disk, _, attributes, offset = fields[10:]
        at += _CENTRAL.size
        raw_name = raw[at : at + name_len]
        extra = raw[at + name_len : at + name_len + extra_len]
        at += name_len + extra_len + comment_len
        if sig != b"PK\1\2" or at > size or comment_len:
            _fail(source, MalformedFile, "the zip directory is damaged")
        name = _name(source, raw_name, flags)
        # One wide character makes all characters of a str wide: up to 4 bytes each.
        budget.build(sys.getsizeof(name), "its zip directory")
        unicode_path = _extra(source, extra, _UNICODE_PATH, name)
        if unicode_path is not None and unicode_path[5:] != raw_name:
            _fail(source, AmbiguousFile, "the zip member has two names", name)
        wide = [value for value in (plain, compressed, offset) if value == _FULL32]
        if wide:
            sizes = iter(_zip64(source, extra, len(wide), name))
            plain, compressed, offset = (
                next(sizes) if value == _FULL32 else value for value in (plain, compressed, offset)
            )
        if made_by >> 8 == 3 and not _plain_mode(attributes >> 16):
            _fail(source, ForbiddenContent, "the member is a link or device", name)
        if disk or flags & ~(_HARMLESS_FLAGS | _ENCRYPTED):
            _fail(source, MalformedFile, "unknown zip flags", name)
        if flags & _ENCRYPTED:
            _fail(source, ForbiddenContent, "the member is encrypted", name)
        if method not in (STORED, DEFLATED):
            _fail(source, UnsupportedFormat, f"zip compression method {method}", name)
        if method == STORED and compressed != plain:
            _fail(source, MalformedFile, "a stored member has two sizes", name)
        sizes_and_place = compressed, plain, offset
        kept = (_extra(source, extra, kind, name) for kind in (_DIGEST, _TEXTS))
        entries.append(_Entry(name, raw_name, flags, method, crc, *sizes_and_place, *kept))
    if at != size:
        _fail(source, MalformedFile, "the zip directory has more entries than it declares")
    return entries


def _local(source: Source, entry: _Entry) -> int:
    """Checks that the local header of a member agrees with `entry`; returns the data offset."""
    at = entry.offset
    fields = _LOCAL.unpack(source.read(at, _LOCAL.size))
    sig, _, flags, method, _, _, crc, compressed, size, name_len, extra_len = fields
    at += _LOCAL.size
    raw_name, extra = source.read(at, name_len), source.read(at + name_len, extra_len)
    if sig != b"PK\3\4" or raw_name != entry.raw_name:
        _fail(source, AmbiguousFile, "the two zip headers give different names", entry.name)
    if _FULL32 in (size, compressed) and (entry.size, entry.compressed) != (size, compressed):
        size, compressed = _zip64(source, extra, 2, entry.name)
    header = (flags, method, crc, compressed, size)
    true = (entry.flags, entry.method, entry.crc, entry.compressed, entry.size)
    # With a descriptor, checksum and sizes come after the data and are zero here.
    later = (*true[:2], 0, 0, 0) if flags & _DESCRIPTOR else true
    if header not in (true, later):
        _fail(source, AmbiguousFile, "the two zip headers contradict each other", entry.name)
    if _extra(source, extra, _DIGEST, entry.name) != entry.digest:
        _fail(source, AmbiguousFile, "the two zip headers give different digests", entry.name)
    if _extra(source, extra, _TEXTS, entry.name) != entry.texts:
        _fail(source, AmbiguousFile, "the two zip headers give different metadata", entry.name)
    data: int = at + name_len + extra_len
    return data


def _descriptor(source: Source, entry: _Entry, at: int, end: int) -> int:
    """The length of the data descriptor, with or without signature, with 32-bit or 64-bit sizes."""
    raw = source.read(at, min(24, end - at))
    for signature in (b"PK\7\x08", b""):
        for sizes in ("<LQQ", "<LLL"):
            try:
                exact = signature + struct.pack(sizes, entry.crc, entry.compressed, entry.size)
            except struct.error:  # a size does not fit in 32 bits
                continue
            if raw.startswith(exact):
                return len(exact)
    _fail(source, AmbiguousFile, "the data descriptor contradicts the zip directory", entry.name)


def _zip64(source: Source, extra: bytes, count: int, name: str) -> tuple[int, ...]:
    sizes = _extra(source, extra, _ZIP64, name)
    if sizes is None or len(sizes) < 8 * count:
        _fail(source, MalformedFile, "the ZIP64 sizes are missing", name)
    return struct.unpack_from(f"<{count}Q", sizes)


def _extra(source: Source, extra: bytes, wanted: int, name: str) -> bytes | None:
    """The content of the first extra field of the wanted kind, or None."""
    at = count = 0
    while at + 4 <= len(extra):
        count += 1
        if count > _MOST_FIELDS:
            _fail(source, MalformedFile, "a zip header has too many extra fields", name)
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == wanted and at + 4 + length <= len(extra):
            return extra[at + 4 : at + 4 + length]
        at += 4 + length
    return None


def _plain_mode(mode: int) -> bool:
    return stat.S_IFMT(mode) in (0, stat.S_IFREG)


def _name(source: Source, raw: bytes, flags: int) -> str:
    try:
        name = raw.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        _fail(source, MalformedFile, "a member name is not UTF-8", ascii(raw[:80]))
    if "\0" in name:
        _fail(source, MalformedFile, "a member name has a NUL", name)
    if not is_member_name(name):
        _fail(source, PathEscape, "a member name is a path out of the file or a folder", name)
    return name
