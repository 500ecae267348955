"""The .safetensors format: the length of the header, a JSON header, one data buffer.

Format: https://github.com/huggingface/safetensors#format
"""

import itertools
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import replace as changed
from typing import Any, BinaryIO, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from jaxmha.checkpoint import digests, json_text
from jaxmha.checkpoint.errors import (
    AmbiguousFile,
    IntegrityError,
    MalformedFile,
    UnsupportedDtype,
    UnsupportedFormat,
)
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.plan import Contents, Overhead, WriteJob
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.tensor import from_bytes, over

DTYPES: dict[str, np.dtype] = {
    code: np.dtype(dtype)
    for code, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "I16": np.int16,
        "U16": np.uint16,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "I32": np.int32,
        "U32": np.uint32,
        "F32": np.float32,
        "C64": np.complex64,
        "F64": np.float64,
        "I64": np.int64,
        "U64": np.uint64,
    }.items()
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# Dtypes of the format that are narrower than a byte and have no NumPy layout.
_SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")
_AGAIN = "write it again with the safetensors library"
_ALIGNMENT = 8  # bytes, of the header


def read(source: Source, limits: Limits) -> Contents:
    """Checks the whole header.

    Raises:
        MalformedFile, AmbiguousFile, BudgetExceeded, PathEscape, UnsupportedDtype, IntegrityError.
    """
    path, budget = source.path, Budget(source.path, source.size, limits)
    (length,) = struct.unpack("<Q", source.read(0, 8))
    if length > source.size - 8:
        raise MalformedFile(
            path,
            f"the header length {length} leaves the file",
            "the file is cut short: copy it again",
        )
    budget.spend("the header length", length, limits.header_bytes)
    header = json_text.parse(source.read(8, length), budget, _AGAIN, compact=_compact(source))
    metadata = _metadata(source, header.pop("__metadata__", {}))
    offsets = _offsets(source, 8 + length, header, budget)

    def load(name: str) -> np.ndarray:
        info = budget.info[name]
        raw = source.read_array(offsets[name], info.nbytes)
        return from_bytes(raw, info.dtype, "little", path, name).reshape(info.shape)

    def stream(name: str) -> Iterator[memoryview]:
        return source.stream(offsets[name], budget.info[name].nbytes)

    def view(name: str) -> np.ndarray:
        info = budget.info[name]
        return over(source, offsets[name], info.shape, info.dtype)

    kept = _digests(source, metadata, budget) if digests.KEY in metadata else {}
    return Contents(budget.info, load, metadata=metadata, digests=kept, stream=stream, view=view)


class _Entry(NamedTuple):
    """The entry of one tensor in the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


# Patterns of a name and its entry in JSON with emptied strings: a string, and two short lists.
_CODE, _LIST = rb'"":\s?""', rb'"":\s?\[[0-9, ]{0,90}\]'
_ORDERS = itertools.permutations((_CODE, _LIST, _LIST))
_FORM = re.compile(
    rb'"":\s?\{(?:' + b"|".join({rb",\s?".join(order) for order in _ORDERS}) + rb")\},?\s?"
)
_FORM_BYTES = 448  # bytes of memory for a name, its dict slot and its entry
_SHOWN = 100  # most malformed entries to collect; the error is about the first


def _compact(source: Source) -> json_text.Compact:
    """Parses header entries to tuples; dicts of many small tensors take three times the memory."""
    others = 0

    def made(items: dict[str, Any]) -> Any:
        nonlocal others
        if items.keys() != {"dtype", "shape", "data_offsets"}:
            others += any(isinstance(value, list) for value in items.values())
        else:
            code, shape, offsets = items["dtype"], items["shape"], items["data_offsets"]
            known = type(code) is str and code in DTYPES and _naturals(shape) and _naturals(offsets)
            if known and len(offsets) == 2 and offsets[0] <= offsets[1]:
                return _Entry(DTYPES[code], tuple(shape), *offsets)
            others += 1
        if others > _SHOWN:
            raise MalformedFile(source.path, f"more than {_SHOWN} entries are damaged", _AGAIN)
        return items

    return json_text.Compact(_FORM, _FORM_BYTES, made)


def _naturals(numbers: Any) -> bool:
    # type() and not isinstance(): JSON true must not count as 1.
    return type(numbers) is list and all(type(n) is int and n >= 0 for n in numbers)


def _offsets(source: Source, start: int, header: dict[str, Any], budget: Budget) -> dict[str, int]:
    """The file offset of each tensor; empties `header` and registers its tensors in the budget.

    Raises:
        MalformedFile, AmbiguousFile, BudgetExceeded, PathEscape, UnsupportedDtype.
    """
    offsets: dict[str, int] = {}
    for name in list(header):
        entry = header.pop(name)
        if not isinstance(entry, _Entry):
            _refuse(source, name, entry)
        budget.give_back(_FORM_BYTES)
        info, declared = budget.tensor(name, entry.shape, entry.dtype), entry.end - entry.begin
        if declared != info.nbytes:
            sizes = f"{declared} bytes declared for shape {info.shape} of {info.dtype}, which has "
            raise MalformedFile(source.path, f"{sizes}{info.nbytes}", _AGAIN, name)
        offsets[name] = start + entry.begin
    position = start
    # An empty tensor starts at the same offset as the next tensor, so sort it first.
    for name in sorted(offsets, key=lambda name: (offsets[name], budget.info[name].nbytes)):
        if offsets[name] != position:
            what = "overlaps the tensor before it" if offsets[name] < position else "leaves a hole"
            raise MalformedFile(source.path, f"the data {what}", _AGAIN, name)
        position += budget.info[name].nbytes
    if position != source.size:
        raise MalformedFile(
            source.path,
            f"the tensors end at byte {position}, the file at {source.size}",
            "the file is cut short or has bytes appended: copy it again",
        )
    return offsets


def check(plan: WriteJob) -> None:
    """Raises if the format cannot hold a name, a dtype, or a header of this length.

    Raises:
        UnsupportedDtype, AmbiguousFile, UnsupportedFormat.
    """
    for name, info in plan.info.items():
        if info.dtype not in CODES:
            raise UnsupportedDtype(
                plan.path, f"safetensors has no {info.dtype}", "convert the tensor first", name
            )
        if name == "__metadata__":
            raise AmbiguousFile(plan.path, "this name is reserved", "rename the tensor", name)
    length, most = len(_header(plan, list(plan.info))), Limits().header_bytes
    if length > most:
        problem = f"the header would have {length} bytes, and at most {most} are read"
        raise UnsupportedFormat(plan.path, problem, "write shards: NAME.safetensors.index.json")


def write(file: BinaryIO, plan: WriteJob) -> None:
    """Writes the same bytes as the safetensors library for the same tensors and metadata."""
    rank = {dtype: i for i, dtype in enumerate(CODES)}
    names = sorted(plan.info, key=lambda name: (-rank[plan.info[name].dtype], name))
    file.write(_header(plan, names))
    for name in names:
        file.writelines(plan.pieces(name))
    if plan.keep_digests:
        file.seek(0)
        file.write(_header(plan, names))  # the header again, with digests and the same length


def overhead(plan: WriteJob) -> Overhead:
    """Bounds on the bytes of the header of a file with some of the tensors."""
    end = sum(info.nbytes for info in plan.info.values())
    digest = digests.blank(plan.algorithm)

    def each(name: str) -> int:
        info = plan.info[name]
        offsets = {"data_offsets": [end, end]}
        entry = {name: {"dtype": CODES[info.dtype], "shape": list(info.shape), **offsets}}
        size = len(json.dumps(entry, ensure_ascii=False).encode())
        if plan.keep_digests:  # JSON within a string of JSON
            size += len(json.dumps(json.dumps({name: digest})))
        return size

    empty = changed(plan, info={}, digests={})
    return Overhead(len(_header(empty, [])) + _ALIGNMENT, each)


def _header(plan: WriteJob, names: list[str]) -> bytes:
    metadata = dict(plan.metadata)
    if plan.keep_digests:
        whole = plan.digests.keys() >= plan.info.keys()
        kept = {name: plan.digests.get(name, digests.blank(plan.algorithm)) for name in names}
        every = plan.manifest() if whole else digests.blank(plan.algorithm)
        metadata[digests.KEY] = json.dumps({"all": every, "tensors": kept}, separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name in names:
        info = plan.info[name]
        end = position + info.nbytes
        header[name] = {
            "dtype": CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _digests(source: Source, metadata: dict[str, str], budget: Budget) -> dict[str, str]:
    """Removes the digests from the metadata, checks them against the header, and returns them."""
    try:
        kept = json_text.parse(metadata.pop(digests.KEY).encode(), budget, _AGAIN, digests.KEY)
        every, tensors = kept["all"], kept["tensors"]
        if not isinstance(every, str) or not isinstance(tensors, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError) as e:
        raise IntegrityError(source.path, f"{digests.KEY} is damaged", _AGAIN) from e
    digests.check_manifest(every, budget.info, tensors, metadata.items(), source.path)
    return tensors


def _metadata(source: Source, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
        raise MalformedFile(source.path, "__metadata__ does not map strings to strings", _AGAIN)
    return metadata


def _refuse(source: Source, name: str, entry: Any) -> NoReturn:
    """Raises the error that describes a wrong entry.

    Raises:
        MalformedFile, UnsupportedDtype.
    """
    path = source.path
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedFile(
            path, "an entry is not exactly {dtype, shape, data_offsets}", _AGAIN, name
        )
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        if code in _SUB_BYTE:
            raise UnsupportedDtype(path, f"{code} is narrower than a byte", "dequantise it", name)
        raise UnsupportedDtype(path, f"{str(code)[:40]!r} is not a dtype", _AGAIN, name)
    if not _naturals(shape) or not _naturals(offsets):
        raise MalformedFile(path, "shape or data_offsets are not naturals", _AGAIN, name)
    raise MalformedFile(path, f"data_offsets {offsets[:4]} is not a range", _AGAIN, name)
