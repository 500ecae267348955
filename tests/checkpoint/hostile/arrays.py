"""Hostile .npy and .npz files."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
from tests.checkpoint.hostile.pickles import Runs
from tests.checkpoint.hostile.torch_files import FLOATS, zip_file


def npy_header(literal: str, version: int = 1) -> bytes:
    raw = literal.encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H", len(raw)) + raw


def npy(
    descr: str = "'<f4'",
    shape: str = "(2, 3)",
    data: bytes = FLOATS,
    more: str = "",
    version: int = 1,
) -> bytes:
    literal = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, {more}}}"
    return npy_header(literal, version) + data


def npz(**parts: Any) -> bytes:
    return zip_file([("w.npy", npy(**parts))])


@case(".npz")
def sound_npz() -> bytes:
    return npz()


@case(".npz", ck.BudgetExceeded)
def npz_shape_bomb() -> bytes:
    return npz(descr="'<f8'", shape="(65536, 65536)")


@case(".npz", ck.MalformedFile)
def npz_shape_too_large() -> bytes:
    return npz(shape="(3, 3)")


@case(".npz", ck.MalformedFile)
def npz_trailing() -> bytes:
    return npz(data=FLOATS + b"\0")


@case(".npz", ck.ForbiddenContent)
def npz_objects(path: Path) -> None:
    np.savez(path, w=np.array([Runs()], object))


@case(".npz", ck.MalformedFile)
def npz_negative_shape() -> bytes:
    return npz(shape="(-2, -3)")


@case(".npz", ck.MalformedFile)
def npz_header_code() -> bytes:
    return npz(shape="(__import__('os').getpid(),)")


@case(".npz", ck.MalformedFile)
def npz_header_deep() -> bytes:
    return npz(shape="(" * 4000 + ")" * 4000)


@case(".npz", ck.MalformedFile)
def npz_header_not_dict() -> bytes:
    return zip_file([("w.npy", npy_header("['descr']") + FLOATS)])


@case(".npz", ck.MalformedFile)
def npz_header_extra_key() -> bytes:
    return npz(more="'x': (), ")


@case(".npz", ck.MalformedFile)
def npz_header_duplicate_key() -> bytes:
    return npz(more="'shape': (6,), ")


@case(".npz", ck.MalformedFile)
def npz_header_long() -> bytes:
    return npz(more=" " * 20_000)


@case(".npz", ck.MalformedFile)
def npz_header_huge_number() -> bytes:
    return npz(shape=f"({'9' * 5000},)")


@case(".npz", ck.UnsupportedDtype)
def npz_structured() -> bytes:
    return npz(descr="[('a', '<f4')]")


@case(".npz", ck.UnsupportedDtype)
def npz_void() -> bytes:
    return npz(descr="'<V2'", shape="(12,)")


@case(".npz", ck.UnsupportedDtype)
def npz_text(path: Path) -> None:
    np.savez(path, w=np.array(["abc"]))


@case(".npz", ck.UnsupportedDtype)
def npz_dates(path: Path) -> None:
    np.savez(path, w=np.array(["2020-01-01"], "M8[D]"))


@case(".npz", ck.UnsupportedFormat)
def npz_version_9() -> bytes:
    return npz(version=9)


@case(".npz", ck.MalformedFile)
def npz_not_npy() -> bytes:
    return zip_file([("w.npy", b"hello, this is text")])


@case(".npz", ck.AmbiguousFile)
def npz_duplicate() -> bytes:
    return zip_file([("w.npy", npy()), ("w.npy", npy())])


@case(".npz", ck.UnsupportedFormat)
def npz_single_npy() -> bytes:
    return npy()


@case(".npz", ck.MalformedFile)
def npz_deflate_longer() -> bytes:
    """The deflate stream holds more than is declared."""
    declare = zlib.crc32(npy()), len(npy())
    return zip_file([("w.npy", npy() + bytes(100))], method=8, declare=declare)


_INFLATED = {
    "more_than_the_watch": (60 << 20, False),  # read in 60 MiB
    "turned_more_than_the_watch": (40 << 20, True),  # read in 80 MiB
}
for _name, (_size, _fortran) in _INFLATED.items():

    def _register(path: Path, size: int = _size, fortran: bool = _fortran) -> None:
        array = np.ones((size >> 20, 1 << 18), "f")
        np.savez_compressed(path, w=np.asfortranarray(array) if fortran else array)

    _register.__name__ = f"npz_inflates_to_{_name}"
    case(".npz", ck.BudgetExceeded)(_register)
