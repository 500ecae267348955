"""Hostile GGUF files."""

import struct
from typing import Any

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
from tests.checkpoint.hostile.torch_files import FLOATS

_STRING, _ARRAY, _U32 = 8, 9, 4


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: str | bytes = "w", shape: tuple[int, ...] = (3, 2), kind: int = 0, offset: int = 0
) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


QWEN = setting("general.architecture", _STRING, text("qwen2"))
LLAMA = setting("general.architecture", _STRING, text("llama"))


def gguf(
    *tensors: bytes,
    settings: tuple[bytes, ...] = (QWEN,),
    data: bytes = FLOATS,
    version: int = 3,
    counts: Any = None,
) -> bytes:
    many = counts or (len(tensors), len(settings))
    head = b"GGUF" + struct.pack("<IQQ", version, *many) + b"".join(settings) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


@case(".gguf")
def sound_gguf() -> bytes:
    return gguf(tensor())


@case(".gguf", ck.MalformedFile)
def gguf_only_its_magic() -> bytes:
    return b"GGUF"


@case(".gguf", ck.UnsupportedFormat)
def gguf_version_1() -> bytes:
    return gguf(tensor(), version=1)


@case(".gguf", ck.UnsupportedFormat)
def gguf_big_endian() -> bytes:
    return gguf(tensor(), version=3 << 24)


@case(".gguf", ck.BudgetExceeded)
def gguf_2_64_tensors() -> bytes:
    return gguf(tensor(), counts=(2**64 - 1, 1))


@case(".gguf", ck.MalformedFile)
def gguf_more_tensors_than_bytes() -> bytes:
    return gguf(tensor(), counts=(10**6, 1))


@case(".gguf", ck.BudgetExceeded)
def gguf_2_63_settings() -> bytes:
    return gguf(tensor(), counts=(1, 2**63))


@case(".gguf", ck.BudgetExceeded)
def gguf_name_of_2_63_bytes() -> bytes:
    return gguf(struct.pack("<Q", 2**63) + b"w")


@case(".gguf", ck.MalformedFile)
def gguf_text_of_2_63_bytes() -> bytes:
    return gguf(tensor(), settings=(QWEN, setting("a", _STRING, struct.pack("<Q", 2**63))))


@case(".gguf", ck.BudgetExceeded)
def gguf_list_of_2_63_texts() -> bytes:
    value = struct.pack("<IQ", _STRING, 2**63)
    return gguf(tensor(), settings=(QWEN, setting("a", _ARRAY, value)))


@case(".gguf", ck.MalformedFile)
def gguf_list_of_2_63_numbers() -> bytes:
    value = struct.pack("<IQ", _U32, 2**63)
    return gguf(tensor(), settings=(QWEN, setting("a", _ARRAY, value)))


@case(".gguf", ck.BudgetExceeded)
def gguf_lists_in_lists() -> bytes:
    value = struct.pack("<IQ", _ARRAY, 1) * 100 + struct.pack("<IQ", _U32, 0)
    return gguf(tensor(), settings=(QWEN, setting("a", _ARRAY, value)))


@case(".gguf", ck.BudgetExceeded)
def gguf_many_empty_texts() -> bytes:
    value = struct.pack("<IQ", _STRING, 1_500_000) + bytes(8 * 1_500_000)
    rows = tuple(setting(f"a{n}", _ARRAY, value) for n in range(2))
    return gguf(tensor(), settings=(QWEN, *rows))


@case(".gguf", ck.MalformedFile)
def gguf_value_of_no_type() -> bytes:
    return gguf(tensor(), settings=(QWEN, setting("a", 99, b"")))


@case(".gguf", ck.AmbiguousFile)
def gguf_setting_twice() -> bytes:
    return gguf(tensor(), settings=(QWEN, LLAMA))


@case(".gguf", ck.MalformedFile)
def gguf_without_architecture() -> bytes:
    return gguf(tensor(), settings=())


@case(".gguf", ck.MalformedFile)
def gguf_architecture_is_a_number() -> bytes:
    return gguf(tensor(), settings=(setting("general.architecture", _U32, struct.pack("<I", 1)),))


@case(".gguf", ck.MalformedFile)
def gguf_name_not_utf8() -> bytes:
    return gguf(tensor(b"\xff\xfe"))


@case(".gguf", ck.PathEscape)
def gguf_name_is_a_path() -> bytes:
    return gguf(tensor("../../w"))


@case(".gguf", ck.AmbiguousFile)
def gguf_tensor_twice() -> bytes:
    return gguf(tensor(), tensor(offset=32), data=FLOATS + bytes(8) + FLOATS)


@case(".gguf", ck.MalformedFile)
def gguf_rank_9() -> bytes:
    return gguf(tensor(shape=(1,) * 9))


@case(".gguf", ck.MalformedFile)
def gguf_rank_2_32() -> bytes:
    return gguf(text("w") + struct.pack("<I", 2**32 - 1))


@case(".gguf", ck.MalformedFile)
def gguf_shape_overflows() -> bytes:
    return gguf(tensor(shape=(2**62, 2**62, 2**62, 2**62)))


@case(".gguf", ck.UnsupportedDtype)
def gguf_unknown_type() -> bytes:
    return gguf(tensor(kind=10**9))


@case(".gguf", ck.MalformedFile)
def gguf_not_made_of_blocks() -> bytes:
    return gguf(tensor(kind=8))


@case(".gguf", ck.MalformedFile)
def gguf_overlap() -> bytes:
    return gguf(tensor(), tensor("v"))


@case(".gguf", ck.MalformedFile)
def gguf_hole() -> bytes:
    return gguf(tensor(offset=64), data=bytes(64) + FLOATS)


@case(".gguf", ck.MalformedFile)
def gguf_offset_2_63() -> bytes:
    return gguf(tensor(offset=2**63))


@case(".gguf", ck.MalformedFile)
def gguf_short() -> bytes:
    return gguf(tensor(), data=FLOATS[:-1])


@case(".gguf", ck.MalformedFile)
def gguf_bytes_appended() -> bytes:
    return gguf(tensor(), data=FLOATS + bytes(100))


@case(".gguf", ck.MalformedFile)
def gguf_alignment_zero() -> bytes:
    return gguf(tensor(), settings=(QWEN, setting("general.alignment", _U32, struct.pack("<I", 0))))


@case(".gguf", ck.MalformedFile)
def gguf_alignment_is_a_text() -> bytes:
    return gguf(tensor(), settings=(QWEN, setting("general.alignment", _STRING, text("32"))))


@case(".gguf", ck.MalformedFile)
def gguf_queries_without_a_head_count() -> bytes:
    return gguf(tensor("blk.0.attn_q.weight"), settings=(LLAMA,))


@case(".gguf", ck.MalformedFile)
def gguf_heads_do_not_divide_the_rows() -> bytes:
    heads = setting("llama.attention.head_count", _U32, struct.pack("<I", 5))
    return gguf(tensor("blk.0.attn_q.weight"), settings=(LLAMA, heads))


@case(".safetensors", ck.AmbiguousFile)
def gguf_named_safetensors() -> bytes:
    return gguf(tensor())
