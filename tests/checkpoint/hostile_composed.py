"""Hostile checkpoints of several parts: indexes with shards, .keras archives, orbax folders."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from jaxmha.converters import checkpoint as ck
from tests.checkpoint.hostile import case, entry, keras, safetensors, torch_file, zip_file

INDEX = ".safetensors.index.json"
W = np.arange(6, dtype="f4").reshape(2, 3)


# --- sharded -----------------------------------------------------------------------------------


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


# --- keras archives ----------------------------------------------------------------------------


def archive(
    path: Path,
    *,
    change: Callable[[h5py.File], None] | None = None,
    members: dict[str, bytes | None] | None = None,
    **settings: Any,
) -> None:
    """A sound archive, its weights or members changed; None leaves a member out."""
    weights = path.with_name(f"{path.name}.tmp.h5")
    with keras(weights) as file:
        if change:
            change(file)
    parts: dict[str, bytes | None] = {"metadata.json": b"{}", "config.json": b"{}"}
    parts |= {"model.weights.h5": weights.read_bytes()} | (members or {})
    weights.unlink()
    path.write_bytes(zip_file([(n, b) for n, b in parts.items() if b is not None], **settings))


@case(".keras")
def sound_keras_archive(path: Path) -> None:
    archive(path)


@case(".keras", ck.IncompleteCheckpoint)
def keras_without_weights(path: Path) -> None:
    archive(path, members={"model.weights.h5": None})


@case(".keras", ck.IncompleteCheckpoint)
def keras_without_config(path: Path) -> None:
    archive(path, members={"config.json": None})


@case(".keras", ck.MalformedFile)
def keras_with_a_program(path: Path) -> None:
    archive(path, members={"layer.py": b"import os"})


@case(".keras", ck.MalformedFile)
def keras_with_two_weights(path: Path) -> None:
    archive(path, members={"other.weights.h5": b"\x89HDF\r\n\x1a\n"})


@case(".keras", ck.PathEscape)
def keras_member_is_a_path(path: Path) -> None:
    archive(path, members={"assets/../../m": b""})


@case(".keras", ck.MalformedFile)
def keras_config_is_no_json(path: Path) -> None:
    archive(path, members={"config.json": b"{'a': 1}"})


@case(".keras", ck.AmbiguousFile)
def keras_config_key_twice(path: Path) -> None:
    archive(path, members={"config.json": b'{"class_name": "Dense", "class_name": "Lambda"}'})


@case(".keras", ck.MalformedFile)
def keras_config_is_deep(path: Path) -> None:
    archive(path, members={"config.json": b'{"a":' * 100_000 + b"1" + b"}" * 100_000})


@case(".keras", ck.UnsupportedFormat)
def keras_weights_are_compressed(path: Path) -> None:
    archive(path, method=8)


@case(".keras", ck.MalformedFile)
def keras_weights_are_no_hdf5(path: Path) -> None:
    archive(path, members={"model.weights.h5": b"weights" * 100})


@case(".keras", ck.IntegrityError)
def keras_weights_checksum(path: Path) -> None:
    archive(path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(W.tobytes(), W[::-1].tobytes()))


@case(".keras", ck.ForbiddenContent)
def keras_weights_link_out(path: Path) -> None:
    def change(file: h5py.File) -> None:
        file["layers/dense/vars/1"] = h5py.ExternalLink("/etc/passwd", "/")

    archive(path, change=change)


@case(".keras", ck.ForbiddenContent)
def keras_weights_soft_link(path: Path) -> None:
    def change(file: h5py.File) -> None:
        file["layers/dense/vars/1"] = h5py.SoftLink("/layers/dense/vars/0")

    archive(path, change=change)


@case(".keras", ck.IncompleteCheckpoint)
def keras_weights_with_a_gap(path: Path) -> None:
    def change(file: h5py.File) -> None:
        file["layers/dense/vars/2"] = np.ones(2)

    archive(path, change=change)


# --- orbax -------------------------------------------------------------------------------------


def orbax(
    path: Path,
    *,
    array: dict[str, Any] | None = None,
    tree: dict[str, Any] | None = None,
    key: str = "w",
    kind: str = "np.ndarray",
) -> None:
    """A sound folder of plain files, its documents changed."""
    (path / key).mkdir(parents=True)
    document = {
        "zarr_format": 2,
        "shape": [2, 3],
        "chunks": [2, 3],
        "dtype": "<f4",
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "order": "C",
        "dimension_separator": ".",
    }
    (path / key / ".zarray").write_text(json.dumps(document | (array or {})))
    (path / key / "0.0").write_bytes(W.tobytes())
    leaf = {
        "key_metadata": [{"key": key, "key_type": 2}],
        "value_metadata": {"value_type": kind, "skip_deserialize": False},
    }
    whole = {"tree_metadata": {f"('{key}',)": leaf}, "use_ocdbt": False, "use_zarr3": False}
    (path / "_METADATA").write_text(json.dumps(whole | (tree or {})))


@case(".orbax")
def sound_orbax(path: Path) -> None:
    ck.write(path, {"w": W}, digest="sha256")


@case(".orbax")
def sound_orbax_of_files(path: Path) -> None:
    orbax(path)


def _orbax_case(name: str, error: type[ck.CheckpointError], **changes: Any) -> None:
    def build(path: Path) -> None:
        orbax(path, **changes)

    build.__name__ = f"orbax_{name}"
    case(".orbax", error)(build)


_orbax_case("shape_bomb", ck.BudgetExceeded, array={"shape": [2**40, 2**20], "chunks": [2, 3]})
_orbax_case("chunk_bomb", ck.BudgetExceeded, array={"chunks": [2**40, 3]})
_orbax_case("many_chunks", ck.IncompleteCheckpoint, array={"shape": [2000, 3], "chunks": [1, 1]})
_orbax_case("negative_shape", ck.MalformedFile, array={"shape": [-2, 3]})
_orbax_case("shape_of_floats", ck.MalformedFile, array={"shape": [2.0, 3.0]})
_orbax_case("shape_of_truth", ck.MalformedFile, array={"shape": [True, 3]})
_orbax_case("chunk_of_zero", ck.MalformedFile, array={"chunks": [0, 3]})
_orbax_case("ranks_differ", ck.MalformedFile, array={"chunks": [6]})
_orbax_case("other_shape", ck.MalformedFile, array={"shape": [3, 3], "chunks": [3, 3]})
_orbax_case("objects", ck.UnsupportedDtype, array={"dtype": "|O"})
_orbax_case("records", ck.UnsupportedDtype, array={"dtype": [["a", "<f4"]]})
_orbax_case("text_dtype", ck.UnsupportedDtype, array={"dtype": "<U4"})
_orbax_case("filter", ck.ForbiddenContent, array={"filters": [{"id": "pickle"}]})
_orbax_case("codec", ck.ForbiddenContent, array={"compressor": {"id": "pickle"}})
_orbax_case("text_leaf", ck.UnsupportedFormat, kind="string")
_orbax_case(
    "name_is_a_path",
    ck.PathEscape,
    tree={
        "tree_metadata": {
            "w": {
                "key_metadata": [{"key": "..", "key_type": 2}, {"key": "w", "key_type": 2}],
                "value_metadata": {"value_type": "np.ndarray"},
            }
        }
    },
)
_orbax_case("tree_is_a_list", ck.MalformedFile, tree={"tree_metadata": []})
_orbax_case("tree_of_text", ck.MalformedFile, tree={"tree_metadata": {"w": "w"}})
_orbax_case("tree_without_array", ck.IncompleteCheckpoint, tree={"tree_metadata": {}})
_orbax_case("other_zarr", ck.IncompleteCheckpoint, tree={"use_zarr3": True})


@case(".orbax", ck.MalformedFile)
def orbax_empty_tree(path: Path) -> None:
    path.mkdir()
    (path / "_METADATA").touch()


@case(".orbax", ck.AmbiguousFile)
def orbax_tree_key_twice(path: Path) -> None:
    orbax(path)
    text = (path / "_METADATA").read_text()
    (path / "_METADATA").write_text('{"use_zarr3": true, ' + text[1:])


@case(".orbax", ck.IncompleteCheckpoint)
def orbax_without_tree(path: Path) -> None:
    sound_orbax(path)
    (path / "_METADATA").unlink()


@case(".orbax", ck.IncompleteCheckpoint)
def orbax_without_a_chunk(path: Path) -> None:
    orbax(path)
    (path / "w" / "0.0").unlink()


@case(".orbax", ck.MalformedFile)
def orbax_chunk_is_cut_short(path: Path) -> None:
    orbax(path)
    (path / "w" / "0.0").write_bytes(W.tobytes()[:-1])


@case(".orbax", ck.IncompleteCheckpoint)
def orbax_array_not_in_the_tree(path: Path) -> None:
    orbax(path)
    shutil.copytree(path / "w", path / "v")


@case(".orbax", ck.ForbiddenContent)
def orbax_chunk_is_a_link(path: Path) -> None:
    orbax(path)
    (path / "w" / "0.0").unlink()
    (path / "w" / "0.0").symlink_to("/etc/passwd")


@case(".orbax", ck.ForbiddenContent)
def orbax_folder_is_a_link(path: Path) -> None:
    orbax(path)
    os.replace(path / "w", path / "v")
    (path / "w").symlink_to(path / "v")


@case(".orbax", ck.ForbiddenContent)
def orbax_with_a_fifo(path: Path) -> None:
    orbax(path)
    os.mkfifo(path / "w" / "0.1")


@case(".orbax", ck.BudgetExceeded)
def orbax_deep_folders(path: Path) -> None:
    orbax(path)
    (path / "/".join("abcdefgh")).mkdir(parents=True)


@case(".orbax-checkpoint-tmp-1", ck.IncompleteCheckpoint)
def orbax_unfinished(path: Path) -> None:
    orbax(path)


@case("", ck.UnsupportedFormat)
def orbax_of_several_items(path: Path) -> None:
    orbax(path / "default")
    (path / "_CHECKPOINT_METADATA").write_text("{}")


@case(".orbax", ck.MalformedFile)
def orbax_manifest_is_damaged(path: Path) -> None:
    sound_orbax(path)
    raw = bytearray((path / "manifest.ocdbt").read_bytes())
    raw[20] ^= 1
    (path / "manifest.ocdbt").write_bytes(raw)


@case(".orbax", ck.MalformedFile)
def orbax_manifest_leads_outside(path: Path) -> None:
    """A data file of another folder, as a manifest may name it; its checksum is right."""
    ocdbt_redirected(path, b"../")


@case(".orbax", ck.MalformedFile)
def orbax_manifest_goes_round(path: Path) -> None:
    ocdbt_redirected(path, b"d/../")


@case(".orbax", ck.IntegrityError)
def orbax_digest(path: Path) -> None:
    sound_orbax(path)
    file = path / "jaxmha.digests.json"
    kept = json.loads(file.read_text())
    kept["tensors"]["w"] = kept["tensors"]["w"][:-1] + (
        "0" if kept["tensors"]["w"][-1] != "0" else "1"
    )
    file.write_text(json.dumps(kept))


def ocdbt_redirected(path: Path, prefix: bytes) -> None:
    """Changes the path of a data file in the manifest of a database, and moves the file there."""
    import tensorstore

    orbax(path)
    base = {"driver": "file", "path": f"{path}/"}
    spec = {"driver": "ocdbt", "base": base, "config": {"compression": None}}
    store = tensorstore.KvStore.open(spec).result()
    with tensorstore.Transaction() as together:  # one data file
        for file in ("w/.zarray", "w/0.0"):
            store.with_transaction(together).write(file, (path / file).read_bytes()).result()
    with ck.open(path) as sound:
        assert sound["w"].tolist() == W.tolist()
    raw = (path / "manifest.ocdbt").read_bytes()
    name = raw[raw.index(b"d/") :][:34]
    new = prefix + name[len(prefix) :]
    shutil.copy(path / os.fsdecode(name), os.path.join(path, os.fsdecode(new)))
    framed = raw[:-4].replace(name, new)
    (path / "manifest.ocdbt").write_bytes(framed + crc32c(framed).to_bytes(4, "little"))


def _crc32c_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC32C = [_crc32c_of(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    """The checksum of OCDBT."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
