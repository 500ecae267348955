"""The .npz format: a zip of .npy members.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import re
import struct
import zipfile
from typing import BinaryIO, Literal

import numpy as np

from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    ForbiddenContent,
    MalformedFile,
    PathEscape,
    UnsupportedDtype,
    UnsupportedFormat,
)
from jaxmha.checkpoint.formats import texts
from jaxmha.checkpoint.formats import zip as zip_directory
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.plan import Contents, WriteJob
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.tensor import NUMPY, from_bytes, over

MAGIC = b"\x93NUMPY"
DTYPES = frozenset(NUMPY)
_MOST_HEADER = 10_000  # bytes of a header; NumPy has the same limit
# The header is a Python literal of a fixed form, so a regular expression reads it.
_ITEM = re.compile(
    r"""\s*(?P<q>['"])(?P<key>descr|fortran_order|shape)(?P=q)\s*:\s*"""
    r"""(?P<value>'[^']*'|"[^"]*"|True|False|\([\d\sL,]*\))\s*(?:,|$)""",
    re.ASCII,
)
_SHAPE = re.compile(r"\(\s*\)|\((?:\s*\d{1,19}L?\s*,)+(?:\s*\d{1,19}L?)?\s*\)", re.ASCII)
_DESCR = re.compile(r"[<>=|]?[biufc]\d{1,2}", re.ASCII)
_DATE = (1980, 1, 1, 0, 0, 0)
_AGAIN = "write it again with numpy.savez"
_NUMBERS = "convert it to numbers, such as array.astype(float), before numpy.savez"


def read(source: Source, limits: Limits) -> Contents:
    """Checks the zip directory and every array header.

    Raises:
        MalformedFile, AmbiguousFile, ForbiddenContent, UnsupportedDtype, UnsupportedFormat,
        PathEscape, BudgetExceeded.
    """
    budget = Budget(source.path, source.size, limits)
    where: dict[str, tuple[zip_directory.Member, int, bool, np.dtype]] = {}
    members = zip_directory.members(source, budget)
    for member in members.values():
        name = member.name.removesuffix(".npy")
        if name == member.name:
            raise UnsupportedFormat(
                source.path, "the zip has a member that is not .npy", _AGAIN, name
            )
        start, shape, dtype, fortran = _header(source, member)
        info = budget.tensor(name, shape, dtype.newbyteorder("="))
        if member.size != start + info.nbytes:
            raise MalformedFile(
                source.path,
                f"the member has {member.size} bytes, its header says {start + info.nbytes}",
                _AGAIN,
                name,
            )
        copied = fortran or start % 16
        budget.load(member.size, info.nbytes if copied else 0, name)
        where[name] = member, start, fortran, dtype

    def load(name: str) -> np.ndarray:
        member, start, fortran, dtype = where[name]
        info = budget.info[name]
        raw = zip_directory.read_member(source, member)[start:]
        if start % 16:  # an unusual offset, at which the data may be misaligned
            raw = raw.copy()
        order: Literal["little", "big"] = "big" if dtype.str[0] == ">" else "little"
        flat = from_bytes(raw, info.dtype, order, source.path, name)
        if fortran:
            return flat.reshape(info.shape[::-1]).T.copy(order="C")
        return flat.reshape(info.shape)

    def view(name: str) -> np.ndarray | None:
        member, start, fortran, dtype = where[name]
        if member.method != zip_directory.STORED or dtype.str[0] == ">":
            return None
        info = budget.info[name]
        return over(source, member.offset + start, info.shape, info.dtype, fortran=fortran)

    kept = {name: member.digest for name, (member, *_) in where.items() if member.digest}
    metadata = zip_directory.metadata(source, members, budget)
    return Contents(budget.info, load, metadata=metadata, digests=kept, view=view)


def check(plan: WriteJob) -> None:
    """Raises if the format cannot hold a dtype or a name.

    Raises:
        UnsupportedDtype, UnsupportedFormat, PathEscape, AmbiguousFile.
    """
    texts.check(plan)
    for name, info in plan.info.items():
        if info.dtype not in DTYPES:
            raise UnsupportedDtype(
                plan.path,
                f".npz would lose the dtype {info.dtype}",
                "write .safetensors, or convert the tensor to float32 first",
                name,
            )
        if not zip_directory.is_member_name(f"{name}.npy"):
            problem = "a zip member of this name would be a path out of the file or a folder"
            raise PathEscape(plan.path, problem, "rename the tensor, or write .safetensors", name)
        if (other := name.removesuffix(".npy")) != name and other in plan.info:
            problem = f"numpy.load would read {other!r} for it"
            raise AmbiguousFile(plan.path, problem, "rename one, or write .safetensors", name)


def write(file: BinaryIO, plan: WriteJob) -> None:
    """Writes uncompressed members with a fixed date, so that equal tensors give equal files."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, info in plan.info.items():
            descr = info.dtype.newbyteorder("<").str
            header = {"descr": descr, "fortran_order": False, "shape": info.shape}
            member = zipfile.ZipInfo(f"{name}.npy", _DATE)
            with zip_directory.writing(archive, member, plan, name) as out:
                np.lib.format.write_array_header_1_0(out, header)
                out.writelines(plan.pieces(name))


def _header(
    source: Source, member: zip_directory.Member
) -> tuple[int, tuple[int, ...], np.dtype, bool]:
    """Parses an array header: data offset, shape, stored dtype, and True for Fortran order."""
    path, name = source.path, member.name
    raw = zip_directory.read_prefix(source, member, _MOST_HEADER + 12)
    if not raw.startswith(MAGIC) or len(raw) < 12:
        raise MalformedFile(path, "the member is not an .npy array", _AGAIN, name)
    version = raw[6]
    if version not in (1, 2, 3) or raw[7]:
        raise UnsupportedFormat(path, f".npy version {version}.{raw[7]}", _AGAIN, name)
    start = 10 if version == 1 else 12
    (length,) = struct.unpack_from("<H" if version == 1 else "<L", raw, 8)
    if length > _MOST_HEADER or start + length > len(raw):
        raise MalformedFile(path, f"an .npy header of {length} bytes", _AGAIN, name)
    try:
        text = raw[start : start + length].decode("utf-8" if version == 3 else "latin-1").strip()
    except UnicodeDecodeError:
        raise MalformedFile(path, "the .npy header is not UTF-8", _AGAIN, name) from None
    if re.search(r"""descr['"]\s*:\s*\[""", text):
        raise UnsupportedDtype(path, "a structured dtype", "store each field alone", name)
    # Strip the padding first: the regular expression would try to match an item at every space.
    inside = text[1:-1].strip()
    items = list(_ITEM.finditer(inside)) if text[:1] + text[-1:] == "{}" else []
    header = {item["key"]: item["value"] for item in items}
    if (
        len(items) != 3
        or len(header) != 3
        or "".join(item[0] for item in items) != inside
        or header["fortran_order"] not in ("True", "False")
        or not _SHAPE.fullmatch(header["shape"])
        or header["descr"][0] not in "'\""
    ):
        raise MalformedFile(path, "the .npy header is not of the standard form", _AGAIN, name)
    shape = tuple(int(n.strip(" \n\tL")) for n in header["shape"][1:-1].split(",") if n.strip())
    dtype = _dtype(source, header["descr"][1:-1], name)
    return start + length, shape, dtype, header["fortran_order"] == "True"


def _dtype(source: Source, descr: str, name: str) -> np.dtype:
    if descr.strip("<>=|").startswith("O"):
        raise ForbiddenContent(
            source.path, "an array of Python objects, which are pickled code", _NUMBERS, name
        )
    try:
        dtype = np.dtype(descr) if _DESCR.fullmatch(descr) else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.newbyteorder("=") not in DTYPES:
        hint = "store the numbers as a numeric dtype (bfloat16: use .safetensors)"
        raise UnsupportedDtype(source.path, f"the dtype {descr[:40]!r}", hint, name)
    return dtype
