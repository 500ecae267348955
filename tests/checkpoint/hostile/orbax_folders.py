"""Hostile folders of orbax."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Big, Code, Gone, No, Out, case, raw_case, raw_cases
from tests.checkpoint.hostile.indexes import W


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
        "zarr_format": 2, "shape": [2, 3], "chunks": [2, 3], "dtype": "<f4", "compressor": None,
        "filters": None, "fill_value": None, "order": "C", "dimension_separator": ".",
    }  # fmt: skip
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


def folder(**changes: Any) -> Callable[[Path], None]:
    return lambda path: orbax(path, **changes)


raw_cases(
    "orbax_", ".orbax",
    ("shape_bomb", Big, folder(array={"shape": [2**40, 2**20], "chunks": [2, 3]})),
    ("chunk_bomb", Big, folder(array={"chunks": [2**40, 3]})),
    ("many_chunks", Gone, folder(array={"shape": [2000, 3], "chunks": [1, 1]})),
    ("negative_shape", Bad, folder(array={"shape": [-2, 3]})),
    ("shape_of_floats", Bad, folder(array={"shape": [2.0, 3.0]})),
    ("shape_of_truth", Bad, folder(array={"shape": [True, 3]})),
    ("chunk_of_zero", Bad, folder(array={"chunks": [0, 3]})),
    ("ranks_differ", Bad, folder(array={"chunks": [6]})),
    ("other_shape", Bad, folder(array={"shape": [3, 3], "chunks": [3, 3]})),
    ("objects", ck.UnsupportedDtype, folder(array={"dtype": "|O"})),
    ("records", ck.UnsupportedDtype, folder(array={"dtype": [["a", "<f4"]]})),
    ("text_dtype", ck.UnsupportedDtype, folder(array={"dtype": "<U4"})),
    ("filter", Code, folder(array={"filters": [{"id": "pickle"}]})),
    ("codec", Code, folder(array={"compressor": {"id": "pickle"}})),
    ("text_leaf", No, folder(kind="string")),
    ("name_is_a_path", Out, folder(tree={"tree_metadata": {"w": {
        "key_metadata": [{"key": "..", "key_type": 2}, {"key": "w", "key_type": 2}],
        "value_metadata": {"value_type": "np.ndarray"}}}})),
    ("tree_is_a_list", Bad, folder(tree={"tree_metadata": []})),
    ("tree_of_text", Bad, folder(tree={"tree_metadata": {"w": "w"}})),
    ("tree_without_array", Gone, folder(tree={"tree_metadata": {}})),
    ("other_zarr", Gone, folder(tree={"use_zarr3": True})),
)  # fmt: skip


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


def then(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A sound folder of plain files, then changed."""

    def build(path: Path) -> None:
        orbax(path)
        change(path)

    return build


raw_cases(
    "orbax_", ".orbax",
    ("without_a_chunk", Gone, then(lambda path: (path / "w" / "0.0").unlink())),
    ("chunk_is_cut_short", Bad,
     then(lambda path: (path / "w" / "0.0").write_bytes(W.tobytes()[:-1]))),
    ("array_not_in_the_tree", Gone, then(lambda path: shutil.copytree(path / "w", path / "v"))),
    ("with_a_fifo", Code, then(lambda path: os.mkfifo(path / "w" / "0.1"))),
    ("deep_folders", Big, then(lambda path: (path / "/".join("abcdefgh")).mkdir(parents=True))),
)  # fmt: skip


raw_case("orbax_unfinished", ".orbax-checkpoint-tmp-1", Gone, lambda path: orbax(path))


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


raw_cases(
    "orbax_", ".orbax",
    # A data file of another folder, as a manifest may name it; its checksum is right.
    ("manifest_leads_outside", Bad, lambda path: ocdbt_redirected(path, b"../")),
    ("manifest_goes_round", Bad, lambda path: ocdbt_redirected(path, b"d/../")),
)  # fmt: skip


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
