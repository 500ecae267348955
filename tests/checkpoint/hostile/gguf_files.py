"""Hostile GGUF files."""

import struct
from typing import Any

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Big, No, Out, Two, case, raw_case, raw_cases
from tests.checkpoint.hostile.torch_files import FLOATS

_STRING, _ARRAY, _U32 = 8, 9, 4


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return setting(key, _U32, struct.pack("<I", value))


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


def with_setting(key: str, kind: int, value: bytes) -> bytes:
    return gguf(tensor(), settings=(QWEN, setting(key, kind, value)))


@case(".gguf")
def sound_gguf() -> bytes:
    return gguf(tensor())


raw_cases(
    "gguf_", ".gguf",
    ("only_its_magic", Bad, b"GGUF"),
    ("version_1", No, gguf(tensor(), version=1)),
    ("big_endian", No, gguf(tensor(), version=3 << 24)),
    ("2_64_tensors", Big, gguf(tensor(), counts=(2**64 - 1, 1))),
    ("more_tensors_than_bytes", Bad, gguf(tensor(), counts=(10**6, 1))),
    ("2_63_settings", Big, gguf(tensor(), counts=(1, 2**63))),
    ("name_of_2_63_bytes", Big, gguf(struct.pack("<Q", 2**63) + b"w")),
    ("text_of_2_63_bytes", Bad, with_setting("a", _STRING, struct.pack("<Q", 2**63))),
    ("list_of_2_63_texts", Big, with_setting("a", _ARRAY, struct.pack("<IQ", _STRING, 2**63))),
    ("list_of_2_63_numbers", Bad, with_setting("a", _ARRAY, struct.pack("<IQ", _U32, 2**63))),
    ("lists_in_lists", Big, with_setting(
        "a", _ARRAY, struct.pack("<IQ", _ARRAY, 1) * 100 + struct.pack("<IQ", _U32, 0))),
    ("value_of_no_type", Bad, with_setting("a", 99, b"")),
    ("setting_twice", Two, gguf(tensor(), settings=(QWEN, LLAMA))),
    ("without_architecture", Bad, gguf(tensor(), settings=())),
    ("architecture_is_a_number", Bad,
     gguf(tensor(), settings=(number("general.architecture", 1),))),
    ("name_not_utf8", Bad, gguf(tensor(b"\xff\xfe"))),
    ("name_is_a_path", Out, gguf(tensor("../../w"))),
    ("tensor_twice", Two, gguf(tensor(), tensor(offset=32), data=FLOATS + bytes(8) + FLOATS)),
    ("rank_9", Bad, gguf(tensor(shape=(1,) * 9))),
    ("rank_2_32", Bad, gguf(text("w") + struct.pack("<I", 2**32 - 1))),
    ("shape_overflows", Bad, gguf(tensor(shape=(2**62, 2**62, 2**62, 2**62)))),
    ("unknown_type", ck.UnsupportedDtype, gguf(tensor(kind=10**9))),
    ("not_made_of_blocks", Bad, gguf(tensor(kind=8))),
    ("overlap", Bad, gguf(tensor(), tensor("v"))),
    ("hole", Bad, gguf(tensor(offset=64), data=bytes(64) + FLOATS)),
    ("offset_2_63", Bad, gguf(tensor(offset=2**63))),
    ("short", Bad, gguf(tensor(), data=FLOATS[:-1])),
    ("bytes_appended", Bad, gguf(tensor(), data=FLOATS + bytes(100))),
    ("alignment_zero", Bad, gguf(tensor(), settings=(QWEN, number("general.alignment", 0)))),
    ("alignment_is_a_text", Bad, with_setting("general.alignment", _STRING, text("32"))),
    ("queries_without_a_head_count", Bad, gguf(tensor("blk.0.attn_q.weight"), settings=(LLAMA,))),
    ("heads_do_not_divide_the_rows", Bad, gguf(
        tensor("blk.0.attn_q.weight"), settings=(LLAMA, number("llama.attention.head_count", 5)))),
)  # fmt: skip


@case(".gguf", Big)
def gguf_many_empty_texts() -> bytes:
    value = struct.pack("<IQ", _STRING, 1_500_000) + bytes(8 * 1_500_000)
    rows = tuple(setting(f"a{n}", _ARRAY, value) for n in range(2))
    return gguf(tensor(), settings=(QWEN, *rows))


raw_case("gguf_named_safetensors", ".safetensors", Two, gguf(tensor()))
