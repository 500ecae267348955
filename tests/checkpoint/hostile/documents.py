"""Hostile documents of orbax folders, and folders of links, pipes and too many files."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Big, Code, No, Out, Two, case, raw_cases
from tests.checkpoint.hostile.indexes import W
from tests.checkpoint.hostile.orbax_folders import folder, orbax
from tests.checkpoint.hostile.zarr import zarr3

# --- documents of orbax ------------------------------------------------------------------------------------


def documented(file: str, data: bytes) -> Callable[[Path], None]:
    """A sound folder with one file of other content."""

    def build(path: Path) -> None:
        orbax(path)
        (path / file).write_bytes(data)

    return build


def tree_of(keys: Any, value: Any = None, **more: Any) -> bytes:
    leaf = {"key_metadata": keys, "value_metadata": value or {"value_type": "np.ndarray"}}
    return json.dumps({"tree_metadata": {"w": leaf}, **more}).encode()


def of_zarr3(array: dict[str, Any]) -> Callable[[Path], None]:
    return lambda path: zarr3(path, array, {"c/0/0": W.tobytes()})


KEY = [{"key": "w", "key_type": 2}]
raw_cases(
    "orbax_", ".orbax",
    ("tree_key_is_a_number", Bad, documented("_METADATA", tree_of([{"key": 1, "key_type": 1}]))),
    ("tree_key_is_empty", Bad, documented("_METADATA", tree_of([{"key": "", "key_type": 2}]))),
    ("tree_key_is_absolute", Out,
     documented("_METADATA", tree_of([{"key": "/etc", "key_type": 2}]))),
    ("tree_key_of_dots", Out, documented("_METADATA", tree_of([{"key": ".", "key_type": 2}]))),
    ("tree_key_with_nul", Bad, documented("_METADATA", tree_of([{"key": "w\0", "key_type": 2}]))),
    ("tree_key_of_surrogates", Bad,
     documented("_METADATA", tree_of([{"key": "\ud800", "key_type": 2}]))),
    ("tree_of_no_keys", Bad, documented("_METADATA", tree_of([]))),
    ("tree_keys_are_an_object", Bad, documented("_METADATA", tree_of({"key": "w"}))),
    ("tree_keys_of_a_thousand_levels", Big, documented("_METADATA", tree_of(KEY * 1000))),
    ("tree_value_is_a_list", Bad, documented("_METADATA", tree_of(KEY, ["np.ndarray"]))),
    ("tree_value_of_a_kind_of_object", No, documented("_METADATA", tree_of(KEY, {"value_type": {"a": 1}}))),
    ("tree_value_of_a_program", No, documented("_METADATA", tree_of(KEY, {"value_type": "os.system"}))),
    ("tree_zarr3_is_text", Bad, documented("_METADATA", tree_of(KEY, use_zarr3="no"))),
    ("tree_is_a_number", Bad, documented("_METADATA", b"1")),
    ("tree_is_not_utf8", Bad, documented("_METADATA", b'{"tree_metadata":{"\xff":1}}')),
    ("tree_has_a_nan", Bad, documented("_METADATA", b'{"tree_metadata":NaN}')),
    ("tree_is_deep", Bad, documented("_METADATA", b'{"a":' * 50_000 + b"1" + b"}" * 50_000)),
    ("array_is_a_list", Bad, documented("w/.zarray", b"[]")),
    ("array_is_empty", Bad, documented("w/.zarray", b"")),
    ("array_key_twice", Two, documented("w/.zarray", b'{"shape":[2,3],"shape":[2,3]}')),
    ("array_of_nothing", ck.UnsupportedDtype, documented("w/.zarray", b"{}")),
    ("array_of_two_megabytes", Big, documented("w/.zarray", b"{" + b" " * (2 << 20) + b"}")),
    ("digests_are_a_list", Bad, documented("jaxmha.digests.json", b"[]")),
    ("digests_of_text", ck.IntegrityError, documented("jaxmha.digests.json", b'{"all":"sha256:0","tensors":"w"}')),
    ("digests_of_no_digest", ck.IntegrityError, documented("jaxmha.digests.json", b'{"all":"sha256:0","tensors":{}}')),
    ("digests_are_deep", Bad,
     documented("jaxmha.digests.json", b'{"a":' * 50_000 + b"1" + b"}" * 50_000)),
    ("manifest_is_empty", Bad, documented("manifest.ocdbt", b"")),
    ("manifest_is_text", Bad, documented("manifest.ocdbt", b"manifest" * 20)),
    ("chunk_is_long", Bad, documented("w/0.0", W.tobytes() + b"\0")),
)  # fmt: skip
raw_cases(
    "zarr_", ".orbax",
    ("dtype_of_an_offset", ck.UnsupportedDtype, folder(array={"dtype": "<f4 "})),
    ("dtype_is_a_list_of_text", ck.UnsupportedDtype, folder(array={"dtype": ["<f4"]})),
    ("dtype_of_dates", ck.UnsupportedDtype, folder(array={"dtype": "<M8[ns]"})),
    ("separator_is_a_list", Bad, folder(array={"dimension_separator": ["."]})),
    ("separator_is_a_path", Bad, folder(array={"dimension_separator": "/../"})),
    ("codec_is_a_list", Code, folder(array={"compressor": ["zstd"]})),
    ("codec_of_blosc", Code, folder(array={"compressor": {"id": "blosc", "cname": "lz4"}})),
    ("filters_are_text", Code, folder(array={"filters": "delta"})),
    ("shape_of_40_axes", Big, folder(array={"shape": [1] * 40, "chunks": [1] * 40})),
    ("shape_of_2_60", Big, folder(array={"shape": [2**60], "chunks": [1]})),
    ("chunks_of_floats", Bad, folder(array={"chunks": [2.0, 3.0]})),
    ("order_of_neither", Bad, folder(array={"order": "K"})),
    ("format_of_1", Bad, folder(array={"zarr_format": 1})),
)  # fmt: skip
raw_cases(
    "zarr3_", ".orbax",
    ("codecs_are_an_object", Code, of_zarr3({"codecs": {"name": "bytes"}})),
    ("codecs_by_the_hundred", Code, of_zarr3({"codecs": [{"name": "crc32c"}] * 100})),
    ("codec_of_numcodecs", Code, of_zarr3({"codecs": [{"name": "numcodecs.pickle"}]})),
    ("grid_is_irregular", Code, of_zarr3({"chunk_grid": {"name": "rectangular", "configuration": {"chunk_shape": [2, 3]}}})),
    ("transformers", Code, of_zarr3({"storage_transformers": [{"name": "x"}]})),
    ("key_encoding_of_another", Bad, of_zarr3({"chunk_key_encoding": {"name": "../"}})),
    ("is_a_group", Code, of_zarr3({"node_type": "group"})),
    ("data_type_of_an_object", ck.UnsupportedDtype, of_zarr3({"data_type": {"name": "float32"}})),
)  # fmt: skip


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
