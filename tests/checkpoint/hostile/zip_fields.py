"""Hostile zip files, and headers of the arrays in .npz."""

import struct
import zipfile
import zlib
from io import BytesIO

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.arrays import npy, npy_header
from tests.checkpoint.hostile.cases import Bad, Big, Code, No, Out, Two, case, raw_case, raw_cases
from tests.checkpoint.hostile.torch_files import FLOATS, zip_file


def changed(
    data: bytes, of: bytes, at: int, layout: str, *values: int, last: bool = False
) -> bytes:
    """A file with some numbers changed behind a signature."""
    raw = bytearray(data)
    struct.pack_into(layout, raw, (raw.rindex if last else raw.index)(of) + at, *values)
    return bytes(raw)


# --- the directory --------------------------------------------------------------------------------

ONE = zip_file([("w.npy", npy())])
LOCAL, CENTRAL, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"
raw_cases(
    "zip_", ".npz",
    ("end_counts_one_more", Bad, changed(ONE, END, 8, "<2H", 2, 2)),
    ("end_counts_none", Bad, changed(ONE, END, 8, "<2H", 0, 0)),
    ("end_counts_differ", Bad, changed(ONE, END, 8, "<2H", 1, 2)),
    ("end_of_another_disk", Bad, changed(ONE, END, 4, "<H", 1)),
    ("end_of_another_start", Two, changed(ONE, END, 16, "<L", 0)),
    ("end_of_a_huge_directory", Two, changed(ONE, END, 12, "<L", 0xFFFFFFF0)),
    ("end_says_zip64_and_has_none", Two, changed(ONE, END, 16, "<L", 0xFFFFFFFF)),
    ("entry_of_another_disk", Bad, changed(ONE, CENTRAL, 34, "<H", 1)),
    ("entry_with_a_comment", Bad, changed(ONE, CENTRAL, 32, "<H", 5)),
    ("entry_of_a_long_name", Bad, changed(ONE, CENTRAL, 28, "<H", 0xFFFF)),
    ("entry_of_a_long_extra_field", Bad, changed(ONE, CENTRAL, 30, "<H", 0xFFFF)),
    ("entry_of_another_signature", Bad, changed(ONE, CENTRAL, 0, "<L", 0)),
    ("entry_beyond_the_file", Bad, changed(ONE, CENTRAL, 42, "<L", 10**9)),
    ("entry_says_zip64_and_has_none", Bad, changed(ONE, CENTRAL, 24, "<L", 0xFFFFFFFF)),
    ("entry_of_two_sizes", Bad, changed(ONE, CENTRAL, 24, "<L", 7)),
    ("entry_of_another_checksum", Two, changed(ONE, CENTRAL, 16, "<L", 7)),
    ("entry_is_strongly_encrypted", Code, zip_file([("w.npy", npy())], central={"flags": 0x841})),
    ("entry_is_masked", Code, zip_file([("w.npy", npy())], central={"flags": 0x2800})),
    ("entry_is_a_patch", Bad, zip_file([("w.npy", npy())], central={"flags": 0x820})),
    ("entry_of_method_99", No, zip_file([("w.npy", npy())], central={"method": 99})),
    ("entry_is_a_device", Code, zip_file([("w.npy", npy())], central={"attributes": 0o060644 << 16})),
    ("entry_is_a_fifo", Code, zip_file([("w.npy", npy())], central={"attributes": 0o010644 << 16})),
    ("entry_is_a_socket", Code, zip_file([("w.npy", npy())], central={"attributes": 0o140644 << 16})),
    ("entry_is_a_folder", Out, zip_file([("w.npy", npy()), ("v/", b"")])),
    ("local_flags_differ", Two, changed(ONE, LOCAL, 6, "<H", 0)),
    ("local_method_differs", Two, changed(ONE, LOCAL, 8, "<H", 8)),
    ("local_checksum_differs", Two, changed(ONE, LOCAL, 14, "<L", 1)),
    ("local_name_is_longer", Two, changed(ONE, LOCAL, 26, "<H", 6)),
    ("local_extra_runs_into_the_data", Bad, changed(ONE, LOCAL, 28, "<H", 8)),
    ("local_signature", No, changed(ONE, LOCAL, 1, "<H", 0)),
    ("descriptor_is_missing", Two, changed(changed(ONE, LOCAL, 6, "<H", 0x808), CENTRAL, 8, "<H", 0x808)),
    ("name_is_a_dot", Out, zip_file([("./w.npy", npy())])),
    ("name_has_an_empty_part", Out, zip_file([("a//w.npy", npy())])),
    ("name_is_empty", Out, zip_file([("", npy())])),
    ("name_of_4_kilobytes", Big, zip_file([("w" * 4096 + ".npy", npy())])),
    ("name_has_a_newline", Bad, zip_file([("a\nb.npy", npy())])),
    ("name_has_an_escape_sequence", Bad, zip_file([("a\x1b[31m.npy", npy())])),
    ("name_of_no_suffix", No, zip_file([("w", npy())])),
    ("name_is_the_suffix", Bad, zip_file([(".npy", npy())])),
    ("of_no_member", No, zip_file([("w.txt", b"")])),
    ("member_of_no_byte", Bad, zip_file([("w.npy", b"")])),
    ("name_is_not_utf8", Bad, ONE.replace(b"w.npy", b"\xff.npy")),
    ("of_an_end_alone", Two, ONE[-22:]),
)  # fmt: skip


def deflated(stream: bytes, size: int) -> bytes:
    """An archive whose member is a given deflate stream."""
    good = zip_file([("w.npy", stream)], declare=(0, len(stream)))
    raw = changed(changed(good, LOCAL, 8, "<H", 8), CENTRAL, 10, "<H", 8)
    return changed(changed(raw, LOCAL, 22, "<L", size), CENTRAL, 24, "<L", size)


def squeeze(data: bytes) -> bytes:
    out = zlib.compressobj(9, zlib.DEFLATED, -15)
    return out.compress(data) + out.flush()


def swollen(data: bytes, mebibytes: int) -> bytes:
    """A stream of data and zeros after it, of which one MiB is compressed."""
    out = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = out.compress(data) + out.flush(zlib.Z_FULL_FLUSH)
    zeros = out.compress(bytes(1 << 20)) + out.flush(zlib.Z_FULL_FLUSH)
    return start + zeros * mebibytes + out.flush()


raw_cases(
    "zip_deflate_", ".npz",
    ("is_of_zlib", Bad, deflated(zlib.compress(npy()), len(npy()))),
    ("is_cut_short", Bad, deflated(squeeze(npy())[:-4], len(npy()))),
    ("has_bytes_behind", Bad, deflated(squeeze(npy()) + b"abcd", len(npy()))),
    ("is_two_streams", Bad, deflated(squeeze(npy()) * 2, 2 * len(npy()))),
    ("is_shorter_than_declared", Bad, deflated(squeeze(npy()), len(npy()) + 1)),
    ("has_a_reserved_block", Bad, deflated(b"\x07" + bytes(40), len(npy()))),
    ("reaches_before_its_start", Bad,
     deflated(bytes.fromhex("4b040200") + b"\xff" * 40, len(npy()))),
    ("is_empty_blocks_without_end", Bad, deflated(b"\0\0\0\xff\xff" * 200_000, len(npy()))),
)  # fmt: skip


# A thousandfold: the member says 128 bytes and inflates to 64 MiB.
raw_case(
    "zip_deflate_that_grows_beyond_its_size",
    ".npz",
    Bad,
    lambda: deflated(swollen(npy(), 64), len(npy())),
)


@case(".npz", Big)
def zip_two_hundred_bombs() -> bytes:
    """Members of 16 MiB each, together beyond what the tensors of a file may take."""
    head = npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (4194304,), }")
    member = swollen(head, 16)
    size, crc = len(head) + (16 << 20), zlib.crc32(head + bytes(16 << 20))
    many = zip_file([(f"w{i:03}.npy", member) for i in range(200)])
    raw = bytearray(many)
    for mark, method, sizes in ((LOCAL, 8, 14), (CENTRAL, 10, 16)):
        at = raw.find(mark)
        while at >= 0:
            struct.pack_into("<H", raw, at + method, 8)
            struct.pack_into("<3L", raw, at + sizes, crc, len(member), size)
            at = raw.find(mark, at + 4)
    return bytes(raw)


@case(".npz", Big)
def zip_directory_larger_than_its_file_may_build() -> bytes:
    """90,000 members of no byte: their names alone."""
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for i in range(90_000):
            archive.writestr(f"{i:05}.npy", b"")
    return out.getvalue()


@case(".npz", Two)
def zip_unicode_path_names_another() -> bytes:
    """An extra field that some readers take for the name."""
    field = struct.pack("<HHBL", 0x7075, 5 + 5, 1, zlib.crc32(b"w.npy")) + b"v.npy"
    raw = bytearray(ONE)
    at, end = raw.index(CENTRAL), raw.index(END)
    struct.pack_into("<H", raw, at + 30, len(field))
    struct.pack_into("<L", raw, end + 12, end - at + len(field))
    return bytes(raw[:end] + field + raw[end:])


# --- .npy headers -----------------------------------------------------------------------------------


def npy_of(header: str, data: bytes = FLOATS, version: int = 1) -> bytes:
    return zip_file([("w.npy", npy_header(header, version) + data)])


HEAD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
raw_cases(
    "npy_", ".npz",
    ("fortran_is_one", Bad, npy_of(HEAD.replace("False", "1"))),
    ("fortran_is_text", Bad, npy_of(HEAD.replace("False", "'False'"))),
    ("fortran_is_missing", Bad, npy_of(HEAD.replace("'fortran_order': False, ", ""))),
    ("fortran_twice", Bad, npy_of(HEAD.replace("'shape'", "'fortran_order': True, 'shape'"))),
    ("shape_is_a_list", Bad, npy_of(HEAD.replace("(2, 3)", "[2, 3]"))),
    ("shape_is_a_number", Bad, npy_of(HEAD.replace("(2, 3)", "6"))),
    ("shape_is_no_tuple", Bad, npy_of(HEAD.replace("(2, 3)", "(6)"))),
    ("shape_of_floats", Bad, npy_of(HEAD.replace("(2, 3)", "(2.0, 3)"))),
    ("shape_of_truth", Bad, npy_of(HEAD.replace("(2, 3)", "(True, 6)"))),
    ("shape_of_hexadecimals", Bad, npy_of(HEAD.replace("(2, 3)", "(0x2, 3)"))),
    ("shape_of_arabic_digits", Bad, npy_of(HEAD.replace("(2, 3)", "(\u0662, 3)"), version=3)),
    ("shape_in_a_comment", Bad, npy_of(HEAD.replace("(2, 3)", "(2, #3)\n3)"))),
    ("shape_of_64_axes", Big, npy_of(HEAD.replace("(2, 3)", "(" + "1, " * 63 + "6)"))),
    ("shape_overflows", Big, npy_of(HEAD.replace("(2, 3)", f"({2**63}, {2**63}, 4)"))),
    ("shape_wraps_to_24_bytes", Big, npy_of(HEAD.replace("(2, 3)", f"({2**62 + 6},)"))),
    ("shape_of_zeros_and_huge", Big, npy_of(HEAD.replace("(2, 3)", f"(0, {2**62})"), b"")),
    ("keys_in_bytes", Bad, npy_of(HEAD.replace("'descr'", "b'descr'"))),
    ("key_is_a_number", Bad, npy_of(HEAD.replace("'descr'", "0"))),
    ("descr_is_a_tuple", Bad, npy_of(HEAD.replace("'<f4'", "('<f4', (2,))"))),
    ("descr_is_a_dict", Bad, npy_of(HEAD.replace("'<f4'", "{'names': [], 'formats': []}"))),
    ("descr_is_a_comma_list", ck.UnsupportedDtype, npy_of(HEAD.replace("<f4", "<f4,<f4"))),
    ("descr_is_a_subarray", ck.UnsupportedDtype, npy_of(HEAD.replace("<f4", "(2,)<f4"))),
    ("descr_is_empty", ck.UnsupportedDtype, npy_of(HEAD.replace("<f4", ""))),
    ("descr_of_16_bytes", ck.UnsupportedDtype, npy_of(HEAD.replace("<f4", "<f99"))),
    ("descr_of_objects_of_a_size", Code, npy_of(HEAD.replace("<f4", "|O8"))),
    ("descr_is_a_name", ck.UnsupportedDtype, npy_of(HEAD.replace("<f4", "float32"))),
    ("two_literals", Bad, npy_of(HEAD + " " + HEAD)),
    ("no_literal", Bad, npy_of("")),
    ("nul_behind", Bad, npy_of(HEAD + "\0" * 8)),
    ("braces_of_a_set", Bad, npy_of("{'descr', 'fortran_order', 'shape'}")),
    ("spaces_that_backtrack", Bad, npy_of("{" + " " * 9000 + "}")),
    ("commas_that_backtrack", Bad, npy_of("{'shape': (" + "1 ," * 2500 + "x)}")),
    ("of_version_1_1", No, zip_file([("w.npy", b"\x93NUMPY\1\1" + npy()[8:])])),
    ("of_half_a_length", Bad, zip_file([("w.npy", npy()[:9])])),
    ("longer_than_its_member", Bad, zip_file([("w.npy", npy()[:8] + b"\xff\x20" + npy()[10:])])),
    ("of_4_gibibytes", Bad, zip_file([("w.npy", b"\x93NUMPY\2\0" + b"\xff" * 4 + npy()[10:])])),
    ("is_not_utf8", Bad, zip_file([("w.npy", b"\x93NUMPY\3\0" + struct.pack("<L", 4) + b"\xff{}\n")])),
)  # fmt: skip


# numpy.load finds `w` and `w.npy` under one name.
raw_case(
    "npz_names_differ_in_the_suffix",
    ".npz",
    Two,
    lambda: zip_file([("w.npy", npy()), ("w.npy.npy", npy()), ("w.npy", npy())]),
)
