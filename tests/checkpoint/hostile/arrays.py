"""Hostile .npy and .npz files."""

import struct
import zlib
from typing import Any

import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Big, Code, No, Two, case, raw_cases
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


raw_cases(
    "npz_", ".npz",
    ("shape_bomb", Big, npz(descr="'<f8'", shape="(65536, 65536)")),
    ("shape_too_large", Bad, npz(shape="(3, 3)")),
    ("trailing", Bad, npz(data=FLOATS + b"\0")),
    ("objects", Code, lambda path: np.savez(path, w=np.array([Runs()], object))),
    ("negative_shape", Bad, npz(shape="(-2, -3)")),
    ("header_code", Bad, npz(shape="(__import__('os').getpid(),)")),
    ("header_deep", Bad, npz(shape="(" * 4000 + ")" * 4000)),
    ("header_not_dict", Bad, zip_file([("w.npy", npy_header("['descr']") + FLOATS)])),
    ("header_extra_key", Bad, npz(more="'x': (), ")),
    ("header_duplicate_key", Bad, npz(more="'shape': (6,), ")),
    ("header_long", Bad, npz(more=" " * 20_000)),
    ("header_huge_number", Bad, npz(shape=f"({'9' * 5000},)")),
    ("structured", ck.UnsupportedDtype, npz(descr="[('a', '<f4')]")),
    ("void", ck.UnsupportedDtype, npz(descr="'<V2'", shape="(12,)")),
    ("text", ck.UnsupportedDtype, lambda path: np.savez(path, w=np.array(["abc"]))),
    ("dates", ck.UnsupportedDtype,
     lambda path: np.savez(path, w=np.array(["2020-01-01"], "M8[D]"))),
    ("version_9", No, npz(version=9)),
    ("not_npy", Bad, zip_file([("w.npy", b"hello, this is text")])),
    ("duplicate", Two, zip_file([("w.npy", npy()), ("w.npy", npy())])),
    ("single_npy", No, npy()),
    # The deflate stream holds more than is declared.
    ("deflate_longer", Bad, zip_file(
        [("w.npy", npy() + bytes(100))], method=8, declare=(zlib.crc32(npy()), len(npy())))),
    # Read in 60 MiB.
    ("inflates_to_more_than_the_watch", Big, lambda path: np.savez_compressed(
        path, w=np.ones((60, 1 << 18), "f"))),
    # Read in 80 MiB.
    ("inflates_to_turned_more_than_the_watch", Big, lambda path: np.savez_compressed(
        path, w=np.asfortranarray(np.ones((40, 1 << 18), "f")))),
)  # fmt: skip
