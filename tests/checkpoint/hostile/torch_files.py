"""Parts of zip files, and of those of torch."""

import struct
import zlib
from typing import Any

import numpy as np

from tests.checkpoint.hostile.cases import case


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
            "flags": 0x800, "method": method, "crc": crc, "compressed": len(stored), "size": size,
            "attributes": 0, "offset": offset,
        } | ((central or {}) if last else {})  # fmt: skip
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
    hooks: bytes = ORDERED,
) -> bytes:
    body = (storage() if of is None else of) + number(offset) + numbers(*shape)
    return V2 + b"(" + body + numbers(*strides) + b"\x89" + hooks + after + b"tR"


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


def one_tensor(of: bytes | None = None, **changes: Any) -> bytes:
    """A file of one tensor `w`; the arguments are those of `tensor`."""
    return torch_file(state(text("w"), tensor(of, **changes)))


@case(".pt")
def sound_torch() -> bytes:
    return torch_file()
