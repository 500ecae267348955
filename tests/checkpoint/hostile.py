"""Files that must be refused, each built from a sound file with one thing wrong.

CASES maps a name to its suffix, its builder and the error it must raise. The sound files are in
SOUND: they must be accepted, or a refusal would prove nothing.
"""

import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from jaxmha.converters import checkpoint as ck
from jaxmha.converters.checkpoint.errors import CheckpointError


class Case(NamedTuple):
    suffix: str
    build: Callable[[Path], None]
    error: type[CheckpointError]


CASES: dict[str, Case] = {}
SOUND: dict[str, Case] = {}


def case(
    suffix: str, error: type[CheckpointError] = CheckpointError
) -> Callable[[Callable[..., bytes | None]], Callable[..., bytes | None]]:
    """Registers a builder. One without parameters returns bytes, one with a path writes itself."""

    def register(function: Callable[..., bytes | None]) -> Callable[..., bytes | None]:
        def build(path: Path) -> None:
            if function.__code__.co_argcount:
                function(path)
            else:
                data = function()
                assert data is not None
                path.write_bytes(data)

        table = SOUND if error is CheckpointError else CASES
        assert function.__name__ not in table
        table[function.__name__] = Case(suffix, build, error)
        return function

    return register


# --- zip ---------------------------------------------------------------------------------------


def zip_file(
    members: list[tuple[str, bytes]],
    *,
    method: int = 0,
    declare: tuple[int, int] | None = None,
    central: dict[str, Any] | None = None,
    local_name: bytes | None = None,
    comment: bytes = b"",
    shift: int = 0,
) -> bytes:
    """A zip by hand.

    Of the last member, `declare` overrides checksum and size in both headers, `central` any field
    in the central one.
    """
    out, directory = b"", b""
    for name, data in members:
        last = (name, data) == members[-1]
        raw = name.encode()
        stored = data
        if method == 8:
            deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
            stored = deflate.compress(data) + deflate.flush()
        offset = len(out)
        crc, size = declare if last and declare else (zlib.crc32(data), len(data))
        sizes = (crc, len(stored), size)
        in_local = local_name if last and local_name is not None else raw
        out += struct.pack(
            "<4s5H3L2H", b"PK\3\4", 20, 0x800, method, 0, 33, *sizes, len(in_local), 0
        )
        out += in_local + stored
        field = {
            "flags": 0x800,
            "method": method,
            "crc": crc,
            "compressed": len(stored),
            "size": size,
            "attributes": 0,
            "offset": offset,
        } | ((central or {}) if last else {})
        directory += struct.pack(
            "<4s6H3L5H2L",
            *(b"PK\1\2", 3 << 8 | 20, 20, field["flags"], field["method"], 0, 33),
            *(field["crc"], field["compressed"], field["size"], len(raw), 0, 0, 0, 0),
            *(field["attributes"], field["offset"]),
        )
        directory += raw
    end = struct.pack(
        "<4s4H2LH",
        *(b"PK\5\6", 0, 0, len(members), len(members)),
        *(len(directory), len(out) + shift, len(comment)),
    )
    return out + directory + end + comment


# --- torch -------------------------------------------------------------------------------------

ORDERED = b"ccollections\nOrderedDict\n)R"
V2 = b"ctorch._utils\n_rebuild_tensor_v2\n"
V3 = b"ctorch._utils\n_rebuild_tensor_v3\n"


def text(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return b"X" + struct.pack("<L", len(raw)) + raw


def number(n: int) -> bytes:
    if -(2**31) <= n < 2**31:
        return b"J" + struct.pack("<i", n)
    return b"\x8a\x09" + n.to_bytes(9, "little", signed=True)


def numbers(*ns: int) -> bytes:
    return b"(" + b"".join(map(number, ns)) + b"t"


def storage(kind: str = "torch\nFloatStorage", key: str = "0", count: int = 6) -> bytes:
    return (
        b"("
        + text("storage")
        + b"c"
        + kind.encode()
        + b"\n"
        + text(key)
        + text("cpu")
        + number(count)
        + b"tQ"
    )


def tensor(
    of: bytes | None = None,
    offset: int = 0,
    shape: tuple[int, ...] = (2, 3),
    strides: tuple[int, ...] = (3, 1),
    after: bytes = b"",
) -> bytes:
    body = (storage() if of is None else of) + number(offset) + numbers(*shape)
    return V2 + b"(" + body + numbers(*strides) + b"\x89" + ORDERED + after + b"tR"


def state(*items: bytes, after: bytes = b"") -> bytes:
    """A program that makes a state dict of the given keys and values."""
    return b"\x80\x02" + ORDERED + b"(" + b"".join(items) + b"u" + after + b"."


FLOATS = np.arange(6, dtype="<f4").tobytes()
PROGRAM = state(text("w"), tensor())


def torch_members(
    program: bytes = PROGRAM, data: bytes = FLOATS, **extra: bytes
) -> list[tuple[str, bytes]]:
    others = [(f"m/{name}", value) for name, value in extra.items()]
    return [("m/data.pkl", program), ("m/data/0", data), *others, ("m/version", b"3\n")]


def torch_file(program: bytes = PROGRAM, data: bytes = FLOATS, **extra: bytes) -> bytes:
    return zip_file(torch_members(program, data, **extra))


@case(".pt")
def sound_torch() -> bytes:
    return torch_file()


@case(".pt", ck.AmbiguousFile)
def zip_duplicate_member() -> bytes:
    return zip_file([*torch_members(), ("m/data/0", FLOATS)])


@case(".pt", ck.AmbiguousFile)
def zip_case_duplicate_member() -> bytes:
    return zip_file([*torch_members(), ("m/VERSION", b"3\n")])


@case(".pt", ck.PathEscape)
def zip_parent_name() -> bytes:
    return zip_file([*torch_members(), ("m/data/../../evil", b"")])


@case(".pt", ck.PathEscape)
def zip_absolute_name() -> bytes:
    return zip_file([*torch_members(), ("/etc/passwd", b"")])


@case(".pt", ck.PathEscape)
def zip_backslash_name() -> bytes:
    return zip_file([*torch_members(), ("m\\data\\1", b"")])


@case(".pt", ck.MalformedFile)
def zip_nul_name() -> bytes:
    return zip_file([*torch_members(), ("m/a\0b", b"")])


@case(".pt", ck.AmbiguousFile)
def zip_local_name_differs() -> bytes:
    return zip_file(torch_members(), local_name=b"m/verzion")


@case(".pt", ck.AmbiguousFile)
def zip_local_size_differs() -> bytes:
    good = zip_file(torch_members())
    at = good.index(b"PK\3\4", 4)
    return good[: at + 22] + struct.pack("<L", 23) + good[at + 26 :]


@case(".pt", ck.MalformedFile)
def zip_overlap() -> bytes:
    return zip_file(torch_members(), central={"offset": 0})


@case(".npz", ck.MalformedFile)
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


@case(".npz", ck.BudgetExceeded)
def zip_deflate_bomb() -> bytes:
    """2 GiB of zeros would take seconds to make; the declared size is what counts."""
    head = npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (536870912,), }")
    data = head + bytes(1 << 20)
    return zip_file([("a.npy", data)], method=8, declare=(0, len(head) + (1 << 31)))


@case(".pt", ck.UnsupportedFormat)
def zip_compressed_torch() -> bytes:
    return zip_file(torch_members(), method=8)


@case(".npz", ck.UnsupportedFormat)
def zip_bzip2() -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.npy", npy())
    return out.getvalue()


@case(".npz", ck.UnsupportedFormat)
def zip_lzma() -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npy", npy())
    # zipfile marks LZMA with a flag that nothing here needs
    return out.getvalue().replace(b"PK\1\2?\3?\0\2", b"PK\1\2?\3?\0\0")


@case(".npz", ck.ForbiddenContent)
def zip_encrypted() -> bytes:
    return zip_file([("a.npy", npy())], central={"flags": 0x801})


@case(".npz", ck.ForbiddenContent)
def zip_symlink() -> bytes:
    return zip_file([("a.npy", npy())], central={"attributes": 0o120777 << 16})


@case(".pt", ck.IntegrityError)
def zip_crc_of_program() -> bytes:
    return torch_file().replace(b"X\x01\0\0\0w", b"X\x01\0\0\0v")


@case(".pt", ck.IntegrityError)
def zip_crc_of_data() -> bytes:
    return torch_file().replace(FLOATS, FLOATS[:-1] + b"\1")


@case(".npz", ck.MalformedFile)
def zip_comment() -> bytes:
    return zip_file([("a.npy", npy())], comment=b"hello")


@case(".npz", ck.AmbiguousFile)
def zip_two_directories() -> bytes:
    """One reader takes the last end record, another searches for the first."""
    return zip_file([("a.npy", npy())]) + zip_file([("b.npy", npy())])


@case(".npz", ck.AmbiguousFile)
def zip64_locator_elsewhere() -> bytes:
    good = zip_file([("a.npy", npy())])
    at = good.index(b"PK\5\6")
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
    return good[:at] + locator + good[at:]


@case(".npz", ck.AmbiguousFile)
def zip_prepended() -> bytes:
    good = zip_file([("a.npy", npy())])
    return b"PK\3\4" + bytes(16) + good


@case(".pt", ck.AmbiguousFile)
def torch_two_roots() -> bytes:
    return zip_file([*torch_members(), ("n/version", b"3\n")])


@case(".npz", ck.BudgetExceeded)
def zip_member_count_bomb() -> bytes:
    good = zip_file([("a.npy", npy())])
    at = good.index(b"PK\5\6")
    count, start = 2**40, good.index(b"PK\1\2")
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, at - start, start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, at - start, start, 0)
    return good[:at] + record + locator + end


@case(".npz", ck.UnsupportedFormat)
def zip_nested() -> bytes:
    return zip_file([("a.zip", zip_file([("a.npy", npy())]))])


@case(".npz", ck.MalformedFile)
def zip_hidden_bytes() -> bytes:
    """Bytes between the last member and the directory."""
    good = zip_file([("a.npy", npy())], shift=8)
    at = good.index(b"PK\1\2")
    return good[:at] + b"\0" * 8 + good[at:]


# --- pickle ------------------------------------------------------------------------------------


class Runs:
    """Pickles to a call of os.system."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/jaxmha-was-run",)


@case(".pt", ck.ForbiddenContent)
def pickle_os_system() -> bytes:
    return torch_file(pickle.dumps({"w": Runs()}, 2))


@case(".pt", ck.ForbiddenContent)
def pickle_dotted_global() -> bytes:
    return torch_file(state(text("w"), b"ctorch\n_utils._rebuild_tensor_v2\n"))


@case(".pt", ck.ForbiddenContent)
def pickle_builtins_getattr() -> bytes:
    return torch_file(state(text("w"), b"c__builtin__\ngetattr\n"))


@case(".pt", ck.ForbiddenContent)
def pickle_stack_global() -> bytes:
    return torch_file(state(text("w"), b"\x8c\x02os\x8c\x06system\x93"))


@case(".pt", ck.ForbiddenContent)
def pickle_inst() -> bytes:
    return torch_file(state(text("w"), b"(ios\nsystem\n"))


@case(".pt", ck.ForbiddenContent)
def pickle_obj() -> bytes:
    return torch_file(state(text("w"), b"(ccollections\nOrderedDict\no"))


@case(".pt", ck.ForbiddenContent)
def pickle_newobj() -> bytes:
    return torch_file(state(text("w"), b"ccollections\nOrderedDict\n)\x81"))


@case(".pt", ck.ForbiddenContent)
def pickle_extension() -> bytes:
    return torch_file(state(text("w"), b"\x82\x01"))


@case(".pt", ck.ForbiddenContent)
def pickle_call_of_text() -> bytes:
    return torch_file(state(text("w"), text("os.system") + b")R"))


@case(".pt", ck.ForbiddenContent)
def pickle_call_of_storage_class() -> bytes:
    return torch_file(state(text("w"), b"ctorch\nFloatStorage\n)R"))


@case(".pt", ck.ForbiddenContent)
def pickle_call_without_tuple() -> bytes:
    return torch_file(state(text("w"), b"ccollections\nOrderedDict\n]R"))


@case(".pt", ck.ForbiddenContent)
def pickle_ordered_dict_of_items() -> bytes:
    return torch_file(state(text("w"), b"ccollections\nOrderedDict\n]\x85R"))


@case(".pt", ck.ForbiddenContent)
def pickle_build_on_class() -> bytes:
    return torch_file(state(text("w"), b"ccollections\nOrderedDict\n}b"))


@case(".pt", ck.ForbiddenContent)
def pickle_build_on_function() -> bytes:
    return torch_file(state(text("w"), V2 + b"}" + text("__code__") + b"Nsb"))


@case(".pt", ck.ForbiddenContent)
def pickle_build_on_plain_dict() -> bytes:
    return torch_file(state(text("w"), tensor(), text("d"), b"}}b"))


@case(".pt", ck.ForbiddenContent)
def pickle_build_attribute() -> bytes:
    return torch_file(state(text("w"), tensor(), after=b"}" + text("keys") + b"Nsb"))


@case(".pt", ck.MalformedFile)
def pickle_memo_index_bomb() -> bytes:
    return torch_file(b"\x80\x02}r\x00\x00\x00\x08.")


@case(".pt", ck.MalformedFile)
def pickle_memo_missing() -> bytes:
    return torch_file(b"\x80\x02h\x07.")


@case(".pt", ck.MalformedFile)
def pickle_length_bomb() -> bytes:
    return torch_file(b"\x80\x02X\xff\xff\xff\x7fw.")


@case(".pt", ck.MalformedFile)
def pickle_long_length_bomb() -> bytes:
    return torch_file(b"\x80\x02\x8a\xff\x01.")


@case(".pt", ck.ForbiddenContent)
def pickle_long4_bomb() -> bytes:
    return torch_file(b"\x80\x02\x8b\xff\xff\xff\x7f.")


@case(".pt", ck.BudgetExceeded)
def pickle_tuple_tower_key() -> bytes:
    tower = b")q\x00" + b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(40)
    )
    return torch_file(state(tower + b"N"))


@case(".pt", ck.ForbiddenContent)
def pickle_tuple_key() -> bytes:
    return torch_file(state(b"K\x01K\x02\x86", tensor()))


@case(".pt", ck.ForbiddenContent)
def pickle_boolean_key() -> bytes:
    return torch_file(state(b"\x88", tensor()))


@case(".pt", ck.BudgetExceeded)
def pickle_deep_tuples() -> bytes:
    return torch_file(b"\x80\x02)" + b"\x85" * 100_000 + b".")


@case(".pt", ck.BudgetExceeded)
def pickle_deep_dicts() -> bytes:
    deep = b"}" + (text("a") + b"}") * 5000 + b"s" * 5000
    return torch_file(b"\x80\x02" + deep + b".", b"")


@case(".pt", ck.ForbiddenContent)
def pickle_shared_dict_tower() -> bytes:
    """Thirty dicts that each hold the one before twice: 2**30 names for one tensor."""
    tower = b"}" + text("w") + tensor() + b"sq\x00"
    for i in range(30):
        item = b"h" + bytes([i])
        tower += b"}(" + text("a") + item + text("b") + item + b"uq" + bytes([i + 1])
    return torch_file(b"\x80\x02(" + tower + b"t.").replace(b"(}", b"(}", 1)


@case(".pt", ck.BudgetExceeded)
def pickle_one_tensor_of_many_names() -> bytes:
    """Two bytes for each name."""
    listed = tensor() + b"q\x00" + b"h\x00" * 5_000
    return torch_file(state(text("w"), b"](" + listed + b"e"))


@case(".pt", ck.ForbiddenContent)
def pickle_dup() -> bytes:
    return torch_file(b"\x80\x02}2.")


@case(".pt", ck.ForbiddenContent)
def pickle_protocol_4() -> bytes:
    return torch_file(b"\x80\x04}.")


@case(".pt", ck.ForbiddenContent)
def pickle_frame() -> bytes:
    return torch_file(b"\x80\x02\x95\x02\0\0\0\0\0\0\0}.")


@case(".pt", ck.MalformedFile)
def pickle_without_protocol() -> bytes:
    return torch_file(b"}.")


@case(".pt", ck.MalformedFile)
def pickle_without_stop() -> bytes:
    return torch_file(PROGRAM[:-1])


@case(".pt", ck.MalformedFile)
def pickle_bytes_after_stop() -> bytes:
    return torch_file(PROGRAM + b"cos\nsystem\n.")


@case(".pt", ck.MalformedFile)
def pickle_empty_stack() -> bytes:
    return torch_file(b"\x80\x02s.")


@case(".pt", ck.MalformedFile)
def pickle_two_objects() -> bytes:
    return torch_file(b"\x80\x02}}.")


@case(".pt", ck.MalformedFile)
def pickle_no_mark() -> bytes:
    return torch_file(b"\x80\x02}u.")


@case(".pt", ck.MalformedFile)
def pickle_odd_items() -> bytes:
    return torch_file(b"\x80\x02}(K\x01u.")


@case(".pt", ck.AmbiguousFile)
def pickle_duplicate_key() -> bytes:
    return torch_file(state(text("w"), tensor(), text("w"), tensor()))


@case(".pt", ck.AmbiguousFile)
def pickle_same_name_by_two_ways() -> bytes:
    inner = b"}" + text("b") + tensor() + b"s"
    return torch_file(state(text("a.b"), tensor(), text("a"), inner))


@case(".pt", ck.ForbiddenContent)
def pickle_contains_itself() -> bytes:
    return torch_file(b"\x80\x02}q\x00" + text("a") + b"h\x00s.", b"")


@case(".pt", ck.ForbiddenContent)
def pickle_not_a_dict() -> bytes:
    return torch_file(b"\x80\x02" + tensor() + b".")


@case(".pt", ck.MalformedFile)
def pickle_surrogate_name() -> bytes:
    return torch_file(state(text(b"\xed\xa0\x80"), tensor()))


@case(".pt", ck.PathEscape)
def pickle_path_name() -> bytes:
    return torch_file(state(text("../../etc/passwd"), tensor()))


@case(".pt", ck.BudgetExceeded)
def pickle_long_name() -> bytes:
    return torch_file(state(text("w" * 5000), tensor()))


@case(".pt", ck.ForbiddenContent)
def pickle_text_opcode() -> bytes:
    return torch_file(state(b"S'w\\q'\n", tensor()))


# --- torch tensors -----------------------------------------------------------------------------


@case(".pt", ck.MalformedFile)
def torch_beyond_storage() -> bytes:
    return torch_file(state(text("w"), tensor(offset=1)))


@case(".pt", ck.MalformedFile)
def torch_huge_stride() -> bytes:
    return torch_file(state(text("w"), tensor(strides=(2**62, 1))))


@case(".pt", ck.MalformedFile)
def torch_negative_offset() -> bytes:
    return torch_file(state(text("w"), tensor(offset=-1)))


@case(".pt", ck.MalformedFile)
def torch_negative_stride() -> bytes:
    return torch_file(state(text("w"), tensor(strides=(-3, 1))))


@case(".pt", ck.MalformedFile)
def torch_negative_size() -> bytes:
    return torch_file(state(text("w"), tensor(shape=(-2, 3))))


@case(".pt", ck.MalformedFile)
def torch_rank_mismatch() -> bytes:
    return torch_file(state(text("w"), tensor(strides=(1,))))


@case(".pt", ck.BudgetExceeded)
def torch_expansion_bomb() -> bytes:
    return torch_file(state(text("w"), tensor(shape=(2**20, 2**20), strides=(0, 0))))


@case(".pt", ck.BudgetExceeded)
def torch_rank_bomb() -> bytes:
    return torch_file(state(text("w"), tensor(shape=(1,) * 65, strides=(0,) * 65)))


@case(".pt", ck.BudgetExceeded)
def torch_zero_size_bomb() -> bytes:
    return torch_file(state(text("w"), tensor(shape=(0, 2**62), strides=(1, 1))))


@case(".pt", ck.MalformedFile)
def torch_short_storage() -> bytes:
    return torch_file(data=FLOATS[:-4])


@case(".pt", ck.AmbiguousFile)
def torch_storage_of_two_dtypes() -> bytes:
    ints = storage("torch\nIntStorage")
    return torch_file(state(text("w"), tensor(), text("v"), tensor(ints)))


@case(".pt", ck.ForbiddenContent)
def torch_conjugate() -> bytes:
    return torch_file(state(text("w"), tensor(after=b"}" + text("conj") + b"\x88s")))


@case(".pt", ck.ForbiddenContent)
def torch_backward_hooks() -> bytes:
    hooks = ORDERED + text("a") + b"Ns"
    body = storage() + number(0) + numbers(2, 3) + numbers(3, 1) + b"\x89" + hooks
    return torch_file(state(text("w"), V2 + b"(" + body + b"tR"))


@case(".pt", ck.MalformedFile)
def torch_byteorder_junk() -> bytes:
    return torch_file(byteorder=b"middle")


@case(".pt", ck.ForbiddenContent)
def torch_sparse() -> bytes:
    return torch_file(state(text("w"), b"ctorch._utils\n_rebuild_sparse_tensor\n"))


@case(".pt", ck.ForbiddenContent)
def torch_quantised() -> bytes:
    return torch_file(state(text("w"), b"ctorch._utils\n_rebuild_qtensor\n"))


@case(".pt", ck.ForbiddenContent)
def torch_meta() -> bytes:
    return torch_file(state(text("w"), b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n"))


@case(".pt", ck.ForbiddenContent)
def torch_bare_storage() -> bytes:
    return torch_file(state(text("w"), storage()))


@case(".pt", ck.MalformedFile)
def torch_storage_key_path() -> bytes:
    return torch_file(state(text("w"), tensor(storage(key="../data.pkl"))))


@case(".pt", ck.IncompleteCheckpoint)
def torch_storage_missing() -> bytes:
    return torch_file(state(text("w"), tensor(storage(key="7"))))


@case(".pt", ck.MalformedFile)
def torch_storage_unused() -> bytes:
    return zip_file([*torch_members(), ("m/data/1", b"abc")])


@case(".pt", ck.MalformedFile)
def torch_storage_malformed() -> bytes:
    return torch_file(state(text("w"), tensor(text("storage") + b"Q")))


@case(".pt", ck.MalformedFile)
def torch_storage_negative() -> bytes:
    return torch_file(state(text("w"), tensor(storage(count=-6))))


@case(".pt", ck.MalformedFile)
def torch_boolean_bytes() -> bytes:
    flags = tensor(storage("torch\nBoolStorage"))
    return torch_file(state(text("w"), flags), b"\0\1\2\3\0\1")


@case(".pt", ck.IncompleteCheckpoint)
def torch_without_version() -> bytes:
    return zip_file(torch_members()[:-1])


@case(".pt", ck.MalformedFile)
def torch_stray_member() -> bytes:
    return torch_file(**{"evil.py": b"import os"})


@case(".pt", ck.UnsupportedFormat)
def torch_script() -> bytes:
    return torch_file(**{"constants.pkl": b"\x80\x02).", "code/m.py": b""})


@case(".pt", ck.UnsupportedFormat)
def torch_legacy() -> bytes:
    return b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19." + b"\x80\x02M\xe9\x03."


@case(".pt", ck.UnsupportedFormat)
def torch_tar(path: Path) -> None:
    import tarfile

    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("pickle"), BytesIO())


@case(".pt", ck.UnsupportedFormat)
def torch_bare_pickle() -> bytes:
    return pickle.dumps({"w": 1}, 4)


# --- safetensors -------------------------------------------------------------------------------


def entry(
    dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24), **extra: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}


def safetensors(header: Any, data: bytes = FLOATS, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


@case(".safetensors")
def sound_safetensors() -> bytes:
    return safetensors({"w": entry(), "__metadata__": {"format": "pt"}})


@case(".safetensors", ck.MalformedFile)
def st_header_longer_than_file() -> bytes:
    return safetensors({"w": entry()}, length=10_000)


@case(".safetensors", ck.MalformedFile)
def st_header_2_63() -> bytes:
    return safetensors({"w": entry()}, length=2**63)


@case(".safetensors", ck.BudgetExceeded)
def st_header_too_long(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 100_000_001) + b"{")
    os.truncate(path, 100_000_100)  # sparse: no disk


@case(".safetensors", ck.MalformedFile)
def st_leading_space() -> bytes:
    return safetensors(b" " + json.dumps({"w": entry()}).encode())


@case(".safetensors", ck.MalformedFile)
def st_byte_order_mark() -> bytes:
    return safetensors(b"\xef\xbb\xbf" + json.dumps({"w": entry()}).encode())


@case(".safetensors", ck.AmbiguousFile)
def st_duplicate_key() -> bytes:
    one = json.dumps(entry())
    return safetensors(f'{{"w":{one},"w":{one}}}'.encode())


@case(".safetensors", ck.AmbiguousFile)
def st_duplicate_field() -> bytes:
    return safetensors(b'{"w":{"dtype":"F32","dtype":"I32","shape":[2,3],"data_offsets":[0,24]}}')


@case(".safetensors", ck.MalformedFile)
def st_overlap() -> bytes:
    return safetensors({"w": entry(), "v": entry(offsets=(12, 36))}, bytes(36))


@case(".safetensors", ck.MalformedFile)
def st_hole() -> bytes:
    return safetensors({"w": entry(), "v": entry(offsets=(28, 52))}, bytes(52))


@case(".safetensors", ck.MalformedFile)
def st_short() -> bytes:
    return safetensors({"w": entry()}, FLOATS[:-1])


@case(".safetensors", ck.MalformedFile)
def st_trailing() -> bytes:
    return safetensors({"w": entry()}, FLOATS + b"\0")


@case(".safetensors", ck.MalformedFile)
def st_shape_disagrees() -> bytes:
    return safetensors({"w": entry(shape=(2, 4))})


@case(".safetensors", ck.BudgetExceeded)
def st_shape_overflow() -> bytes:
    return safetensors({"w": entry(shape=(2**32, 2**32, 2**3))})


@case(".safetensors", ck.MalformedFile)
def st_negative_size() -> bytes:
    return safetensors({"w": entry(shape=(-2, -3))})


@case(".safetensors", ck.MalformedFile)
def st_float_size() -> bytes:
    return safetensors({"w": entry(shape=(2.0, 3.0))})


@case(".safetensors", ck.MalformedFile)
def st_boolean_size() -> bytes:
    return safetensors({"w": entry(shape=(True, 6))})


@case(".safetensors", ck.MalformedFile)
def st_nan_offset() -> bytes:
    return safetensors(b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,NaN]}}')


@case(".safetensors", ck.MalformedFile)
def st_huge_integer() -> bytes:
    return safetensors(
        b'{"w":{"dtype":"F32","shape":[' + b"9" * 6000 + b'],"data_offsets":[0,24]}}'
    )


@case(".safetensors", ck.MalformedFile)
def st_reversed_range() -> bytes:
    return safetensors({"w": entry(offsets=(24, 0))})


@case(".safetensors", ck.BudgetExceeded)
def st_zero_size_huge_dimension() -> bytes:
    return safetensors({"w": entry(shape=(0, 2**62), offsets=(0, 0))}, b"")


@case(".safetensors", ck.BudgetExceeded)
def st_rank_bomb() -> bytes:
    return safetensors({"w": entry(shape=[1] * 70 + [6])})


@case(".safetensors", ck.UnsupportedDtype)
def st_unknown_dtype() -> bytes:
    return safetensors({"w": entry("F31")})


@case(".safetensors", ck.UnsupportedDtype)
def st_dtype_not_text() -> bytes:
    return safetensors({"w": entry(["F32"])})


@case(".safetensors", ck.UnsupportedDtype)
def st_four_bit() -> bytes:
    return safetensors({"w": entry("F4", shape=(3,), offsets=(0, 2))}, b"ab")


@case(".safetensors", ck.MalformedFile)
def st_extra_field() -> bytes:
    return safetensors({"w": entry(strides=[3, 1])})


@case(".safetensors", ck.MalformedFile)
def st_missing_field() -> bytes:
    return safetensors({"w": {"dtype": "F32", "shape": [2, 3]}})


@case(".safetensors", ck.MalformedFile)
def st_metadata_number() -> bytes:
    return safetensors({"w": entry(), "__metadata__": {"step": 3}})


@case(".safetensors", ck.MalformedFile)
def st_metadata_list() -> bytes:
    return safetensors({"w": entry(), "__metadata__": []})


@case(".safetensors", ck.MalformedFile)
def st_deep_json() -> bytes:
    return safetensors(b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}")


@case(".safetensors", ck.MalformedFile)
def st_invalid_utf8() -> bytes:
    return safetensors(b'{"\xff":' + json.dumps(entry()).encode() + b"}")


@case(".safetensors", ck.MalformedFile)
def st_lone_surrogate() -> bytes:
    return safetensors(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}")


@case(".safetensors", ck.PathEscape)
def st_parent_name() -> bytes:
    return safetensors({"../../etc/x": entry()})


@case(".safetensors", ck.PathEscape)
def st_absolute_name() -> bytes:
    return safetensors({"/etc/x": entry()})


@case(".safetensors", ck.MalformedFile)
def st_nul_name() -> bytes:
    return safetensors({"a\0b": entry()})


@case(".safetensors", ck.MalformedFile)
def st_empty_name() -> bytes:
    return safetensors({"": entry()})


@case(".safetensors", ck.MalformedFile)
def st_after_header() -> bytes:
    return safetensors(json.dumps({"w": entry()}).encode() + b"\n\n")


@case(".safetensors", ck.MalformedFile)
def st_prepended() -> bytes:
    return b"\0" * 7 + safetensors({"w": entry()})


# --- npy and npz -------------------------------------------------------------------------------


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


# --- HDF5 --------------------------------------------------------------------------------------


def keras(path: Path) -> h5py.File:
    file = h5py.File(path, "w")
    layer = file.create_group("layers/dense/vars")
    layer.attrs["name"] = "out"
    layer["0"] = np.arange(6, dtype="f4").reshape(2, 3)
    return file


@case(".weights.h5")
def sound_keras(path: Path) -> None:
    keras(path).close()


@case(".weights.h5", ck.ForbiddenContent)
def h5_soft_link(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = h5py.SoftLink("/layers/dense/vars/0")


@case(".weights.h5", ck.ForbiddenContent)
def h5_soft_link_loop(path: Path) -> None:
    with keras(path) as file:
        file["layers/loop"] = h5py.SoftLink("/layers/loop")


@case(".weights.h5", ck.ForbiddenContent)
def h5_external_link(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = h5py.ExternalLink("/etc/passwd", "/")


@case(".weights.h5", ck.ForbiddenContent)
def h5_external_storage(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset(
            "1", (16,), "u1", external=[("/etc/hostname", 0, 16)]
        )


@case(".weights.h5", ck.ForbiddenContent)
def h5_virtual(path: Path) -> None:
    layout = h5py.VirtualLayout((6,), "f4")
    layout[:] = h5py.VirtualSource("/tmp/other.h5", "x", (6,))
    with keras(path) as file:
        file["layers/dense/vars"].create_virtual_dataset("1", layout)


def damaged_virtual(path: Path, at: int, byte: int) -> None:
    """One byte of the list of sources of a virtual dataset changed."""
    h5_virtual(path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"GCOL") + at] = byte
    path.write_bytes(raw)


@case(".weights.h5", ck.ForbiddenContent)
def h5_virtual_that_hangs(path: Path) -> None:
    """16 million sources: the library allocates and decodes them where it opens the dataset."""
    damaged_virtual(path, 59, 0xFF)


@case(".weights.h5", ck.ForbiddenContent)
def h5_virtual_that_crashes(path: Path) -> None:
    """2**62 sources: h5py alone ends with a segmentation fault."""
    damaged_virtual(path, 64, 0x40)


@case(".weights.h5", ck.BudgetExceeded)
def h5_shape_bomb(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset("1", (2**20, 2**20), "f4")


@case(".weights.h5", ck.MalformedFile)
def h5_never_written(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset("1", (2**10, 2**10), "f4")


@case(".weights.h5", ck.MalformedFile)
def h5_chunks_never_written(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset(
            "1", (2**13, 2**13), "f4", chunks=(16, 16), compression="gzip"
        )


@case(".weights.h5", ck.BudgetExceeded)
def h5_chunk_bomb(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset(
            "1", (1,), "f4", chunks=(2**29,), maxshape=(None,), compression="gzip"
        )


@case(".weights.h5", ck.ForbiddenContent)
def h5_unknown_filter(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset(
            "1", (6,), "i4", chunks=(6,), scaleoffset=4, data=np.arange(6, dtype="i4")
        )


@case(".weights.h5", ck.ForbiddenContent)
def h5_text(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = "text"


@case(".weights.h5", ck.ForbiddenContent)
def h5_vlen(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset("1", (2,), h5py.vlen_dtype(np.int32))


@case(".weights.h5", ck.ForbiddenContent)
def h5_reference(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].create_dataset("1", (2,), h5py.ref_dtype)


@case(".weights.h5", ck.ForbiddenContent)
def h5_compound(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = np.zeros(3, [("a", "f4"), ("b", "i4")])


@case(".weights.h5", ck.ForbiddenContent)
def h5_enumeration(path: Path) -> None:
    with keras(path) as file:
        kind = h5py.enum_dtype({"RED": 0, "BLUE": 1, "GREEN": 2}, "i4")
        file["layers/dense/vars"].create_dataset("1", (2,), kind, data=np.zeros(2, "i4"))


@case(".weights.h5", ck.ForbiddenContent)
def h5_named_type(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/kind"] = np.dtype("f4")


@case(".weights.h5", ck.MalformedFile)
def h5_null(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = h5py.Empty("f4")


@case(".weights.h5", ck.UnsupportedDtype)
def h5_bfloat16_without_attribute(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/1"] = np.zeros(3, "V2")


@case(".weights.h5", ck.AmbiguousFile)
def h5_cycle(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/again"] = file["layers"]


@case(".weights.h5", ck.BudgetExceeded)
def h5_deep(path: Path) -> None:
    with keras(path) as file:
        file.create_group("/".join("a" * 80))


@case(".weights.h5", ck.MalformedFile)
def h5_long_attribute(path: Path) -> None:
    with keras(path) as file:
        del file["layers/dense/vars"].attrs["name"]
        file["layers/dense/vars"].attrs["name"] = np.bytes_(b"x" * 60_000)


@case(".weights.h5", ck.MalformedFile)
def h5_attribute_not_text(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars"].attrs["name"] = np.arange(4)


def text_of_attribute(path: Path, length: int, heap: int = 0, index: int = 1) -> bytearray:
    """A sound file in which the `name` says that it lies elsewhere."""
    keras(path).close()
    raw = bytearray(path.read_bytes())
    at = raw.index(struct.pack("<LQL", 3, raw.index(b"GCOL"), 1))
    struct.pack_into("<LQL", raw, at, length, raw.index(b"GCOL") + heap, index)
    return raw


@case(".weights.h5", ck.MalformedFile)
def h5_attribute_of_4_gib(path: Path) -> None:
    path.write_bytes(text_of_attribute(path, 2**32 - 1))


@case(".weights.h5", ck.MalformedFile)
def h5_attribute_beyond_file(path: Path) -> None:
    path.write_bytes(text_of_attribute(path, 3, heap=2**40))


@case(".weights.h5", ck.MalformedFile)
def h5_attribute_not_in_a_heap(path: Path) -> None:
    path.write_bytes(text_of_attribute(path, 3, heap=-8))


@case(".weights.h5", ck.MalformedFile)
def h5_heap_without_end(path: Path) -> None:
    """Free space of length zero: the HDF5 library never returns."""
    raw = text_of_attribute(path, 3, index=7)
    heap = raw.index(b"GCOL")
    struct.pack_into("<HHLQ", raw, heap + 40, 0, 0, 0, 0)
    path.write_bytes(raw)


@case(".weights.h5", ck.MalformedFile)
def h5_free_list_loop(path: Path) -> None:
    """The free blocks of a heap of names form a ring: the HDF5 library never returns."""
    keras(path).close()
    raw = bytearray(path.read_bytes())
    heap = raw.rindex(b"HEAP")
    free, data = struct.unpack_from("<QQ", raw, heap + 16)
    struct.pack_into("<Q", raw, data + free, free)
    path.write_bytes(raw)


@case(".weights.h5", ck.MalformedFile)
def h5_tree_loop(path: Path) -> None:
    """A node of a tree that is its own child."""
    keras(path).close()
    raw = bytearray(path.read_bytes())
    tree = raw.rindex(b"TREE")
    raw[tree + 5] = 1
    struct.pack_into("<Q", raw, tree + 32, tree)
    path.write_bytes(raw)


@case(".weights.h5", ck.MalformedFile)
def h5_chunk_tree_loop(path: Path) -> None:
    with keras(path) as file:
        data = np.arange(64, dtype="f4")
        file["layers/dense/vars"].create_dataset("1", data=data, chunks=(4,))
    raw = bytearray(path.read_bytes())
    tree = raw.index(b"TREE\x01")
    raw[tree + 5] = 1
    struct.pack_into("<Q", raw, tree + 24 + 24, tree)
    path.write_bytes(raw)


@case(".weights.h5", ck.MalformedFile)
def h5_continuation_loop(path: Path) -> None:
    """An object header whose last message continues at the header itself."""
    raw = text_of_attribute(path, 3)
    at = raw.index(b"name\0\0\0\0") - 16  # the message of the attribute
    header = raw.rindex(b"\x01\x00", 0, at - 8)
    struct.pack_into("<HHLQQ", raw, at, 0x10, 16, 0, header + 16, at + 24 - header - 16)
    path.write_bytes(raw)


@case(".weights.h5", ck.IncompleteCheckpoint)
def h5_gap(path: Path) -> None:
    with keras(path) as file:
        file["layers/dense/vars/2"] = np.zeros(3, "f4")


@case(".weights.h5", ck.UnsupportedFormat)
def h5_legacy(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = "2.13.1"
        file["model_weights/dense/dense/kernel:0"] = np.zeros((2, 3), "f4")


@case(".weights.h5", ck.MalformedFile)
def h5_truncated(path: Path) -> None:
    keras(path).close()
    path.write_bytes(path.read_bytes()[:-100])


@case(".weights.h5", ck.MalformedFile)
def h5_magic_alone() -> bytes:
    return b"\x89HDF\r\n\x1a\n" + bytes(20)


# --- framing -----------------------------------------------------------------------------------


@case(".safetensors", ck.MalformedFile)
def empty_file() -> bytes:
    return b""


@case(".npz", ck.AmbiguousFile)
def suffix_contradicts_content() -> bytes:
    return torch_file()


@case(".pt", ck.AmbiguousFile)
def safetensors_named_torch() -> bytes:
    return safetensors({"w": entry()})


@case(".pt", ck.MalformedFile)
def bytes_appended() -> bytes:
    return torch_file() + b"\0" * 10


@case(".pt", ck.UnsupportedFormat)
def bytes_prepended() -> bytes:
    return b"\0" * 16 + torch_file()


@case(".safetensors", ck.MalformedFile)
def polyglot_safetensors_then_zip() -> bytes:
    return safetensors({"w": entry()}) + torch_file()


@case(".pt", ck.UnsupportedFormat)
def polyglot_pickle_then_zip() -> bytes:
    return b"\x80\x02}." + torch_file()


@case(".msgpack", ck.UnsupportedFormat)
def flax_msgpack() -> bytes:
    return b"\x81\xa1w\xc7\x05\x01abcde"


@case(".safetensors", ck.IncompleteCheckpoint)
def directory(path: Path) -> None:
    path.mkdir()


@case(".pt", ck.UnreadableFile)
def fifo(path: Path) -> None:
    os.mkfifo(path)


@case(".pt", ck.UnreadableFile)
def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@case(".pt", ck.UnreadableFile)
def missing(path: Path) -> None:
    pass


@case(".pt", ck.UnreadableFile)
def dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


@case(".pt", ck.UnreadableFile)
def link_loop(path: Path) -> None:
    path.symlink_to(path)


@case("", ck.UnsupportedFormat)
def saved_model(path: Path) -> None:
    path.mkdir()
    (path / "saved_model.pb").touch()


def files(path: Path) -> list[Path]:
    """Every file of a checkpoint: of a folder all inside, of an index its shards too."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    if path.name.endswith(".index.json"):
        shards = set(json.loads(path.read_text())["weight_map"].values())
        return [path, *(path.with_name(shard) for shard in sorted(shards))]
    return [path]
