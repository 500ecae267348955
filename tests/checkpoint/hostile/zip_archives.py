"""Hostile zip archives: members that hide, overlap, inflate or have two names."""

import struct
import zipfile
from io import BytesIO

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.arrays import npy, npy_header
from tests.checkpoint.hostile.cases import Bad, Big, Code, No, Out, Two, case, raw_cases
from tests.checkpoint.hostile.torch_files import FLOATS, torch_file, torch_members, zip_file

raw_cases(
    "", ".pt",
    ("zip_duplicate_member", Two, zip_file([*torch_members(), ("m/data/0", FLOATS)])),
    ("zip_case_duplicate_member", Two, zip_file([*torch_members(), ("m/VERSION", b"3\n")])),
    ("zip_parent_name", Out, zip_file([*torch_members(), ("m/data/../../evil", b"")])),
    ("zip_absolute_name", Out, zip_file([*torch_members(), ("/etc/passwd", b"")])),
    ("zip_backslash_name", Out, zip_file([*torch_members(), ("m\\data\\1", b"")])),
    ("zip_nul_name", Bad, zip_file([*torch_members(), ("m/a\0b", b"")])),
    ("zip_local_name_differs", Two, zip_file(torch_members(), local_name=b"m/verzion")),
    ("zip_overlap", Bad, zip_file(torch_members(), central={"offset": 0})),
    ("zip_compressed_torch", No, zip_file(torch_members(), method=8)),
    ("zip_crc_of_program", ck.IntegrityError,
     torch_file().replace(b"X\x01\0\0\0w", b"X\x01\0\0\0v")),
    ("zip_crc_of_data", ck.IntegrityError, torch_file().replace(FLOATS, FLOATS[:-1] + b"\1")),
    ("torch_two_roots", Two, zip_file([*torch_members(), ("n/version", b"3\n")])),
)  # fmt: skip


@case(".pt", Two)
def zip_local_size_differs() -> bytes:
    good = zip_file(torch_members())
    at = good.index(b"PK\3\4", 4)
    return good[: at + 22] + struct.pack("<L", 23) + good[at + 26 :]


@case(".npz", Bad)
def zip_quoted_overlap() -> bytes:
    """A member whose data contains the next member whole."""
    inner = zip_file([("b.npy", npy())])
    entry = inner[: inner.index(b"PK\1\2")]
    outer = zip_file([("a.npy", npy() + entry)])
    at = outer.index(entry)
    record = inner[inner.index(b"PK\1\2") : inner.index(b"PK\5\6")]
    record = record[:42] + struct.pack("<L", at) + record[46:]
    body, end = outer[: outer.index(b"PK\5\6")], outer[outer.index(b"PK\5\6") :]
    size = struct.unpack("<L", end[12:16])[0] + len(record)
    return body + record + end[:8] + struct.pack("<2HL", 2, 2, size) + end[16:]


@case(".npz", Big)
def zip_deflate_bomb() -> bytes:
    """2 GiB of zeros would take seconds to make; the declared size is what counts."""
    head = npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (536870912,), }")
    data = head + bytes(1 << 20)
    return zip_file([("a.npy", data)], method=8, declare=(0, len(head) + (1 << 31)))


def compressed(method: int) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("a.npy", npy())
    return out.getvalue()


raw_cases(
    "zip_", ".npz",
    ("encrypted", Code, zip_file([("a.npy", npy())], central={"flags": 0x801})),
    ("symlink", Code, zip_file([("a.npy", npy())], central={"attributes": 0o120777 << 16})),
    ("comment", Bad, zip_file([("a.npy", npy())], comment=b"hello")),
    # One reader takes the last end record, another searches for the first.
    ("two_directories", Two, zip_file([("a.npy", npy())]) + zip_file([("b.npy", npy())])),
    ("prepended", Two, b"PK\3\4" + bytes(16) + zip_file([("a.npy", npy())])),
    ("bzip2", No, compressed(zipfile.ZIP_BZIP2)),
    # zipfile marks LZMA with a flag that nothing here needs.
    ("lzma", No, compressed(zipfile.ZIP_LZMA).replace(b"PK\1\2?\3?\0\2", b"PK\1\2?\3?\0\0")),
    ("nested", No, zip_file([("a.zip", zip_file([("a.npy", npy())]))])),
)  # fmt: skip


@case(".npz", Two)
def zip64_locator_elsewhere() -> bytes:
    good = zip_file([("a.npy", npy())])
    at = good.index(b"PK\5\6")
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
    return good[:at] + locator + good[at:]


@case(".npz", Big)
def zip_member_count_bomb() -> bytes:
    good = zip_file([("a.npy", npy())])
    at = good.index(b"PK\5\6")
    count, start = 2**40, good.index(b"PK\1\2")
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, at - start, start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, at - start, start, 0)
    return good[:at] + record + locator + end


@case(".npz", Bad)
def zip_hidden_bytes() -> bytes:
    """Bytes between the last member and the directory."""
    good = zip_file([("a.npy", npy())], shift=8)
    at = good.index(b"PK\1\2")
    return good[:at] + b"\0" * 8 + good[at:]
