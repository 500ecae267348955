"""Hostile documents of orbax folders, and folders of links, pipes and too many files."""

import json
import os
from pathlib import Path
from typing import Any

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
from tests.checkpoint.hostile.headers import Big, Out
from tests.checkpoint.hostile.indexes import W
from tests.checkpoint.hostile.orbax_folders import orbax
from tests.checkpoint.hostile.zarr import zarr3
from tests.checkpoint.hostile.zip_fields import Bad, Code, Two

# --- documents of orbax ------------------------------------------------------------------------------------


def documented(name: str, error: type[ck.CheckpointError], file: str, data: bytes) -> None:
    """A sound folder with one file of other content."""

    def build(path: Path) -> None:
        orbax(path)
        (path / file).write_bytes(data)

    build.__name__ = f"orbax_{name}"
    case(".orbax", error)(build)


def tree_of(keys: Any, value: Any = None, **more: Any) -> bytes:
    leaf = {"key_metadata": keys, "value_metadata": value or {"value_type": "np.ndarray"}}
    return json.dumps({"tree_metadata": {"w": leaf}, **more}).encode()


KEY = [{"key": "w", "key_type": 2}]
_error: type[ck.CheckpointError]
_array: dict[str, Any]
for _name, _error, _file, _data in (
    ("tree_key_is_a_number", Bad, "_METADATA", tree_of([{"key": 1, "key_type": 1}])),
    ("tree_key_is_empty", Bad, "_METADATA", tree_of([{"key": "", "key_type": 2}])),
    ("tree_key_is_absolute", Out, "_METADATA", tree_of([{"key": "/etc", "key_type": 2}])),
    ("tree_key_of_dots", Out, "_METADATA", tree_of([{"key": ".", "key_type": 2}])),
    ("tree_key_with_nul", Bad, "_METADATA", tree_of([{"key": "w\0", "key_type": 2}])),
    ("tree_key_of_surrogates", Bad, "_METADATA", tree_of([{"key": "\ud800", "key_type": 2}])),
    ("tree_of_no_keys", Bad, "_METADATA", tree_of([])),
    ("tree_keys_are_an_object", Bad, "_METADATA", tree_of({"key": "w"})),
    ("tree_keys_of_a_thousand_levels", Big, "_METADATA", tree_of(KEY * 1000)),
    ("tree_value_is_a_list", Bad, "_METADATA", tree_of(KEY, ["np.ndarray"])),
    ("tree_value_of_a_kind_of_object", ck.UnsupportedFormat, "_METADATA", tree_of(KEY, {"value_type": {"a": 1}})),
    ("tree_value_of_a_program", ck.UnsupportedFormat, "_METADATA", tree_of(KEY, {"value_type": "os.system"})),
    ("tree_zarr3_is_text", Bad, "_METADATA", tree_of(KEY, use_zarr3="no")),
    ("tree_is_a_number", Bad, "_METADATA", b"1"),
    ("tree_is_not_utf8", Bad, "_METADATA", b'{"tree_metadata":{"\xff":1}}'),
    ("tree_has_a_nan", Bad, "_METADATA", b'{"tree_metadata":NaN}'),
    ("tree_is_deep", Bad, "_METADATA", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    ("array_is_a_list", Bad, "w/.zarray", b"[]"),
    ("array_is_empty", Bad, "w/.zarray", b""),
    ("array_key_twice", Two, "w/.zarray", b'{"shape":[2,3],"shape":[2,3]}'),
    ("array_of_nothing", ck.UnsupportedDtype, "w/.zarray", b"{}"),
    ("array_of_two_megabytes", Big, "w/.zarray", b"{" + b" " * (2 << 20) + b"}"),
    ("digests_are_a_list", Bad, "jaxmha.digests.json", b"[]"),
    ("digests_of_text", ck.IntegrityError, "jaxmha.digests.json", b'{"all":"sha256:0","tensors":"w"}'),
    ("digests_of_no_digest", ck.IntegrityError, "jaxmha.digests.json", b'{"all":"sha256:0","tensors":{}}'),
    ("digests_are_deep", Bad, "jaxmha.digests.json", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    ("manifest_is_empty", Bad, "manifest.ocdbt", b""),
    ("manifest_is_text", Bad, "manifest.ocdbt", b"manifest" * 20),
    ("chunk_is_long", Bad, "w/0.0", W.tobytes() + b"\0"),
):  # fmt: skip
    documented(_name, _error, _file, _data)


for _name, _array, _error in (
    ("dtype_of_an_offset", {"dtype": "<f4 "}, ck.UnsupportedDtype),
    ("dtype_is_a_list_of_text", {"dtype": ["<f4"]}, ck.UnsupportedDtype),
    ("dtype_of_dates", {"dtype": "<M8[ns]"}, ck.UnsupportedDtype),
    ("separator_is_a_list", {"dimension_separator": ["."]}, Bad),
    ("separator_is_a_path", {"dimension_separator": "/../"}, Bad),
    ("codec_is_a_list", {"compressor": ["zstd"]}, Code),
    ("codec_of_blosc", {"compressor": {"id": "blosc", "cname": "lz4"}}, Code),
    ("filters_are_text", {"filters": "delta"}, Code),
    ("shape_of_40_axes", {"shape": [1] * 40, "chunks": [1] * 40}, Big),
    ("shape_of_2_60", {"shape": [2**60], "chunks": [1]}, Big),
    ("chunks_of_floats", {"chunks": [2.0, 3.0]}, Bad),
    ("order_of_neither", {"order": "K"}, Bad),
    ("format_of_1", {"zarr_format": 1}, Bad),
):

    def _orbax_array(path: Path, array: dict[str, Any] = _array) -> None:
        orbax(path, array=array)

    _orbax_array.__name__ = f"zarr_{_name}"
    case(".orbax", _error)(_orbax_array)

for _name, _array, _error in (
    ("codecs_are_an_object", {"codecs": {"name": "bytes"}}, Code),
    ("codecs_by_the_hundred", {"codecs": [{"name": "crc32c"}] * 100}, Code),
    ("codec_of_numcodecs", {"codecs": [{"name": "numcodecs.pickle"}]}, Code),
    ("grid_is_irregular", {"chunk_grid": {"name": "rectangular", "configuration": {"chunk_shape": [2, 3]}}}, Code),
    ("transformers", {"storage_transformers": [{"name": "x"}]}, Code),
    ("key_encoding_of_another", {"chunk_key_encoding": {"name": "../"}}, Bad),
    ("is_a_group", {"node_type": "group"}, Code),
    ("data_type_of_an_object", {"data_type": {"name": "float32"}}, ck.UnsupportedDtype),
):  # fmt: skip

    def _zarr3_array(path: Path, array: dict[str, Any] = _array) -> None:
        zarr3(path, array, {"c/0/0": W.tobytes()})

    _zarr3_array.__name__ = f"zarr3_{_name}"
    case(".orbax", _error)(_zarr3_array)


# --- folders ---------------------------------------------------------------------------------------------------


@case(".orbax", ck.ForbiddenContent)
def folder_links_to_itself(path: Path) -> None:
    orbax(path)
    (path / "again").symlink_to(path)


@case(".orbax", ck.ForbiddenContent)
def folder_links_to_the_root(path: Path) -> None:
    orbax(path)
    (path / "w" / "root").symlink_to("/")


@case(".orbax", ck.ForbiddenContent)
def folder_with_a_socket(path: Path) -> None:
    import socket

    orbax(path)
    here = os.getcwd()
    os.chdir(path)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind("s")
    finally:
        os.chdir(here)


@case(".orbax", ck.BudgetExceeded)
def folder_of_100_000_files(path: Path) -> None:
    """All one file, to be quick."""
    orbax(path)
    first = path / "0"
    first.touch()
    for part in range(4):
        (path / f"part{part}").mkdir()
        (path / f"part{part}" / "0").touch()
        for i in range(1, 25_001):
            os.link(path / f"part{part}" / "0", path / f"part{part}" / f"{i}")


@case(".orbax", ck.IncompleteCheckpoint)
def folder_whose_tree_is_a_folder(path: Path) -> None:
    orbax(path)
    (path / "_METADATA").unlink()
    (path / "_METADATA").mkdir()


@case(".orbax", ck.ForbiddenContent)
def folder_whose_tree_is_a_link(path: Path) -> None:
    orbax(path)
    (path / "_METADATA").unlink()
    (path / "_METADATA").symlink_to("/etc/passwd")


@case(".orbax", ck.ForbiddenContent)
def folder_whose_tree_is_a_fifo(path: Path) -> None:
    orbax(path)
    (path / "_METADATA").unlink()
    os.mkfifo(path / "_METADATA")
