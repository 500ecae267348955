"""Hostile indexes and their shards."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Gone, Out, Two, case, raw_cases
from tests.checkpoint.hostile.safetensors_files import entry, safetensors
from tests.checkpoint.hostile.torch_files import torch_file

INDEX = ".safetensors.index.json"
W = np.arange(6, dtype="f4").reshape(2, 3)


def shard_of(path: Path, ending: str = ".safetensors") -> str:
    return f"{path.name.partition('.')[0]}-00001-of-00001{ending}"


def index(path: Path, change: Callable[[dict[str, Any], str], Any] | None = None) -> Path:
    """A sound index, changed; and its shard, which is returned."""
    shard = path.with_name(shard_of(path))
    shard.write_bytes(safetensors({"w": entry()}))
    document = {"metadata": {"total_size": 24}, "weight_map": {"w": shard.name}}
    if change:
        document = change(document, shard.name) or document
    path.write_text(json.dumps(document))
    return shard


def changed(change: Callable[[dict[str, Any], str], Any]) -> Callable[[Path], Any]:
    """An index with its shard, changed."""
    return lambda path: index(path, change)


def mapping(change: Callable[[str], dict[str, Any]]) -> Callable[[Path], Any]:
    """More tensors or others, made of the name of the shard."""
    return changed(lambda document, shard: document["weight_map"].update(change(shard)))


def listing(**names: Any) -> Callable[[Path], Any]:
    return mapping(lambda _: names)


@case(INDEX)
def sound_sharded(path: Path) -> None:
    index(path, lambda document, _: document.pop("metadata"))
    path.with_name(shard_of(path)).unlink()
    path.unlink()
    values = {"w": W.astype("f4")}
    ck.write(path, values, resume="the same name of the shard every time", digest="sha256")


raw_cases(
    "index_", INDEX,
    ("absolute", Out, listing(w="/etc/passwd.safetensors")),
    ("outside", Out, listing(w="../m.safetensors")),
    ("separator", Out, listing(w="a/m.safetensors")),
    ("backslash", Out, listing(w="..\\m.safetensors")),
    ("drive", Out, listing(w="C:m.safetensors")),
    ("device", Out, listing(w="con.safetensors")),
    ("trailing_dot", Out, listing(w="m.safetensors.")),
    ("hidden", Out, listing(w=".m.safetensors")),
    ("nul", Out, listing(w="m\0.safetensors")),
    ("empty", Out, listing(w="")),
    ("long", Out, listing(w="m" * 300 + ".safetensors")),
    ("tensor_is_absent", Gone, mapping(lambda shard: {"v": shard})),
    ("total_is_wrong", Bad, changed(lambda d, _: d["metadata"].update(total_size=25))),
    ("total_is_negative", Bad, changed(lambda d, _: d["metadata"].update(total_size=-24))),
    ("total_is_text", Bad, changed(lambda d, _: d["metadata"].update(total_size="24"))),
    ("value_is_a_list", Bad, mapping(lambda shard: {"w": [shard]})),
    ("shard_of_another_format", Bad, mapping(lambda shard: {"w": f"{shard}.bin"})),
    ("tensor_name_is_a_path", Out, mapping(lambda shard: {"../w": shard})),
    ("extra_key", Bad, changed(lambda d, _: d.update(extra=1))),
    ("without_map", Bad, changed(lambda d, _: {"metadata": {}})),
    ("name_twice", Two, b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}'),
    ("is_deep", Bad, lambda: b'{"weight_map": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001),
    ("shards_differ_in_case", Two,
     mapping(lambda shard: {"v": shard[:-12].upper() + ".safetensors"})),
)  # fmt: skip


@case(INDEX, ck.PathEscape)
def index_link_out(path: Path) -> None:
    shard = index(path)
    elsewhere = path.with_name(f"{path.name.partition('.')[0]}-elsewhere")
    os.replace(shard, elsewhere)
    shard.symlink_to(elsewhere)


def spoilt(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """An index whose shard is changed."""
    return lambda path: change(index(path))


def replaced(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """An index with another thing in the place of its shard."""

    def build(path: Path) -> None:
        shard = index(path)
        shard.unlink()
        make(shard)

    return build


raw_cases(
    "index_", INDEX,
    ("link_loop", Out, replaced(lambda shard: shard.symlink_to(shard))),
    ("link_like_a_cache", Out, replaced(lambda shard: shard.symlink_to(f"../../blobs/{'0' * 40}"))),
    ("shard_is_fifo", ck.UnreadableFile, replaced(lambda shard: os.mkfifo(shard))),
    ("shard_is_folder", ck.UnreadableFile, replaced(lambda shard: shard.mkdir())),
    ("shard_is_missing", Gone, spoilt(lambda shard: shard.unlink())),
    ("shard_is_cut_short", Bad, spoilt(lambda shard: shard.write_bytes(shard.read_bytes()[:-1]))),
)  # fmt: skip


@case(INDEX, ck.IntegrityError)
def index_shard_is_damaged(path: Path) -> None:
    sound_sharded(path)
    (name,) = json.loads(path.read_text())["weight_map"].values()
    shard = path.with_name(name)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x41")


@case(INDEX, ck.AmbiguousFile)
def index_tensor_in_two_shards(path: Path) -> None:
    def change(document: dict[str, Any], shard: str) -> None:
        document["weight_map"]["v"] = shard.replace("00001-of", "00002-of")

    index(path, change)
    other = path.with_name(shard_of(path).replace("00001-of", "00002-of"))
    other.write_bytes(safetensors({"w": entry()}))


@case(INDEX, ck.AmbiguousFile)
def index_tensor_is_not_listed(path: Path) -> None:
    shard = index(path, lambda document, shard: document["weight_map"].update(v=shard))
    second = {"dtype": "F32", "shape": [0], "data_offsets": [24, 24]}
    shard.write_bytes(safetensors({"w": entry(), "v": second, "u": second}))


@case(INDEX, ck.MalformedFile)
def index_names_itself(path: Path) -> None:
    index(path, lambda document, _: document["weight_map"].update(w=path.name))


@case(INDEX, ck.BudgetExceeded)
def index_is_huge(path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 70 << 20)


@case(INDEX, ck.BudgetExceeded)
def index_of_many_shards(path: Path) -> None:
    shards = {f"w{i}": f"m-{i}.safetensors" for i in range(501)}
    path.write_text(json.dumps({"weight_map": shards}))


@case(".safetensors", ck.AmbiguousFile)
def index_named_as_a_shard() -> bytes:
    return b'{"weight_map": {"w": "a.safetensors"}}'


@case(".bin.index.json", ck.ForbiddenContent)
def index_of_a_hostile_pickle(path: Path) -> None:
    shard = path.with_name(shard_of(path, ".bin"))
    shard.write_bytes(torch_file(b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R."))
    path.write_text(json.dumps({"weight_map": {"w": shard.name}}))


@case(".weights.json", ck.UnsupportedFormat)
def index_of_keras() -> bytes:
    return b'{"weight_map": {"/layers/dense/vars": "model_00000.weights.h5"}}'
