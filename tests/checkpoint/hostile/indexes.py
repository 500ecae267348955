"""Hostile indexes and their shards."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
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


def listed_as(name: str) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        index(path, lambda document, _: document["weight_map"].update(w=name))

    return build


@case(INDEX)
def sound_sharded(path: Path) -> None:
    index(path, lambda document, _: document.pop("metadata"))
    path.with_name(shard_of(path)).unlink()
    path.unlink()
    values = {"w": W.astype("f4")}
    ck.write(path, values, resume="the same name of the shard every time", digest="sha256")


for _name, _listed in {
    "absolute": "/etc/passwd.safetensors",
    "outside": "../m.safetensors",
    "separator": "a/m.safetensors",
    "backslash": "..\\m.safetensors",
    "drive": "C:m.safetensors",
    "device": "con.safetensors",
    "trailing_dot": "m.safetensors.",
    "hidden": ".m.safetensors",
    "nul": "m\0.safetensors",
    "empty": "",
    "long": "m" * 300 + ".safetensors",
}.items():
    _build = listed_as(_listed)

    def _register(path: Path, build: Callable[[Path], None] = _build) -> None:
        build(path)

    _register.__name__ = f"index_{_name}"
    case(INDEX, ck.PathEscape)(_register)


@case(INDEX, ck.PathEscape)
def index_link_out(path: Path) -> None:
    shard = index(path)
    elsewhere = path.with_name(f"{path.name.partition('.')[0]}-elsewhere")
    os.replace(shard, elsewhere)
    shard.symlink_to(elsewhere)


@case(INDEX, ck.PathEscape)
def index_link_loop(path: Path) -> None:
    shard = index(path)
    shard.unlink()
    shard.symlink_to(shard)


@case(INDEX, ck.PathEscape)
def index_link_like_a_cache(path: Path) -> None:
    shard = index(path)
    shard.unlink()
    shard.symlink_to(f"../../blobs/{'0' * 40}")


@case(INDEX, ck.UnreadableFile)
def index_shard_is_fifo(path: Path) -> None:
    shard = index(path)
    shard.unlink()
    os.mkfifo(shard)


@case(INDEX, ck.UnreadableFile)
def index_shard_is_folder(path: Path) -> None:
    shard = index(path)
    shard.unlink()
    shard.mkdir()


@case(INDEX, ck.IncompleteCheckpoint)
def index_shard_is_missing(path: Path) -> None:
    index(path).unlink()


@case(INDEX, ck.MalformedFile)
def index_shard_is_cut_short(path: Path) -> None:
    shard = index(path)
    shard.write_bytes(shard.read_bytes()[:-1])


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


@case(INDEX, ck.IncompleteCheckpoint)
def index_tensor_is_absent(path: Path) -> None:
    index(path, lambda document, shard: document["weight_map"].update(v=shard))


@case(INDEX, ck.AmbiguousFile)
def index_tensor_is_not_listed(path: Path) -> None:
    shard = index(path, lambda document, shard: document["weight_map"].update(v=shard))
    second = {"dtype": "F32", "shape": [0], "data_offsets": [24, 24]}
    shard.write_bytes(safetensors({"w": entry(), "v": second, "u": second}))


@case(INDEX, ck.MalformedFile)
def index_total_is_wrong(path: Path) -> None:
    index(path, lambda document, _: document["metadata"].update(total_size=25))


@case(INDEX, ck.MalformedFile)
def index_total_is_negative(path: Path) -> None:
    index(path, lambda document, _: document["metadata"].update(total_size=-24))


@case(INDEX, ck.MalformedFile)
def index_total_is_text(path: Path) -> None:
    index(path, lambda document, _: document["metadata"].update(total_size="24"))


@case(INDEX, ck.MalformedFile)
def index_value_is_a_list(path: Path) -> None:
    index(path, lambda document, shard: document["weight_map"].update(w=[shard]))


@case(INDEX, ck.MalformedFile)
def index_names_itself(path: Path) -> None:
    index(path, lambda document, _: document["weight_map"].update(w=path.name))


@case(INDEX, ck.MalformedFile)
def index_shard_of_another_format(path: Path) -> None:
    index(path, lambda document, shard: document["weight_map"].update(w=f"{shard}.bin"))


@case(INDEX, ck.PathEscape)
def index_tensor_name_is_a_path(path: Path) -> None:
    index(path, lambda document, shard: document["weight_map"].update({"../w": shard}))


@case(INDEX, ck.MalformedFile)
def index_extra_key(path: Path) -> None:
    index(path, lambda document, _: document.update(extra=1))


@case(INDEX, ck.MalformedFile)
def index_without_map(path: Path) -> None:
    index(path, lambda document, _: {"metadata": {}})


@case(INDEX, ck.AmbiguousFile)
def index_name_twice() -> bytes:
    return b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}'


@case(INDEX, ck.MalformedFile)
def index_is_deep() -> bytes:
    return b'{"weight_map": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001


@case(INDEX, ck.BudgetExceeded)
def index_is_huge(path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 70 << 20)


@case(INDEX, ck.BudgetExceeded)
def index_of_many_shards(path: Path) -> None:
    shards = {f"w{i}": f"m-{i}.safetensors" for i in range(501)}
    path.write_text(json.dumps({"weight_map": shards}))


@case(INDEX, ck.AmbiguousFile)
def index_shards_differ_in_case(path: Path) -> None:
    index(
        path,
        lambda document, shard: document["weight_map"].update(
            v=shard.upper().lower()[:-12].upper() + ".safetensors"
        ),
    )


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
