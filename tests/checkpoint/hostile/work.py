"""Small files whose parts look harmless one by one, and together take minutes or gigabytes."""

import json
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
from tests.checkpoint.hostile.gguf_files import QWEN, gguf, setting
from tests.checkpoint.hostile.gguf_files import tensor as gguf_tensor
from tests.checkpoint.hostile.indexes import W
from tests.checkpoint.hostile.keras_weights import keras
from tests.checkpoint.hostile.orbax_folders import orbax
from tests.checkpoint.hostile.torch_files import (
    ORDERED,
    V2,
    number,
    numbers,
    state,
    storage,
    tensor,
    text,
    torch_file,
    zip_file,
)
from tests.checkpoint.hostile.zarr import zarr3

_ONE_HASH = 2**61 - 1  # all multiples of it have the hash 0
_CHUNK = 3 << 20  # elements of a chunk that hangs over its array


def _long(n: int) -> bytes:
    return b"\x8a\x0b" + n.to_bytes(11, "little", signed=True)


def _keys(name: str, keys: list[int]) -> None:
    @case(".pt", ck.ForbiddenContent, f"pickle_keys_{name}")
    def build() -> bytes:
        items = b"".join(_long(key) + b"N" for key in keys)
        return torch_file(state(text("w"), tensor(), text("x"), b"}(" + items + b"u"))


_keys("of_one_hash", [_ONE_HASH * k for k in range(1, 30_000)])
_keys("negative_of_one_hash", [-_ONE_HASH * k for k in range(1, 30_000)])
_keys("beyond_32_bits", [2**40])


@case(".pt", ck.ForbiddenContent)
def pickle_keys_of_one_hash_singly() -> bytes:
    """SETITEM instead of SETITEMS, in the dict of the tensors itself."""
    items = b"".join(_long(_ONE_HASH * k) + b"Ns" for k in range(1, 10_000))
    return torch_file(b"\x80\x02" + ORDERED + text("w") + tensor() + b"s" + items + b".")


def _sparse(name: str, count: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    @case(".pt", ck.BudgetExceeded, f"torch_sparse_views_{name}")
    def build() -> bytes:
        elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        of = storage(count=elements) + b"q\x00" + number(0)
        first = text("w") + V2 + b"(" + of + numbers(*shape) + numbers(*strides)
        more = V2 + b"(h\x00" + number(0) + numbers(*shape) + numbers(*strides)
        end = b"\x89" + ORDERED + b"tR"
        rest = b"".join(text(f"v{i}") + more + end for i in range(count))
        return torch_file(state(first + end, rest), bytes(4 * elements))


_sparse("of_two_elements", 3000, (2,), (100_000,))
_sparse("of_columns", 1200, (1000, 2), (300, 2))
_sparse("of_three_axes", 3000, (2, 2, 2), (60_000, 30_000, 1000))


@cache
def _zeros(elements: int) -> bytes:
    return zlib.compress(bytes(4 * elements), 9)


def _overhang(name: str, count: int, version: int) -> None:
    @case(".orbax", ck.BudgetExceeded, f"zarr{version}_overhanging_chunks_{name}")
    def build(path: Path) -> None:
        data = _zeros(_CHUNK)
        if version == 2:
            shape = {"shape": [count, 3], "chunks": [1, _CHUNK]}
            orbax(path, array={**shape, "compressor": {"id": "zlib", "level": 1}})
            (path / "w" / "0.0").unlink()
            for i in range(count):
                (path / "w" / f"{i}.0").write_bytes(data)
            return
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
        codecs += [{"name": "gzip", "configuration": {"level": 1}}]
        grid = {"name": "regular", "configuration": {"chunk_shape": [1, _CHUNK]}}
        array = {"shape": [count, 3], "chunk_grid": grid, "codecs": codecs}
        zarr3(path, array, {f"c/{i}/0": data for i in range(count)})


_overhang("of_zeros", 100, 2)
_overhang("of_zeros", 100, 3)


@case(".weights.h5", ck.BudgetExceeded)
def h5_overhanging_chunks(path: Path) -> None:
    with keras(path) as file:
        made = file["layers/dense/vars"].create_dataset(
            *("1", (100, 3), "f4"), chunks=(1, _CHUNK), maxshape=(None, None), compression="gzip"
        )
        for i in range(100):
            made.id.write_direct_chunk((i, 0), _zeros(_CHUNK))


@case(".weights.h5", ck.BudgetExceeded)
def h5_overhanging_chunk_of_many_names(path: Path) -> None:
    """Each hard link reads, and inflates, the chunk again."""
    with keras(path) as file:
        made = file["layers/dense/vars"].create_dataset(
            *("1", (3,), "f4"), chunks=(_CHUNK,), maxshape=(None,), compression="gzip"
        )
        made.id.write_direct_chunk((0,), _zeros(_CHUNK))
        for i in range(100):
            file[f"layers/d{i}/vars/0"] = made


@case(".gguf", ck.BudgetExceeded)
def gguf_many_empty_lists() -> bytes:
    """After each list the reader's window was read again."""
    empty = struct.pack("<IQ", 0, 0)
    lists = (setting(f"{i:x}", 9, empty) for i in range(450_000))
    return gguf(gguf_tensor(), settings=(QWEN, *lists))


def _linked(suffix: str, name: str) -> None:
    """A folder whose only checkpoint is a link to a file of the user."""

    @case(suffix, ck.PathEscape, f"folder_with_link_to_{name.replace('.', '_')}")
    def build(path: Path) -> None:
        path.mkdir()
        outside = path / "home"  # in the scratch folder; a link may lead anywhere
        outside.mkdir()
        ck.write(outside / name, {"w": W})
        (path / name).symlink_to(outside / name)


_linked("", "model.safetensors")
_linked("", "pytorch_model.bin")
_linked("", "model.safetensors.index.json")
_linked("", "other.npz")
_linked("", "other.weights.h5")
_linked("", "other.orbax")


@case("", ck.PathEscape)
def folder_that_looks_like_a_cache(path: Path) -> None:
    """The link leads from a snapshot to a file that is no blob."""
    inside = path / "models--a--b" / "snapshots" / ("0" * 40)
    inside.mkdir(parents=True)
    ck.write(path / "models--a--b" / "blobs.safetensors", {"w": W})
    (inside / "model.safetensors").symlink_to("../../blobs.safetensors")
    for one in sorted(inside.iterdir()):
        one.rename(path / one.name)


@case(".safetensors.index.json", ck.PathEscape)
def index_of_a_shard_that_links_to_a_sibling(path: Path) -> None:
    ck.write(path, {"w": W})
    (shard,) = set(json.loads(path.read_text())["weight_map"].values())
    file = path.with_name(shard)
    moved = path.with_name("moved.bin")
    file.rename(moved)
    file.symlink_to(moved.name)


@case(".npz", ck.BudgetExceeded)
def npz_more_zeros_than_allowed() -> bytes:
    """A member of 1.1 GiB in one MiB."""
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
    shape = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({300 << 20},), }}"
    body = head + shape.ljust(117).encode() + b"\n" + np.zeros(64, "<f4").tobytes()
    size = len(head) + 118 + (300 << 22)
    return zip_file([("w.npy", body)], method=8, declare=(0, size))


@case(".npz", ck.MalformedFile)
def zip_many_extra_fields() -> bytes:
    """Headers of 16,000 empty fields, all of which were looked through for each kind."""
    whole = zip_file([("w.npy", b"")])
    start, end = whole.index(b"PK\1\2"), whole.index(b"PK\5\6")
    central = bytearray(whole[start:end] + struct.pack("<HH", 7, 0) * 16_000)
    struct.pack_into("<H", central, 30, 64_000)
    last = bytearray(whole[end:])
    struct.pack_into("<L", last, 12, len(central))
    return whole[:start] + bytes(central) + bytes(last)
