"""Sharded checkpoints: what is read, what is written, and how an interrupted write goes on."""

import json
import os
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint import atomic, shards_write, system, writer
from tests.checkpoint.locks import needs_locks

INDEX = "m.safetensors.index.json"
SIZE = 37 * 61
TENSORS = {f"layers.{i}.w": np.full((37, 61), i, np.float32) for i in range(5)}
SHARD = 5 * SIZE * 2  # of files with two tensors, or four that are cast to float16


def same(path: Path, expected: dict[str, np.ndarray] = TENSORS) -> bool:
    with checkpoint.open(path) as file:
        return {n: file[n].tolist() for n in file} == {n: a.tolist() for n, a in expected.items()}


@pytest.mark.parametrize("name", [INDEX, "m.bin.index.json"])
def test_shards_are_filled_in_order(name: str, tmp_path: Path) -> None:
    done = checkpoint.write(tmp_path / name, TENSORS, shard_size=SHARD)
    assert done.files[-1] == tmp_path / name
    assert sorted(done.files) == sorted(tmp_path.iterdir())
    held = [list(checkpoint.open(file).info) for file in done.files[:-1]]
    assert held == [["layers.0.w", "layers.1.w"], ["layers.2.w", "layers.3.w"], ["layers.4.w"]]
    assert same(tmp_path / name)
    with checkpoint.open(tmp_path / name) as file:
        assert file.format == "sharded"
        assert file.digests == done.digests
    index = json.loads((tmp_path / name).read_text())
    assert index["metadata"]["total_size"] == 5 * SIZE * 4


@pytest.mark.parametrize("name", [INDEX, "m.bin.index.json"])
@pytest.mark.parametrize("digest", ["sha256", None])
def test_no_file_is_larger_than_its_limit(name: str, digest: str | None, tmp_path: Path) -> None:
    """Headers count too: their names, digests and metadata. One tensor alone may be larger."""
    rng = np.random.default_rng(0)
    tensors = {
        f'lä"{i}' + "x" * int(rng.integers(40)): np.zeros(rng.integers(1, 23, 2), dtype)
        for i, dtype in enumerate(("float32", "float16", "int64", "uint8") * 5)
    }
    for size in (2003, 5003, 9001):
        done = checkpoint.write(
            tmp_path / name, tensors, shard_size=size, digest=digest, force=True,
            metadata={'"é': "y" * 211},
        )  # fmt: skip
        held = {file: len(checkpoint.open(file)) for file in done.files[:-1]}
        over = [file for file in held if file.stat().st_size > size]
        assert all(held[file] == 1 for file in over)
        assert bool(done.notes) >= bool(over)
    assert max(held.values()) > 1
    note = checkpoint.write(tmp_path / name, TENSORS, shard_size=SIZE, force=True).notes
    assert note == (
        f"5 shards may be larger than {SIZE} bytes, each for one tensor, such as 'layers.0.w'",
    )


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="lists open files")
def test_many_shards_are_not_all_open(tmp_path: Path) -> None:
    """A tensor larger than a shard has its own. A process may have only 256 files open at once."""
    tensors = {f"w{i:03}": np.full(3, i, np.float32) for i in range(100)}
    done = checkpoint.write(tmp_path / INDEX, tensors, shard_size=1)
    assert len(done.files) == 101
    with checkpoint.open(done.path) as file, checkpoint.open(done.path, mmap=True) as mapped:
        for name, array in tensors.items():
            assert file[name].tolist() == mapped[name].tolist() == array.tolist()
        kept = mapped.view("w001")
        opened = [fd.resolve().parent for fd in Path("/proc/self/fd").iterdir()]
        assert opened.count(tmp_path) == 3  # both indexes, and the shard in memory
        checkpoint.write(done.path, tensors, shard_size=1, force=True)
        assert kept is not None
        assert kept.tolist() == [1, 1, 1]
        with pytest.raises(checkpoint.UnreadableFile, match="No such file"):
            file["w001"]


def test_transformers_reads_it(tmp_path: Path) -> None:
    """The library that made the format finds every tensor by the index."""
    from safetensors.numpy import load_file

    checkpoint.write(tmp_path / INDEX, TENSORS, shard_size=SHARD)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    for name, shard in index.items():
        assert load_file(tmp_path / shard)[name].tolist() == TENSORS[name].tolist()


def test_shards_of_others_are_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts: list[dict[str, np.ndarray]] = [{"b": np.arange(3)}, {"a": np.ones((2, 5), np.float16)}]
    for name, part in zip(names, parts, strict=True):
        save_file(part, tmp_path / name)
    index = {"metadata": {"total_size": 44.0}, "weight_map": {"a": names[1], "b": names[0]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with checkpoint.open(tmp_path / "model.safetensors.index.json") as file:
        assert list(file) == ["a", "b"]
        assert file["b"].tolist() == [0, 1, 2]
        assert file["a"].dtype == np.float16
    with checkpoint.open(tmp_path / "model.safetensors.index.json", mmap=True) as file:
        assert not file["b"].flags.writeable


def test_links_of_the_hugging_face_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b/snapshots/1"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    done = checkpoint.write(tmp_path / INDEX, TENSORS, shard_size=SHARD)
    for i, file in enumerate(done.files):
        digest = f"{i:040x}"
        os.replace(file, blobs / digest)
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")
    assert same(snapshot / INDEX)
    elsewhere = tmp_path / "other"
    os.replace(blobs / f"{0:040x}", elsewhere)
    (blobs / f"{0:040x}").symlink_to(elsewhere)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.open(snapshot / INDEX)


def test_replacing_removes_only_what_was_written_here(tmp_path: Path) -> None:
    first = checkpoint.write(tmp_path / INDEX, TENSORS, shard_size=SHARD)
    other = tmp_path / "m-00001-of-00001.safetensors"
    checkpoint.write(other, {"mine": np.ones(3)})
    second = checkpoint.write(tmp_path / INDEX, {"w": np.ones(5)}, force=True)
    assert sorted(tmp_path.iterdir()) == sorted([*second.files, other])
    assert not set(first.files[:-1]) & set(second.files)
    with pytest.raises(checkpoint.DestinationExists, match="already there"):
        checkpoint.write(tmp_path / INDEX, TENSORS)
    assert same(tmp_path / INDEX, {"w": np.ones(5)})


def test_onto_itself(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / INDEX, TENSORS, shard_size=SHARD)
    with (
        checkpoint.open(tmp_path / INDEX) as file,
        pytest.raises(checkpoint.DestinationExists, match="being read"),
    ):
        checkpoint.write(tmp_path / INDEX, file, force=True)
    assert same(tmp_path / INDEX)


def test_onto_a_shard_that_is_read(tmp_path: Path) -> None:
    first = checkpoint.write(tmp_path / INDEX, TENSORS, shard_size=SHARD).files[0]
    with checkpoint.open(tmp_path / INDEX) as file:
        assert set(file.files) == set(tmp_path.iterdir())
        with pytest.raises(checkpoint.DestinationExists, match="being read"):
            checkpoint.write(first, file, force=True)
        with pytest.raises(checkpoint.DestinationExists, match="being read"):
            checkpoint.write(first, TENSORS, force=True, source=file.files)
    assert same(tmp_path / INDEX)


def _interrupted(path: Path, monkeypatch: pytest.MonkeyPatch, after: int, **settings: Any) -> None:
    real, count = writer._write_file, 0

    def stops(*args: Any) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write_file", stops)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.write(path, TENSORS, shard_size=SHARD, **settings)


@needs_locks
def test_an_interrupted_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / INDEX
    _interrupted(path, monkeypatch, 1, resume="this", dtype="float16")
    assert not path.exists()
    # Another part looks through the journal meanwhile.
    fd = system.open_plain(next(tmp_path.glob(".m*")))
    system.lock(fd)
    threading.Timer(0.1, os.close, [fd]).start()
    seen: list[tuple[int, int]] = []
    done = checkpoint.write(
        path,
        TENSORS,
        shard_size=SHARD,
        resume="this",
        dtype="float16",
        progress=lambda *counts: seen.append(counts),
    )
    assert len(done.kept) == 1
    assert done.losses.keys() == TENSORS.keys()  # of the kept ones too
    assert sorted(tmp_path.iterdir()) == sorted(done.files)
    assert same(path)
    assert seen[-1][0] == seen[-1][1]


def test_without_casting_nothing_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupted(tmp_path / INDEX, monkeypatch, 2, resume="this")
    info = {n: checkpoint.TensorInfo(a.shape, a.dtype) for n, a in TENSORS.items()}
    asked: list[str] = []

    def load(name: str) -> np.ndarray:
        asked.append(name)
        return TENSORS[name]

    lazy = checkpoint.Lazy(info, load)
    checkpoint.write(tmp_path / INDEX, lazy, shard_size=SHARD, resume="this")
    # beartype looks at the first.
    assert set(asked) - {"layers.0.w"} == {"layers.4.w"}
    assert same(tmp_path / INDEX)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damaged_shards_are_not_kept(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupted(tmp_path / INDEX, monkeypatch, 2, resume="this")
    shard = min(tmp_path.glob("m-*"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] if damage == "cut" else raw[:-1] + bytes([raw[-1] ^ 4]))
    done = checkpoint.write(tmp_path / INDEX, TENSORS, shard_size=SHARD, resume="this")
    assert len(done.kept) == 1
    assert same(tmp_path / INDEX)
    assert tmp_path not in [fd.resolve().parent for fd in Path("/proc/self/fd").glob("*")]


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_finished_write_is_checked_and_left_as_it_is(dtype: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"shard_size": SHARD, "resume": "this", "dtype": dtype}
    first = checkpoint.write(tmp_path / INDEX, TENSORS, **settings)
    before = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    again = checkpoint.write(tmp_path / INDEX, TENSORS, **settings)
    assert again.files == first.files
    assert again.kept == first.files[:-1]
    assert (again.digests, again.losses) == (first.digests, first.losses)
    part = checkpoint.write(tmp_path / INDEX, TENSORS, part=(0, 2), **settings)
    assert part.kept == part.files == first.files[:-1][::2]
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == before
    first.files[0].write_bytes(b"damaged")  # is written again
    assert len(checkpoint.write(tmp_path / INDEX, TENSORS, **settings).kept) == len(first.files) - 2
    assert checkpoint.open(tmp_path / INDEX).digest() == checkpoint.open(first.path).digest()
    for other in ({"resume": "that"}, {"shard_size": SHARD + 1, "digest": None}, {"resume": None}):
        with pytest.raises(checkpoint.DestinationExists, match="already there"):
            checkpoint.write(tmp_path / INDEX, TENSORS, **settings | other)
    assert before.keys() == {*tmp_path.iterdir()}


@needs_locks
def test_another_write_starts_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupted(tmp_path / INDEX, monkeypatch, 2, resume="this")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(checkpoint.DestinationExists, match=r"other settings left 2 shards"):
        checkpoint.write(tmp_path / INDEX, TENSORS, shard_size=SHARD, resume="that")
    assert sorted(tmp_path.iterdir()) == before
    done = checkpoint.write(tmp_path / INDEX, TENSORS, shard_size=SHARD, resume="that", force=True)
    assert not done.kept
    assert sorted(tmp_path.iterdir()) == sorted(done.files)


def test_without_resume_an_interruption_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupted(tmp_path / INDEX, monkeypatch, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("module", "call"), [(system, "sync_folder"), (atomic, "put")])
def test_a_late_interruption_never_takes_shards_in_use(
    module: ModuleType, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / INDEX
    checkpoint.write(path, {"w": np.ones(3)})
    real = getattr(module, call)

    def late(*args: Any) -> None:
        real(*args)
        if not same(path, {"w": np.ones(3)}):  # the new index is in place
            raise KeyboardInterrupt

    monkeypatch.setattr(module, call, late)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write(path, TENSORS, shard_size=SHARD, force=True)
    monkeypatch.undo()
    assert same(path)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_write, "_PATIENCE", 0)


@needs_locks
def test_two_at_once_on_the_same_shards(no_patience: None, tmp_path: Path) -> None:
    path = tmp_path / INDEX

    def load(name: str) -> np.ndarray:
        if name == "layers.4.w":
            with pytest.raises(checkpoint.DestinationExists, match="another process"):
                checkpoint.write(path, TENSORS, shard_size=SHARD, resume="this")
        return TENSORS[name]

    info = {n: checkpoint.TensorInfo(a.shape, a.dtype) for n, a in TENSORS.items()}
    checkpoint.write(path, checkpoint.Lazy(info, load), shard_size=SHARD, resume="this")
    assert same(path)


@needs_locks
def test_parts_by_several_writers(no_patience: None, tmp_path: Path) -> None:
    """Shards of parts are the same as those of one writer, and who completes casts nothing again."""
    settings: dict[str, Any] = {"shard_size": SHARD // 2, "resume": "this", "dtype": "float16"}
    (tmp_path / "one").mkdir()
    alone = checkpoint.write(tmp_path / "one" / INDEX, TENSORS, **settings)
    path = tmp_path / INDEX
    info = {n: checkpoint.TensorInfo(a.shape, a.dtype) for n, a in TENSORS.items()}
    asked: list[str] = []

    def load(name: str) -> np.ndarray:
        asked.append(name)
        if name == "layers.4.w":  # of the last shard; meanwhile the other part
            other = checkpoint.write(path, TENSORS, part=(1, 3), **settings)
            assert [file.name for file in other.files] == [alone.files[1].name]
            with pytest.raises(checkpoint.DestinationExists, match="another process"):
                checkpoint.write(path, TENSORS, **settings)
        return TENSORS[name]

    lazy = checkpoint.Lazy(info, load)
    for part in (2, 0):
        assert len(checkpoint.write(path, lazy, part=(part, 3), **settings).files) == 1
    assert not path.exists()
    with pytest.raises(checkpoint.DestinationExists, match="left 3 shards"):
        checkpoint.write(path, TENSORS, **settings | {"resume": "that"})
    asked[:] = ["nothing"]
    done = checkpoint.write(path, lazy, **settings)
    assert len(done.kept) == 3
    assert set(asked) <= {"nothing", "layers.0.w"}  # beartype looks at the first
    assert (done.losses, done.digests) == (alone.losses, alone.digests)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "one", *done.files])
    for ours, theirs in zip(done.files, alone.files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    for settings in ({"shard_size": 5}, {"resume": "this"}):
        with pytest.raises(checkpoint.UnsupportedFormat, match="shards"):
            checkpoint.write(tmp_path / "m.npz", TENSORS, **settings)
    with pytest.raises(checkpoint.UnsupportedFormat, match="positive"):
        checkpoint.write(tmp_path / INDEX, TENSORS, shard_size=0)
    with pytest.raises(checkpoint.UnsupportedFormat, match="xxh3_128"):
        checkpoint.write(tmp_path / INDEX, TENSORS, digest="md5")
    with pytest.raises(checkpoint.UnsupportedFormat, match="a part of another write"):
        checkpoint.write(tmp_path / INDEX, TENSORS, part=(0, 2))
    with pytest.raises(checkpoint.UnsupportedFormat, match="0 <= i < n"):
        checkpoint.write(tmp_path / INDEX, TENSORS, part=(2, 2), resume="this")
    with pytest.raises(checkpoint.UnsupportedFormat, match="read only"):
        checkpoint.write(tmp_path / "m.keras", TENSORS)
    assert not list(tmp_path.iterdir())
