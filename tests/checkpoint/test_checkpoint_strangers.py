"""Writers lose no file of others: look-alikes, links, and folders with more in them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint import atomic, journal, temporaries
from jaxmha.converters.migrate import pipeline
from tests.checkpoint.locks import needs_locks

INDEX = "m.safetensors.index.json"
TENSORS = {f"layers.{i}.w": np.full((7, 11), i, np.float32) for i in range(5)}
SHARD = 2 * 7 * 11 * 4
OTHERS = ("thesis.txt", "other-model.safetensors", "m-00001-of-00002.safetensors")


def _folder(path: Path) -> dict[str, bytes]:
    """Every entry of a folder and its content; links by their target."""
    return {
        str(one.relative_to(path)): os.readlink(one).encode()
        if one.is_symlink()
        else (one.read_bytes() if one.is_file() else b"")
        for one in path.rglob("*")
    }


def _lost(before: dict[str, bytes], path: Path) -> set[str]:
    after = _folder(path)
    return {name for name, held in before.items() if after.get(name) != held}


def _list(*names: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": dict(zip("abcdef", names))}).encode()  # noqa: B905


def _sealed(target: Path, *names: str) -> bytes:
    return journal.content(target, [target.with_name(name) for name in names])


JOURNALS: dict[str, Callable[[Path], tuple[Path, bytes]]] = {
    "of_another_program": lambda target: (
        target.with_name(f".{target.name}.0123456789abcdef.tmp"),
        _list(*OTHERS),
    ),
    "with_our_digest": lambda target: (
        target.with_name(f".{target.name}.0123456789abcdef.tmp"),
        _sealed(target, *OTHERS),
    ),
    "with_our_name_and_digest": lambda target: (
        temporaries.fresh(target),
        _sealed(target, *OTHERS),
    ),
    "with_paths": lambda target: (
        temporaries.fresh(target),
        _sealed(target, "m-0123456789ab-00001-of-00001.safetensors") + b"",
    ),
    "altered": lambda target: (
        temporaries.fresh(target),
        _sealed(target, OTHERS[0]).replace(b"thesis", b"theses"),
    ),
    "of_another_target": lambda target: (
        temporaries.fresh(target),
        _sealed(target.with_name("n.safetensors.index.json"), *OTHERS),
    ),
}


@pytest.mark.parametrize("resume", [None, "this"])
@pytest.mark.parametrize("kind", JOURNALS)
def test_a_list_of_files_of_others_is_followed_by_nobody(
    kind: str, resume: str | None, tmp_path: Path
) -> None:
    for name in OTHERS:
        (tmp_path / name).write_bytes(name.encode())
    target = tmp_path / INDEX
    path, content = JOURNALS[kind](target)
    path.write_bytes(content)
    before = _folder(tmp_path)
    done = checkpoint.write(target, TENSORS, shard_size=SHARD, resume=resume)
    if kind != "with_paths":
        assert not _lost(before, tmp_path)
        assert any(path.name in note for note in done.notes)
    assert not _lost({name: name.encode() for name in OTHERS}, tmp_path)


def test_the_source_of_a_conversion_is_not_cleaned_up(tmp_path: Path) -> None:
    import torch

    source, target = tmp_path / "model.safetensors", tmp_path / "flax.safetensors.index.json"
    state = torch.nn.MultiheadAttention(8, 2).state_dict()
    checkpoint.write(source, {name: array.numpy() for name, array in state.items()})
    names = ["thesis.txt", "other-model.safetensors"]
    for name in names:
        (tmp_path / name).write_text("mine")
    stray = tmp_path / f".{target.name}.0123456789abcdef.tmp"
    stray.write_bytes(_list(*names, source.name))
    before = _folder(tmp_path)
    done = pipeline.convert(source, target, to="flax", num_heads=2)
    assert not _lost(before, tmp_path)
    assert any(stray.name in note for note in done.notes)


@needs_locks
def test_shards_in_use_are_not_cleaned_up(tmp_path: Path) -> None:
    """A list written here names them: one in use here, one of another index, one being read."""
    target = tmp_path / INDEX
    first = checkpoint.write(target, TENSORS, shard_size=SHARD)
    copy = tmp_path / "copy.safetensors.index.json"
    copy.write_bytes(target.read_bytes())
    shards = [file.name for file in first.files[:-1]]
    read = tmp_path / "m-0123456789ab-00001-of-00001.safetensors"
    checkpoint.write(read, TENSORS)
    temporaries.fresh(target).write_bytes(_sealed(target, *shards, read.name))
    before = _folder(tmp_path)
    with checkpoint.open(read) as file:
        checkpoint.write(target, file, force=True)
    lost = _lost(before, tmp_path) - {INDEX}
    assert [name.endswith(".tmp") for name in lost] == [True]  # the list itself was ours


def _strange(kind: str, path: Path, source: Path) -> None:
    if kind == "folder":
        path.mkdir()
        (path / "thesis.txt").write_text("mine")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(source)
    elif kind == "second_name_of_the_source":
        os.link(source, path)
    elif kind == "second_name":
        (path.parent / "mine").write_text("mine")
        os.link(path.parent / "mine", path)
    else:
        path.write_text("mine")


@pytest.mark.parametrize("name", ["m.npz", INDEX, "m.orbax"])
@pytest.mark.parametrize(
    "kind", ["folder", "fifo", "link", "second_name_of_the_source", "second_name", "unproven"]
)
def test_temporaries_of_others_stay(kind: str, name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source.npz", tmp_path / name
    checkpoint.write(source, TENSORS)
    named = target.with_name(f".{name}.0123456789abcdef.tmp")
    path = named if kind == "unproven" else temporaries.fresh(target)
    _strange(kind, path, source)
    before = _folder(tmp_path)
    with checkpoint.open(source) as file:
        done = checkpoint.write(target, file)
    assert not _lost(before, tmp_path)
    assert os.path.lexists(path)
    assert any(path.name in note for note in done.notes)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_temporaries_of_another_user_stay(tmp_path: Path) -> None:
    path = temporaries.fresh(tmp_path / "m.npz")
    path.write_text("theirs")
    os.chown(path, 12345, -1)
    done = checkpoint.write(tmp_path / "m.npz", TENSORS)
    assert path.exists()
    assert "another user" in done.notes[0]


def test_a_folder_in_place_of_a_temporary_is_not_unlinked(tmp_path: Path) -> None:
    """A name that was given to another file meanwhile is that file's."""
    target = tmp_path / "m.npz"

    def emit(file: Any) -> None:
        (path,) = tmp_path.glob(".*.tmp")
        path.unlink()
        path.write_text("mine")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic.replace(target, emit, lambda path: None, force=False)
    assert [one.read_text() for one in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("other", ["thesis.txt", "d/thesis.txt", "mine/", "a/0.0", "link"])
def test_a_folder_that_holds_more_is_not_replaced(other: str, tmp_path: Path) -> None:
    target = tmp_path / "m.orbax"
    checkpoint.write(target, TENSORS)
    place = target / other
    if other == "link":
        place.symlink_to(tmp_path)
    elif other.endswith("/"):
        place.mkdir()
    else:
        place.parent.mkdir(exist_ok=True)
        place.write_text("mine")
    before = _folder(tmp_path)
    with pytest.raises(checkpoint.DestinationExists, match="no part of an orbax checkpoint"):
        checkpoint.write(target, {"w": np.ones(3)}, force=True)
    assert _folder(tmp_path) == before


def test_a_file_that_comes_into_the_folder_meanwhile_stays(tmp_path: Path) -> None:
    target = tmp_path / "m.orbax"
    checkpoint.write(target, TENSORS)
    with pytest.raises(checkpoint.DestinationExists, match="meanwhile"):
        checkpoint.write(
            target,
            {"w": np.ones(3)},
            force=True,
            progress=lambda *_: (target / "thesis.txt").write_text("mine"),  # type: ignore[arg-type]
        )
    assert (target / "thesis.txt").read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir()] == [target.name]


@pytest.mark.parametrize("ocdbt", [True, False])
def test_folders_of_orbax_itself_are_replaced(ocdbt: bool, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    target = tmp_path / "m.orbax"
    tree = {"a": {"w": np.ones((4, 5))}, "b": np.zeros(())}
    ocp.PyTreeCheckpointer(use_ocdbt=ocdbt).save(target, tree)
    checkpoint.write(target, {"w": np.ones(3)}, force=True)
    assert [one.name for one in tmp_path.iterdir()] == [target.name]


@needs_locks
def test_a_killed_exchange_is_cleaned_up_but_for_other_files(tmp_path: Path) -> None:
    target = tmp_path / "m.orbax"
    checkpoint.write(target, TENSORS)
    stale, mixed = temporaries.fresh(target), temporaries.fresh(target)
    for path in (stale, mixed):
        os.rename(target, path)
        checkpoint.write(target, TENSORS) if path == stale else None
    (mixed / "thesis.txt").write_text("mine")
    done = checkpoint.write(target, TENSORS)
    assert not stale.exists()
    assert (mixed / "thesis.txt").read_text() == "mine"
    assert any(mixed.name in note for note in done.notes)


def test_an_old_index_gives_up_only_its_own_shards(tmp_path: Path) -> None:
    target = tmp_path / INDEX
    first = checkpoint.write(target, TENSORS, shard_size=SHARD)
    index = json.loads(target.read_text())
    plain = tmp_path / "m-00001-of-00001.safetensors"
    linked = tmp_path / "m-0123456789ab-00001-of-00001.safetensors"
    checkpoint.write(plain, {"mine": np.ones(3)})
    linked.symlink_to(plain)
    index["weight_map"] |= {"x": plain.name, "y": linked.name, "z": "../thesis.txt"}
    target.write_text(json.dumps(index))
    second = checkpoint.write(target, {"w": np.ones(5)}, force=True)
    assert {*second.files, plain, linked} == set(tmp_path.iterdir())
    assert not {*first.files[:-1]} & {*tmp_path.iterdir()}


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_nothing_is_written_through_the_name_of_a_shard(kind: str, tmp_path: Path) -> None:
    target, mine = tmp_path / INDEX, tmp_path / "thesis.txt"
    settings: dict[str, Any] = {"shard_size": SHARD, "resume": "this"}
    (tmp_path / "elsewhere").mkdir()
    shard = checkpoint.write(tmp_path / "elsewhere" / INDEX, TENSORS, **settings).files[1].name
    mine.write_text("mine")
    _strange(kind, tmp_path / shard, mine)
    before = _folder(tmp_path)
    with pytest.raises(checkpoint.DestinationExists, match="not a file of this user"):
        checkpoint.write(target, TENSORS, **settings)
    assert _folder(tmp_path) == before


def test_two_long_names_have_temporaries_of_their_own(tmp_path: Path) -> None:
    names = [f"{'a' * 120}{i}.safetensors.index.json" for i in range(2)]
    other = temporaries.fresh(tmp_path / names[1])
    other.write_text("")
    done = checkpoint.write(tmp_path / names[0], TENSORS, shard_size=SHARD)
    assert other.exists()
    with checkpoint.open(done.path) as file:
        assert list(file) == list(TENSORS)


def test_a_file_cut_within_its_header_is_to_be_copied_again(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    checkpoint.write(path, {"a": np.ones(3, np.float32)})
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(
        checkpoint.MalformedFile, match=r"leaves the file.*cut short: copy it again"
    ):
        checkpoint.open(path)
