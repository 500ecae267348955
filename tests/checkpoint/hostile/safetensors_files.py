"""Hostile safetensors files."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
from tests.checkpoint.hostile.torch_files import FLOATS


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
