"""Reads the opcodes of a pickle program, of the 31 that a torch file may have.

Format: https://docs.python.org/3/library/pickletools.html
"""

import pickletools
import struct
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jaxmha.checkpoint.errors import ForbiddenContent, MalformedFile
from jaxmha.checkpoint.formats.torch.records import SAVE

TEXT = 64  # bytes of memory of a string without its characters
_NO_ARGUMENT = b"().Rbst\x85\x86\x87uQ\x88\x89N]}ae"
_ARGUMENT: dict[int, struct.Struct] = {
    code[0]: struct.Struct(layout)
    for code, layout in {
        b"\x80": "<B",  # PROTO
        b"q": "<B",  # BINPUT
        b"r": "<L",  # LONG_BINPUT
        b"h": "<B",  # BINGET
        b"j": "<L",  # LONG_BINGET
        b"J": "<i",  # BININT
        b"K": "<B",  # BININT1
        b"M": "<H",  # BININT2
        b"G": ">d",  # BINFLOAT
    }.items()
}
_NAMES = {opcode.code: opcode.name for opcode in pickletools.opcodes}
_LONGEST_GLOBAL = 200


def opcodes(
    program: bytes, charge: Callable[[int], None], fail: Callable[..., NoReturn]
) -> Iterator[tuple[int, Any]]:
    """Yields each opcode before STOP with its argument, which must lie inside the program.

    `charge` takes the bytes of memory of a string before it is made; `fail` raises an error.
    """
    at, end = 0, len(program)
    while at < end:
        code = program[at]
        at += 1
        if code in _NO_ARGUMENT:
            if code == 0x2E:  # STOP
                if at != end:
                    fail(MalformedFile, "bytes follow the pickle")
                return
            yield code, None
        elif code in _ARGUMENT:
            layout = _ARGUMENT[code]
            if at + layout.size > end:
                break
            yield code, layout.unpack_from(program, at)[0]
            at += layout.size
        elif code == 0x58 and at + 4 <= end:  # BINUNICODE
            length = int.from_bytes(program[at : at + 4], "little")
            at += 4
            if at + length > end:
                break
            raw = program[at : at + length]
            charge(TEXT + (2 if raw.isascii() else 5) * length)
            try:
                yield code, raw.decode()
            except UnicodeDecodeError:
                fail(MalformedFile, "a string is not UTF-8")
            at += length
        elif code == 0x8A and at < end:  # LONG1
            length = program[at]
            at += 1 + length
            if at > end:
                break
            yield code, int.from_bytes(program[at - length : at], "little", signed=True)
        elif code == 0x63:  # GLOBAL
            stop = program.find(b"\n", program.find(b"\n", at, at + _LONGEST_GLOBAL) + 1, at + 400)
            lines = program[at:stop].split(b"\n") if stop > at else []
            if len(lines) != 2:
                break
            at = stop + 1
            yield code, b" ".join(lines).decode("ascii", "backslashreplace")
        else:
            what = _NAMES.get(chr(code), f"0x{code:02x}")
            fail(ForbiddenContent, f"the pickle opcode {what} is not allowed here", SAVE)
    fail(MalformedFile, "the pickle is cut short")
