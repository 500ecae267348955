"""The zip files of torch.save: a pickle that describes tensors, and one member per storage.

This module uses neither torch nor Python's unpickler.

Format: https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace as changed
from typing import BinaryIO, Literal

import numpy as np

from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    BudgetExceeded,
    IncompleteCheckpoint,
    MalformedFile,
    UnsupportedDtype,
    UnsupportedFormat,
)
from jaxmha.checkpoint.formats import texts
from jaxmha.checkpoint.formats import zip as zip_directory
from jaxmha.checkpoint.formats.torch import pickle, records
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.plan import Contents, Overhead, WriteJob
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.tensor import TensorInfo, from_bytes, over

PROGRAM = "data.pkl"
# Members that torch writes besides the program and the storages.
_SMALL = ("version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")
_MOST_SMALL = 64
_BLOCK = 1 << 20
_DATE = (1980, 1, 1, 0, 0, 0)
_ALIGNMENT = 64
_AGAIN = "save it again with torch.save"

_STORAGE_NAMES = {dtype: name for name, dtype in records.STORAGES.items()}
_UNTYPED_NAMES = {dtype: name for name, dtype in records.UNTYPED.items()}


def read(source: Source, limits: Limits) -> Contents:
    """Checks the zip directory, runs the pickle, and checks every view against its storage.

    Raises:
        MalformedFile, AmbiguousFile, ForbiddenContent, IncompleteCheckpoint, IntegrityError,
        UnsupportedFormat, BudgetExceeded, PathEscape.
    """
    path, budget = source.path, Budget(source.path, source.size, limits)
    members = _members(source, zip_directory.members(source, budget))
    order = _byte_order(source, members)
    budget.spend("the pickle", members[PROGRAM].size, limits.pickle_bytes, PROGRAM)
    program = zip_directory.read_member(source, members[PROGRAM]).tobytes()
    count = sum(name.startswith("data/") for name in members)
    root, storages = pickle.run(program, path, limits, budget, count)
    for storage in storages.values():
        _check_storage(source, members, storage)
    others: list[str] = []
    views = _views(root, source, budget, others)
    stray = {name for name in members if name.startswith("data/")}
    stray -= {f"data/{key}" for key in storages}
    if stray:
        raise MalformedFile(path, "no tensor uses this storage", _AGAIN, min(stray))

    verified: set[str] = set()

    def load(name: str) -> np.ndarray:
        view, info = views[name], budget.info[name]
        member = members[f"data/{view.storage.key}"]
        extent = _extent(view) if info.size else 0
        begin, length = view.offset * info.dtype.itemsize, extent * info.dtype.itemsize
        if length == member.size:
            raw = zip_directory.read_member(source, member)
        else:
            if member.name not in verified:
                _verify(source, member)
            raw = source.read_array(member.offset + begin, length)
        verified.add(member.name)
        flat = from_bytes(raw, info.dtype, order, path, name)
        if extent == info.size and _contiguous(view):
            return flat.reshape(info.shape)
        strides = tuple(n * info.dtype.itemsize for n in view.strides)
        if not info.size:
            return np.empty(info.shape, info.dtype)
        return np.ndarray(info.shape, info.dtype, flat, 0, strides).copy(order="C")

    def mapped(name: str) -> np.ndarray | None:
        view, info = views[name], budget.info[name]
        if order == "big" or not info.size:
            return None
        width = info.dtype.itemsize
        at = members[f"data/{view.storage.key}"].offset + view.offset * width
        flat = over(source, at, (_extent(view),), info.dtype)
        strides = tuple(n * width for n in view.strides)
        return np.ndarray(info.shape, info.dtype, flat, 0, strides)

    kept = _digests(members, views, budget)
    return Contents(
        budget.info,
        load,
        metadata=zip_directory.metadata(source, members, budget),
        others=tuple(others),
        digests=kept,
        view=mapped,
    )


def _views(
    root: object, source: Source, budget: Budget, others: list[str]
) -> dict[str, records.View]:
    """The tensors of the unpickled object, each checked against its storage."""
    views: dict[str, records.View] = {}
    names = Counter[int]()
    for name, view in records.flatten(root, source.path, budget.limits, others):
        names[id(view)] += 1
        budget.spend("the names of one tensor", names[id(view)], budget.limits.aliases, name)
        info = budget.tensor(name, view.shape, view.dtype)
        _check_view(source, name, view, info)
        # Loading reads the whole span of a view: many sparse views of a storage would take minutes.
        extent = _extent(view) if info.size else 0
        budget.read(max(0, extent - info.size) * info.dtype.itemsize, name)
        budget.load(info.nbytes, extent * info.dtype.itemsize, name)
        views[name] = view
    return views


def check(plan: WriteJob) -> None:
    """Raises if the reader would refuse a dtype, or the number of tensors.

    Raises:
        UnsupportedDtype, UnsupportedFormat.
    """
    texts.check(plan)
    limits, program = Limits(), _program(plan)
    try:
        size = len(program) + sum(info.nbytes for info in plan.info.values())
        budget = Budget(plan.path, size, limits)
        budget.spend("the size of the pickle", len(program), limits.pickle_bytes)
        pickle.run(program, plan.path, limits, budget, len(plan.info))
    except BudgetExceeded as e:
        problem = f"{len(plan.info)} tensors are more than a torch file is read with ({e.problem})"
        raise UnsupportedFormat(plan.path, problem, "write .safetensors") from e


def write(file: BinaryIO, plan: WriteJob) -> None:
    """Writes an OrderedDict of tensors, each with a storage of its own."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _put(file, archive, PROGRAM, _program(plan))
        _put(file, archive, "byteorder", b"little")
        for key, (name, info) in enumerate(plan.info.items()):
            kept = zip_directory.field_bytes(plan, name)
            member = _member(file, f"data/{key}", info.nbytes, kept)
            with zip_directory.writing(archive, member, plan, name) as out:
                out.writelines(plan.pieces(name))
        _put(file, archive, "version", b"3\n")


def overhead(plan: WriteJob) -> Overhead:
    """Bounds on the bytes of the archive and the pickle program of a file with some tensors."""
    empty, count = changed(plan, info={}), len(str(len(plan.info)))
    program = len(_program(empty))
    bare = changed(plan, metadata={})

    def each(name: str) -> int:
        one = changed(plan, info={name: plan.info[name]})
        own = len(_program(one)) - program + count
        return own + _member_bytes(f"data/{'0' * count}", zip_directory.field_bytes(bare, name))

    base = program + zip_directory.END_BYTES + 2 * zip_directory.text_bytes(plan)
    base += sum(_member_bytes(name) for name in (PROGRAM, "byteorder", "version"))
    return Overhead(base + len("little") + len("3\n"), each)


def _members(
    source: Source, found: Mapping[str, zip_directory.Member]
) -> dict[str, zip_directory.Member]:
    """The members by name inside the single root folder; refuses unknown members."""
    path = source.path
    roots = {name.partition("/")[0] for name in found}
    if len(roots) != 1:
        raise AmbiguousFile(path, f"{len(roots)} root folders in a torch file", _AGAIN)
    members = {name.partition("/")[2]: member for name, member in found.items()}
    if len({name.casefold() for name in members}) != len(members):
        raise AmbiguousFile(path, "two member names differ in case only", _AGAIN)
    if "constants.pkl" in members or any(name.startswith("code/") for name in members):
        raise UnsupportedFormat(
            path,
            "this is a TorchScript program",
            "extract its weights: torch.save(torch.jit.load(path).state_dict(), new_path)",
        )
    for name, member in members.items():
        if name in _SMALL:
            if member.size > _MOST_SMALL:
                raise MalformedFile(path, f"{member.size} bytes are too many", _AGAIN, name)
        elif name != PROGRAM and not (name.startswith("data/") and name[5:].isdecimal()):
            raise MalformedFile(path, "torch writes no such member", _AGAIN, name)
        if member.method != zip_directory.STORED:
            raise UnsupportedFormat(path, "the member is compressed", _AGAIN, name)
    for name in (PROGRAM, "version"):
        if name not in members:
            raise IncompleteCheckpoint(path, "the member is missing", _AGAIN, name)
    return members


def _byte_order(
    source: Source, members: Mapping[str, zip_directory.Member]
) -> Literal["little", "big"]:
    small = {
        name: zip_directory.read_member(source, members[name]).tobytes()
        for name in _SMALL
        if name in members
    }
    if not small["version"].strip().isdigit():
        raise MalformedFile(source.path, "the version is not a number", _AGAIN, "version")
    # Old files lack this member; they come from little-endian machines.
    match small.get("byteorder", b"little"):
        case b"little":
            return "little"
        case b"big":
            return "big"
    raise MalformedFile(source.path, "neither 'little' nor 'big'", _AGAIN, "byteorder")


def _check_storage(
    source: Source,
    members: Mapping[str, zip_directory.Member],
    storage: records.Storage,
) -> None:
    name = f"data/{storage.key}"
    if name not in members:
        raise IncompleteCheckpoint(source.path, "the storage is missing", _AGAIN, name)
    width = storage.dtype.itemsize if storage.dtype else 1
    if members[name].size != storage.elements * width:
        raise MalformedFile(
            source.path,
            f"the storage has {members[name].size} bytes, the pickle says {storage.elements * width}",
            _AGAIN,
            name,
        )


def _check_view(source: Source, name: str, view: records.View, info: TensorInfo) -> None:
    width = 1 if view.storage.dtype else info.dtype.itemsize
    if info.size and (view.offset + _extent(view)) * width > view.storage.elements:
        raise MalformedFile(source.path, "the tensor extends beyond its storage", _AGAIN, name)


def _digests(
    members: Mapping[str, zip_directory.Member],
    views: Mapping[str, records.View],
    budget: Budget,
) -> dict[str, str]:
    """The digests of tensors that fill their storage, as all tensors written by this module do."""
    kept = {}
    for name, view in views.items():
        member = members[f"data/{view.storage.key}"]
        if member.digest and member.size == budget.info[name].nbytes:
            kept[name] = member.digest
    return kept


def _extent(view: records.View) -> int:
    """The number of storage elements that a nonempty view spans, including gaps."""
    return 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))


def _contiguous(view: records.View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _verify(source: Source, member: zip_directory.Member) -> None:
    crc = 0
    for at in range(0, member.size, _BLOCK):
        block = source.read(member.offset + at, min(_BLOCK, member.size - at))
        crc = zlib.crc32(block, crc)
    zip_directory.check_crc(source, member, crc)


def _put(file: BinaryIO, archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    with archive.open(_member(file, name, len(data)), "w", force_zip64=True) as out:
        out.write(data)


def _member_bytes(name: str, extra: int = 0) -> int:
    """A bound on the bytes of both headers of a member, with the longest padding before its data."""
    return zip_directory.header_bytes(f"archive/{name}", extra + 4 + _ALIGNMENT)


def _member(file: BinaryIO, name: str, size: int, extra: int = 0) -> zipfile.ZipInfo:
    """An uncompressed member whose data is aligned to 64 bytes, as in files of torch."""
    member = zipfile.ZipInfo(f"archive/{name}", _DATE)
    member.file_size = size
    # The local header has 30 bytes, the name, the extra fields, the padding field and
    # always 20 bytes of ZIP64.
    before = file.tell() + 30 + len(member.filename) + extra + 20 + 4
    padding = -before % _ALIGNMENT
    member.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return member


def _program(plan: WriteJob) -> bytes:
    """The pickle program of the state dict of a plan."""
    parts = [b"\x80\x02", _ordered_dict(), b"("]
    for key, (name, info) in enumerate(plan.info.items()):
        typed = _STORAGE_NAMES.get(info.dtype)
        untyped = _UNTYPED_NAMES.get(info.dtype)
        if typed is None and untyped is None:
            raise UnsupportedDtype(
                plan.path, f"torch has no {info.dtype}", "convert the tensor first", name
            )
        kind = f"torch {typed}" if typed else "torch.storage UntypedStorage"
        count = info.size if typed else info.nbytes
        strides = [max(1, int(np.prod(info.shape[i + 1 :]))) for i in range(len(info.shape))]
        rebuild = records.Call.TENSOR_V2 if typed else records.Call.TENSOR_V3
        parts += [_text(name), _global(rebuild.value), b"("]
        parts += [b"(", _text("storage"), _global(kind), _text(str(key)), _text("cpu")]
        parts += [_integer(count), b"tQ", _integer(0), _integers(info.shape), _integers(strides)]
        parts += [b"\x89", _ordered_dict(), b"" if typed else _global(f"torch {untyped}"), b"tR"]
    return b"".join([*parts, b"u."])


def _ordered_dict() -> bytes:
    return _global(records.Call.ORDERED_DICT.value) + b")R"


def _global(name: str) -> bytes:
    return b"c" + name.replace(" ", "\n").encode() + b"\n"


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<L", len(raw)) + raw


def _integers(numbers: tuple[int, ...] | list[int]) -> bytes:
    return b"(" + b"".join(map(_integer, numbers)) + b"t"


def _integer(number: int) -> bytes:
    if number < 2**31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)
