"""Hostile headers of safetensors, and indexes of shards."""

import json
import struct
from pathlib import Path

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Big, Gone, No, Out, Two, case, raw_cases
from tests.checkpoint.hostile.indexes import (
    INDEX,
    changed,
    index,
    listing,
    mapping,
    replaced,
    shard_of,
    spoilt,
)
from tests.checkpoint.hostile.safetensors_files import entry, safetensors
from tests.checkpoint.hostile.torch_files import FLOATS

# --- safetensors ----------------------------------------------------------------------------------

ONE = json.dumps(entry()).encode()
raw_cases(
    "st_", ".safetensors",
    ("header_of_no_byte", Bad, safetensors(b"")),
    ("header_is_a_list", Bad, safetensors(b"[" + ONE + b"]")),
    ("header_is_text", Bad, safetensors(b'{"w"')),
    ("header_of_two_objects", Bad, safetensors(b"{}{}")),
    ("header_is_utf16", Bad, safetensors(json.dumps({"w": entry()}).encode("utf-16"))),
    ("header_with_a_comment", Bad, safetensors(b'{"w":' + ONE + b"/* */}")),
    ("header_with_a_comma_behind", Bad, safetensors(b'{"w":' + ONE + b",}")),
    ("header_in_single_quotes", Bad, safetensors(b"{'w':" + ONE + b"}")),
    ("header_ends_in_nul", Bad, safetensors(b'{"w":' + ONE + b"}\0\0")),
    ("header_ends_in_tabs", Bad, safetensors(b'{"w":' + ONE + b"}\t\t")),
    ("header_is_one_byte_short", Bad, safetensors(b'{"w":' + ONE + b"}", length=len(ONE) + 5)),
    ("header_is_cut_within_a_letter", Bad, safetensors(b'{"\xc3', length=3)),
    ("length_alone", Bad, struct.pack("<Q", 2)),
    ("half_a_length", ck.MalformedFile, b"\2\0\0\0"),
    ("length_in_big_endian", Bad, struct.pack(">Q", 2) + b"{}"),
    ("entry_is_null", Bad, safetensors({"w": None})),
    ("entry_is_a_list", Bad, safetensors({"w": ["F32", [2, 3], [0, 24]]})),
    ("entry_of_entries", Bad, safetensors({"w": {"w": entry()}})),
    ("shape_is_null", Bad, safetensors({"w": entry(shape=None)})),
    ("shape_is_a_number", Bad, safetensors({"w": entry(shape=6)})),
    ("shape_is_an_object", Bad, safetensors({"w": entry(shape={"0": 2})})),
    ("shape_of_text", Bad, safetensors({"w": entry(shape=["2", "3"])})),
    ("shape_of_exponents", Bad, safetensors(b'{"w":{"dtype":"F32","shape":[2e0,3],"data_offsets":[0,24]}}')),
    ("shape_of_minus_zero", Bad, safetensors(b'{"w":{"dtype":"F32","shape":[-0,3],"data_offsets":[0,24]}}')),
    ("shape_wraps", Big, safetensors({"w": entry(shape=[2**62 + 6])})),
    ("shape_of_a_million_axes", Big, safetensors({"w": entry(shape=[1] * 1_000_000)})),
    ("shape_of_bytes_of_another_dtype", Bad, safetensors({"w": entry("F64")})),
    ("offsets_of_one", Bad, safetensors({"w": entry(offsets=[24])})),
    ("offsets_of_three", Bad, safetensors({"w": entry(offsets=[0, 24, 24])})),
    ("offsets_are_negative", Bad, safetensors({"w": entry(offsets=[-24, 0])})),
    ("offsets_beyond_64_bits", Bad, safetensors({"w": entry(offsets=[2**64, 2**64 + 24])})),
    ("offsets_into_the_header", Bad, safetensors({"w": entry(offsets=[-8, 16])})),
    ("offsets_of_truth", Bad, safetensors({"w": entry("U8", [1], [False, True])}, b"a")),
    ("offsets_share_one_buffer", Bad, safetensors({"w": entry(), "v": entry()})),
    ("offsets_leave_the_first_byte", Bad, safetensors({"w": entry(offsets=[1, 25])}, b"\0" + FLOATS)),
    ("empty_tensors_outside", Bad, safetensors({"w": entry(), "v": entry(shape=[0], offsets=[99, 99])})),
    ("empty_tensor_within_another", Bad, safetensors({"w": entry(), "v": entry(shape=[0], offsets=[12, 12])})),
    ("dtype_in_small_letters", ck.UnsupportedDtype, safetensors({"w": entry("f32")})),
    ("dtype_with_a_space", ck.UnsupportedDtype, safetensors({"w": entry("F32 ")})),
    ("dtype_is_null", ck.UnsupportedDtype, safetensors({"w": entry(None)})),
    ("dtype_of_a_megabyte", ck.UnsupportedDtype, safetensors({"w": entry("F" * 1_000_000)})),
    ("dtype_of_six_bits", ck.UnsupportedDtype, safetensors({"w": entry("F6_E2M3", [4], [0, 3])}, b"abc")),
    ("booleans_of_two", Bad, safetensors({"w": entry("BOOL", [2], [0, 2])}, b"\1\2")),
    ("metadata_is_null", Bad, safetensors({"w": entry(), "__metadata__": None})),
    ("metadata_of_objects", Bad, safetensors({"w": entry(), "__metadata__": {"a": {}}})),
    ("metadata_twice", Two, safetensors(b'{"__metadata__":{},"w":' + ONE + b',"__metadata__":{}}')),
    ("digests_are_no_json", ck.IntegrityError, safetensors({"w": entry(), "__metadata__": {"jaxmha.digests": "x"}})),
    ("digests_are_a_bomb", ck.IntegrityError, safetensors({"w": entry(), "__metadata__": {"jaxmha.digests": "{" + "[]," * 100_000 + "}"}})),
    ("digests_of_others", ck.IntegrityError, safetensors({"w": entry(), "__metadata__": {"jaxmha.digests": '{"all":"sha256:0","tensors":{"v":"sha256:0"}}'}})),
    ("name_of_2_kilobytes", Big, safetensors({"w" * 2048: entry()})),
    ("name_with_an_escape_sequence", Bad, safetensors({"\x1b[2J": entry()})),
    ("name_with_delete", Bad, safetensors({"a\x7f": entry()})),
    ("name_is_a_dot", Out, safetensors({"./w": entry()})),
    ("name_of_windows", Out, safetensors({"..\\w": entry()})),
    ("name_begins_with_a_backslash", Out, safetensors({"\\w": entry()})),
    ("tensors_of_no_byte_by_the_hundred_thousand", Big, lambda: safetensors(
        {f"{i:06}": entry("U8", [0], [0, 0]) for i in range(120_000)}, b"")),
)  # fmt: skip


# --- indexes ------------------------------------------------------------------------------------------


raw_cases(
    "index_", INDEX,
    ("shard_is_a_url", Out, listing(w="https://example.com/m.safetensors")),
    ("shard_is_a_file_url", Out, listing(w="file:///etc/m.safetensors")),
    ("shard_of_a_share", Out, listing(w="\\\\host\\m.safetensors")),
    ("shard_of_a_stream", Out, listing(w="m.safetensors:stream")),
    ("shard_of_a_home", Out, listing(w="~/m.safetensors")),
    ("shard_of_a_glob", Out, listing(w="*.safetensors")),
    ("shard_of_a_variable", Gone, listing(w="$HOME.safetensors")),
    ("shard_of_proc", Out, listing(w="/proc/self/mem.safetensors")),
    ("shard_of_dots", Out, listing(w="..safetensors")),
    ("shard_of_a_parent_alone", Out, listing(w="..")),
    ("shard_with_a_newline", Out, listing(w="m\n.safetensors")),
    ("shard_of_a_device_with_suffix", Out, listing(w="NUL.safetensors")),
    ("shard_of_surrogates", Out, listing(w="\ud800.safetensors")),
    ("shard_in_capitals", Bad,
     mapping(lambda shard: {"w": shard.replace(".safetensors", ".SAFETENSORS")})),
    ("shard_of_torch", Bad, listing(w="m.bin")),
    ("shard_is_null", Bad, listing(w=None)),
    ("shard_is_a_number", Bad, listing(w=1)),
    ("map_is_a_list", Bad, changed(lambda d, shard: d.update(weight_map=[["w", shard]]))),
    ("map_is_null", Bad, changed(lambda d, _: d.update(weight_map=None))),
    ("metadata_is_a_list", Bad, changed(lambda d, _: d.update(metadata=[]))),
    ("total_is_true", Bad, changed(lambda d, _: d["metadata"].update(total_size=True))),
    ("total_is_a_fraction", Bad, changed(lambda d, _: d["metadata"].update(total_size=24.5))),
    ("total_of_2_80", Bad, changed(lambda d, _: d["metadata"].update(total_size=2**80))),
    ("name_is_empty", Bad, mapping(lambda shard: {"": shard})),
    ("name_with_an_escape_sequence", Bad, mapping(lambda shard: {"\x1b[2J": shard})),
    ("name_of_2_kilobytes", Big, mapping(lambda shard: {"w" * 2048: shard})),
    ("is_a_list", No, b"[]"),
    ("has_a_byte_order_mark", No, b"\xef\xbb\xbf{}"),
    ("has_a_nan", Bad, b'{"metadata":{"total_size":NaN},"weight_map":{}}'),
    ("of_5000_digits", Bad, b'{"metadata":{"total_size":' + b"9" * 5000 + b'},"weight_map":{}}'),
    ("of_1e400", Bad, b'{"metadata":{"total_size":1e400},"weight_map":{"w":"m.safetensors"}}'),
    ("is_not_utf8", Bad, b'{"weight_map":{"\xff":"m.safetensors"}}'),
    ("is_cut_short", Bad, b'{"weight_map":{"w":"m.safe'),
)  # fmt: skip


@case(INDEX, ck.PathEscape)
def index_shards_link_in_a_ring(path: Path) -> None:
    shard = index(path)
    other = shard.with_name("other.safetensors")
    shard.unlink()
    shard.symlink_to(other.name)
    other.symlink_to(shard.name)


@case(INDEX, ck.MalformedFile)
def index_shard_is_an_index(path: Path) -> None:
    """A shard that says that it is in several files itself."""
    shard = index(path)
    shard.write_bytes(path.read_bytes())


raw_cases(
    "index_", INDEX,
    ("shard_links_to_a_device", Out, replaced(lambda shard: shard.symlink_to("/dev/zero"))),
    ("shard_is_empty", Bad, spoilt(lambda shard: shard.write_bytes(b""))),
    # The header of a shard declares more than there is.
    ("shards_of_huge_tensors", Big,
     spoilt(lambda shard: shard.write_bytes(safetensors({"w": entry(shape=[2**40, 2**20])})))),
)  # fmt: skip


@case(".bin.index.json", ck.MalformedFile)
def index_of_torch_with_a_shard_of_safetensors(path: Path) -> None:
    shard = path.with_name(shard_of(path, ".safetensors"))
    shard.write_bytes(safetensors({"w": entry()}))
    path.write_text(json.dumps({"weight_map": {"w": shard.name}}))
