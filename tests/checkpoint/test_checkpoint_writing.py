"""Writing is all or nothing: the target is the old file or the complete new one."""

import errno
import os
import resource
import stat
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint import atomic, temporaries
from jaxmha.checkpoint.formats import orbax_parts
from jaxmha.checkpoint.tensor import blocks
from tests.checkpoint.locks import needs_locks

SUFFIXES = (".safetensors", ".pt", ".weights.h5", ".npz")
OLD = b"the old content"
TENSORS: dict[str, np.ndarray] = {
    "a/w": np.arange(600, dtype=np.float32).reshape(20, 30),
    "b": np.arange(5),
}


@pytest.fixture(params=SUFFIXES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file that a refused or failed write must leave alone."""
    path = tmp_path / f"m{request.param}"
    path.write_bytes(OLD)
    path.chmod(0o640)
    yield path
    left = [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")]
    assert left == []


def _untouched(path: Path) -> bool:
    return path.read_bytes() == OLD and stat.S_IMODE(path.stat().st_mode) == 0o640


def test_existing_target_is_refused_unless_forced(target: Path) -> None:
    with pytest.raises(checkpoint.DestinationExists, match=r"m\.\w+"):
        checkpoint.write(target, TENSORS)
    assert _untouched(target)
    checkpoint.write(target, TENSORS, force=True)
    with checkpoint.open(target) as file:
        assert file["a/w"].tolist() == TENSORS["a/w"].tolist()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640  # of the replaced file


def test_new_files_follow_the_umask(target: Path) -> None:
    target.unlink()
    old = os.umask(0o027)
    try:
        checkpoint.write(target, TENSORS)
    finally:
        os.umask(old)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["fsync", "replace", "fchmod"])
def test_failing_system_calls(name: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(checkpoint.WriteFailed, match="Input/output error"):
        checkpoint.write(target, TENSORS, force=True)
    monkeypatch.undo()
    assert _untouched(target)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_tensor_is_held_at_a_time(suffix: str, tmp_path: Path) -> None:
    """While writing and while reading back; tensors are given as they are, or transposed."""
    size = 8 << 20
    info = {f"a/{i}": checkpoint.TensorInfo((1024, 2048), np.dtype(np.float32)) for i in range(4)}

    def load(name: str) -> np.ndarray:
        made = np.full((1024, 2048), 0.5, np.float32)
        return made if int(name[-1]) % 2 else made.reshape(2048, 1024).T

    tracemalloc.start()
    try:
        checkpoint.write(tmp_path / f"m{suffix}", checkpoint.Lazy(info, load))
        assert tracemalloc.get_traced_memory()[1] < size + (5 << 20)
    finally:
        tracemalloc.stop()


def test_a_write_that_reads_back_differently_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(path: Path) -> None:
        with path.open("r+b") as file:
            at = path.read_bytes().index(TENSORS["a/w"].tobytes())
            file.seek(at + 5)
            file.write(b"\x99")

    def replace(target: Path, emit: Any, verify: Any, **settings: Any) -> None:
        def after_damage(path: Path) -> None:
            damaged(path)
            verify(path)

        real(target, emit, after_damage, **settings)

    real = atomic.replace
    monkeypatch.setattr(atomic, "replace", replace)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.write(target, TENSORS, force=True)
    monkeypatch.undo()
    assert _untouched(target)


@pytest.mark.parametrize("room", [0, 10, 1000, 2500])
def test_no_room(room: int, target: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
    try:
        with pytest.raises(checkpoint.WriteFailed, match=r"m\.\w+"):
            checkpoint.write(target, TENSORS, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert _untouched(target)


def test_interruption_leaves_nothing(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write(target, TENSORS, force=True)
    monkeypatch.undo()
    assert _untouched(target)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"w": np.array(["text"])}, checkpoint.UnsupportedDtype),
        ({"w": np.array([object()])}, checkpoint.UnsupportedDtype),
        ({"w": np.zeros(2, "V2")}, checkpoint.UnsupportedDtype),
        ({"w": np.zeros(2, np.longdouble)}, checkpoint.UnsupportedDtype),
        ({"../w": np.ones(2)}, checkpoint.PathEscape),
        ({"/w": np.ones(2)}, checkpoint.PathEscape),
        ({"a\0b": np.ones(2)}, checkpoint.MalformedFile),
        ({"\ud800": np.ones(2)}, checkpoint.MalformedFile),
        ({"": np.ones(2)}, checkpoint.MalformedFile),
        ({"w" * 2000: np.ones(2)}, checkpoint.BudgetExceeded),
    ],
)
def test_what_no_format_can_hold(tensors: Any, error: Any, target: Path) -> None:
    with pytest.raises(error, match=r"m\.\w+") as caught:
        checkpoint.write(target, tensors, force=True)
    assert type(caught.value) is error
    assert _untouched(target)


def test_the_source_is_never_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "m.npz", tmp_path / "link.npz"
    checkpoint.write(path, TENSORS)
    os.link(path, link)
    before = path.read_bytes()
    with checkpoint.open(path) as file:
        for name in (path, link):
            with pytest.raises(checkpoint.DestinationExists, match="being read"):
                checkpoint.write(name, file, force=True)
            with pytest.raises(checkpoint.DestinationExists, match="being read"):
                checkpoint.write(name, TENSORS, force=True, source=path)
    assert path.read_bytes() == before


def test_a_folder_that_is_read_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "m.orbax"
    checkpoint.write(folder, TENSORS)
    inside = folder / "new.npz"
    before = sorted(folder.rglob("*"))
    with checkpoint.open(folder) as file:
        with pytest.raises(checkpoint.DestinationExists, match="inside the folder"):
            checkpoint.write(inside, file)
        assert sorted(folder.rglob("*")) == before
    np.savez(inside, w=np.ones(2))
    with (
        checkpoint.open(inside) as file,
        pytest.raises(checkpoint.DestinationExists, match="holds the file being read"),
    ):
        checkpoint.write(folder, file, force=True)
    assert sorted(folder.rglob("*")) == sorted([*before, inside])


def test_links_typed_by_the_user_stay_links(tmp_path: Path) -> None:
    real, link = tmp_path / "real.npz", tmp_path / "link.npz"
    checkpoint.write(real, {"w": np.zeros(2)})
    link.symlink_to(real)
    checkpoint.write(link, {"w": np.ones(2)}, force=True)
    assert link.is_symlink()
    with checkpoint.open(real) as file:
        assert file["w"].tolist() == [1, 1]
    real.unlink()
    with pytest.raises(checkpoint.DestinationExists, match="dangling"):
        checkpoint.write(link, TENSORS, force=True)


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "d.npz").mkdir()
    for force in (False, True):
        with pytest.raises(checkpoint.DestinationExists, match="not a regular file"):
            checkpoint.write(tmp_path / "d.npz", TENSORS, force=force)
        with pytest.raises(checkpoint.WriteFailed, match="No such file"):
            checkpoint.write(tmp_path / "nowhere" / "m.npz", TENSORS, force=force)
        with pytest.raises(checkpoint.UnsupportedFormat, match=r"\.safetensors"):
            checkpoint.write(tmp_path / "m.txt", TENSORS, force=force)
        with pytest.raises(checkpoint.WriteFailed):
            checkpoint.write(tmp_path / "a\0b.npz", TENSORS, force=force)
    assert [p.name for p in tmp_path.iterdir()] == ["d.npz"]


def test_what_a_format_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.UnsupportedFormat, match="metadata"):
        checkpoint.write(tmp_path / "m.weights.h5", TENSORS, metadata={"a": "b"})
    with pytest.raises(checkpoint.UnsupportedFormat, match="names"):
        checkpoint.write(tmp_path / "m.npz", TENSORS, names={"a": "b"})
    with pytest.raises(checkpoint.AmbiguousFile, match="group"):
        checkpoint.write(tmp_path / "m.weights.h5", {"a": np.ones(2), "a/b": np.ones(2)})
    with pytest.raises(checkpoint.AmbiguousFile, match="reserved"):
        checkpoint.write(tmp_path / "m.safetensors", {"__metadata__": np.ones(2)})
    assert not list(tmp_path.iterdir())


@needs_locks
@pytest.mark.parametrize("name", ["m.npz", "m.orbax"])
@pytest.mark.parametrize("removes", [True, False])
def test_another_writer_may_come_before_the_lock(
    name: str, removes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a temporary that is not locked yet for a stale one, and removes or holds it."""
    import fcntl

    real, held = fcntl.flock, list[int]()
    parts = orbax_parts.of if name == "m.orbax" else None

    def late(fd: int, how: int) -> None:
        if not held:
            (path,) = tmp_path.glob(".*.tmp")
            held.append(os.open(path, os.O_RDONLY))
            if removes:
                assert temporaries.clean(tmp_path / name, parts=parts) == [path]
            else:
                real(held[0], fcntl.LOCK_EX)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    checkpoint.write(tmp_path / name, TENSORS)
    os.close(held[0])
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_that_comes_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.orbax"

    def comes(*_: int) -> None:
        if not path.exists():
            checkpoint.write(path, {"w": np.zeros(3)})

    with pytest.raises(checkpoint.DestinationExists, match="meanwhile"):
        checkpoint.write(path, {"w": np.ones(3)}, progress=comes)
    with checkpoint.open(path) as file:
        assert file["w"].tolist() == [0, 0, 0]
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@needs_locks
def test_only_stale_temporaries_are_removed(tmp_path: Path) -> None:
    import fcntl

    stale, alive = (temporaries.fresh(tmp_path / "m.npz") for _ in range(2))
    others = [tmp_path / f".n.npz.{'0' * 16}.tmp", tmp_path / ".m.npz.user.tmp"]
    for path in (stale, alive, *others):
        path.touch()
    with alive.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        checkpoint.write(tmp_path / "m.npz", TENSORS)
    assert not stale.exists()
    assert all(path.exists() for path in (alive, *others))


def test_a_faster_writer_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.npz"
    real = atomic.put

    def late(temporary: Path, target: Path, force: bool) -> None:
        target.write_bytes(OLD)
        real(temporary, target, force)

    monkeypatch.setattr(atomic, "put", late)
    with pytest.raises(checkpoint.DestinationExists):
        checkpoint.write(path, TENSORS)
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shape", [(20000, 2, 3), (512, 32, 8, 3), (3, 300, 301), (2, 1, 700, 3)])
def test_swapped_axes_are_copied_in_c_order(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape).swapaxes(-1, -2)
    made = np.concatenate(list(blocks(array)))
    np.testing.assert_array_equal(made, array.reshape(-1))


def test_texts_that_are_no_utf_8_are_refused(tmp_path: Path) -> None:
    state = {"w": np.ones(3)}
    with pytest.raises(checkpoint.UnsupportedFormat, match="metadata hold surrogates"):
        checkpoint.write(tmp_path / "a.safetensors", state, metadata={"a": "\ud800"})
    name = os.fsdecode(b"\xff.safetensors.index.json")
    with pytest.raises(checkpoint.UnsupportedFormat, match="is not UTF-8"):
        checkpoint.write(tmp_path / name, state)
    assert not list(tmp_path.iterdir())
    checkpoint.write(tmp_path / "m.orbax", state)
    named = tmp_path / os.fsdecode(b"\xff.orbax")
    with pytest.raises(checkpoint.UnsupportedFormat, match="is not UTF-8"):
        checkpoint.write(named, state)
    (tmp_path / "m.orbax").rename(named)
    with pytest.raises(checkpoint.UnsupportedFormat, match="is not UTF-8"):
        checkpoint.open(named)
    assert list(tmp_path.iterdir()) == [named]


@pytest.mark.parametrize("suffix", [".safetensors", ".weights.h5", ".orbax", ".npz"])
def test_parts_are_asked_for_as_tensors_are(suffix: str, tmp_path: Path) -> None:
    whole = np.arange(15.0).reshape(3, 5)
    checkpoint.write(tmp_path / f"m{suffix}", {"g/vars/0": whole})
    with checkpoint.open(tmp_path / f"m{suffix}") as file:
        for box in ((slice(-2, None),), (slice(0, 99), slice(1, 4)), ()):
            np.testing.assert_array_equal(file.part("g/vars/0", box), whole[box])
        for call in (
            file.view,
            lambda name: file.part(name, ()),
            lambda name: file.recompute(name, "sha256"),
        ):
            with pytest.raises(checkpoint.UnknownTensor, match="has no tensor 'no'"):
                call("no")
        with pytest.raises(IndexError, match="up to 2 slices of step 1"):
            file.part("g/vars/0", (slice(None),) * 3)
    with pytest.raises(checkpoint.UnreadableFile, match="is closed"):
        file.part("g/vars/0", ())
