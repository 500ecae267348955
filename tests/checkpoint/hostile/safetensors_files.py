"""Hostile safetensors files."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Big, Out, Two, case, raw_cases
from tests.checkpoint.hostile.torch_files import FLOATS


def entry(
    dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24), **extra: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}


def safetensors(header: Any, data: bytes = FLOATS, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


ENTRY = json.dumps(entry()).encode()


@case(".safetensors")
def sound_safetensors() -> bytes:
    return safetensors({"w": entry(), "__metadata__": {"format": "pt"}})


raw_cases(
    "st_", ".safetensors",
    ("header_longer_than_file", Bad, safetensors({"w": entry()}, length=10_000)),
    ("header_2_63", Bad, safetensors({"w": entry()}, length=2**63)),
    ("leading_space", Bad, safetensors(b' {"w":%s}' % ENTRY)),
    ("byte_order_mark", Bad, safetensors(b'\xef\xbb\xbf{"w":%s}' % ENTRY)),
    ("duplicate_key", Two, safetensors(b'{"w":%s,"w":%s}' % (ENTRY, ENTRY))),
    ("duplicate_field", Two,
     safetensors(b'{"w":{"dtype":"F32","dtype":"I32","shape":[2,3],"data_offsets":[0,24]}}')),
    ("overlap", Bad, safetensors({"w": entry(), "v": entry(offsets=(12, 36))}, bytes(36))),
    ("hole", Bad, safetensors({"w": entry(), "v": entry(offsets=(28, 52))}, bytes(52))),
    ("short", Bad, safetensors({"w": entry()}, FLOATS[:-1])),
    ("trailing", Bad, safetensors({"w": entry()}, FLOATS + b"\0")),
    ("shape_disagrees", Bad, safetensors({"w": entry(shape=(2, 4))})),
    ("shape_overflow", Big, safetensors({"w": entry(shape=(2**32, 2**32, 2**3))})),
    ("negative_size", Bad, safetensors({"w": entry(shape=(-2, -3))})),
    ("float_size", Bad, safetensors({"w": entry(shape=(2.0, 3.0))})),
    ("boolean_size", Bad, safetensors({"w": entry(shape=(True, 6))})),
    ("nan_offset", Bad, safetensors(b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,NaN]}}')),
    ("huge_integer", Bad,
     safetensors(b'{"w":{"dtype":"F32","shape":[' + b"9" * 6000 + b'],"data_offsets":[0,24]}}')),
    ("reversed_range", Bad, safetensors({"w": entry(offsets=(24, 0))})),
    ("zero_size_huge_dimension", Big,
     safetensors({"w": entry(shape=(0, 2**62), offsets=(0, 0))}, b"")),
    ("rank_bomb", Big, safetensors({"w": entry(shape=[1] * 70 + [6])})),
    ("unknown_dtype", ck.UnsupportedDtype, safetensors({"w": entry("F31")})),
    ("dtype_not_text", ck.UnsupportedDtype, safetensors({"w": entry(["F32"])})),
    ("four_bit", ck.UnsupportedDtype,
     safetensors({"w": entry("F4", shape=(3,), offsets=(0, 2))}, b"ab")),
    ("extra_field", Bad, safetensors({"w": entry(strides=[3, 1])})),
    ("missing_field", Bad, safetensors({"w": {"dtype": "F32", "shape": [2, 3]}})),
    ("metadata_number", Bad, safetensors({"w": entry(), "__metadata__": {"step": 3}})),
    ("metadata_list", Bad, safetensors({"w": entry(), "__metadata__": []})),
    ("deep_json", Bad, lambda: safetensors(b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}")),
    ("invalid_utf8", Bad, safetensors(b'{"\xff":%s}' % ENTRY)),
    ("lone_surrogate", Bad, safetensors(b'{"\\ud800":%s}' % ENTRY)),
    ("parent_name", Out, safetensors({"../../etc/x": entry()})),
    ("absolute_name", Out, safetensors({"/etc/x": entry()})),
    ("nul_name", Bad, safetensors({"a\0b": entry()})),
    ("empty_name", Bad, safetensors({"": entry()})),
    ("after_header", Bad, safetensors(b'{"w":%s}\n\n' % ENTRY)),
    ("prepended", Bad, b"\0" * 7 + safetensors({"w": entry()})),
)  # fmt: skip


@case(".safetensors", Big)
def st_header_too_long(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 100_000_001) + b"{")
    os.truncate(path, 100_000_100)  # sparse: no disk
