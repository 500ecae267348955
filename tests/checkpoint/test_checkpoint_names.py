"""A name is written and read back as it is, or refused before anything is created."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmha import checkpoint
from jaxmha.checkpoint import reader, settling, writer

SUFFIXES = (
    *(".safetensors", ".pt", ".weights.h5", ".npz", ".orbax"),
    *(".safetensors.index.json", ".bin.index.json"),
)
NASTY = (
    *("a\\b", "a//b", "a/", "/a", "a/./b", "a/../b", ".", "..", "", "a/.", "a\0b", "\ud800"),
    *("CON", "C:/a", "C:\\a", "w.npy", "config.json", "archive/data.pkl", "__metadata__"),
    *("a" * 256, "a" * 1025, "/".join("a" * 70), "vars/0", "vars/1", "x/vars/00", "x/vars/\u0663"),
    *("layer_names", "model_config/w", ".zarray", "a/.zarray", "d", "_METADATA", "a.b", "A",
        "\x85"),
    *("[link=http://evil]x[/link]", "a b", "\u202e", "\u00e9", "e\u0301", "%2e%2e", "x/\\y",
        "data"),
)  # fmt: skip
GROUPS = (
    ("a", "a/b"), ("a", "a/b/c"), ("a/b", "a.b"), ("a", "A"), ("\u00e9", "e\u0301"),
    ("x/vars/0", "x/vars/00"), ("x/vars/0", "x/vars/2"), ("x/vars/0", "x/vars/0/w"),
)  # fmt: skip


def _written_or_refused(path: Path, tensors: dict[str, np.ndarray], **settings: Any) -> bool:
    refused: checkpoint.CheckpointError | None = None
    try:
        checkpoint.write(path, tensors, **settings)
    except checkpoint.CheckpointError as error:
        refused = error
    if refused is not None:
        assert not isinstance(refused, checkpoint.WriteFailed), refused
        assert ".tmp" not in str(refused)
        assert not list(path.parent.iterdir())
        return False
    with checkpoint.open(path) as file:
        assert file.info.keys() == tensors.keys()
        for name, array in tensors.items():
            assert (file[name].dtype, file[name].shape) == (array.dtype, array.shape)
            assert file[name].tobytes() == array.tobytes()
    return True


def _tensors(*names: str) -> dict[str, np.ndarray]:
    return {name: np.arange(i + 1, dtype=np.float32) for i, name in enumerate(names)}


@pytest.mark.parametrize(
    "suffix",
    [pytest.param(s, marks=pytest.mark.slow if s.endswith(".json") else ()) for s in SUFFIXES],
)
def test_nasty_names(suffix: str, tmp_path: Path) -> None:
    held = 0
    for number, names in enumerate([*((name,) for name in NASTY), *GROUPS]):
        (tmp_path / str(number)).mkdir()
        held += _written_or_refused(tmp_path / str(number) / f"m{suffix}", _tensors(*names))
    assert 10 < held < len(NASTY) + len(GROUPS)


def test_names_that_numpy_confuses(tmp_path: Path) -> None:
    """numpy.load looks a name up among the members of the zip first: "w.npy" would be "w"."""
    one = tmp_path / "one.npz"
    assert _written_or_refused(one, _tensors("w.npy"))
    with np.load(one) as file:
        assert file["w.npy"].shape == (1,)
    (tmp_path / "two").mkdir()
    with pytest.raises(checkpoint.AmbiguousFile, match=r"numpy\.load would read 'w' for it"):
        checkpoint.write(tmp_path / "two" / "m.npz", _tensors("w", "w.npy"))
    assert not list((tmp_path / "two").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_random_names(suffix: str, tmp_path: Path) -> None:
    folders = itertools.count()
    piece = st.sampled_from([*"aAé.\\/:%0\0", "..", "vars", "0", "1", "\ud800", "\x7f", "a" * 130])
    name = st.lists(piece, max_size=6).map("".join) | st.text(max_size=20) | st.sampled_from(NASTY)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(name, min_size=1, max_size=4, unique=True))
    def check(names: list[str]) -> None:
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        _written_or_refused(folder / f"m{suffix}", _tensors(*names))

    check()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("m.safetensors.index.json", {"metadata": {"total_size": "3"}}),
        ("m.bin.index.json", {"metadata": {"a": "b"}}),
        ("a:b.safetensors.index.json", {}),
        (".hidden.safetensors.index.json", {}),
        ("con.safetensors.index.json", {}),
        (f"{'a' * 220}.safetensors.index.json", {}),
        ("m.orbax-checkpoint-tmp.orbax", {}),
        ("m.weights.h5", {"names": {"w": "layer"}}),
        ("m.weights.h5", {"names": {"x": ""}}),
        ("m.weights.h5", {"names": {"x": "a/../b"}}),
        ("m.weights.h5", {"names": {"x//y": "layer"}}),
    ],
)
def test_other_destinations_cannot_be_read_back(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    _written_or_refused(tmp_path / name, _tensors("w"), **settings)


@pytest.mark.slow
def test_more_tensors_than_are_read_are_refused(tmp_path: Path) -> None:
    tensors = {f"w{i}": np.zeros(1, np.uint8) for i in range(30_000)}
    with pytest.raises(checkpoint.UnsupportedFormat, match="30000 tensors are more"):
        checkpoint.write(tmp_path / "m.pt", tensors)
    assert not list(tmp_path.iterdir())


def test_more_shards_than_are_read_are_refused(tmp_path: Path) -> None:
    few = {f"w{i}": np.zeros(1, np.uint8) for i in range(501)}
    with pytest.raises(checkpoint.UnsupportedFormat, match="501 shards, and at most 500"):
        checkpoint.write(tmp_path / "m.safetensors.index.json", few, shard_size=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_disk_is_asked(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is durable, and forgotten by the system, before it is read back."""
    calls: list[tuple[str, str]] = []

    def watched(name: str, real: Any, path: Any = None) -> Any:
        def call(fd: Any, *args: Any, **named: Any) -> Any:
            where = os.path.realpath(f"/proc/self/fd/{fd}" if isinstance(fd, int) else fd)
            calls.append((name, where))
            return real(fd, *args, **named)

        return call

    tensors = {"w": np.random.default_rng(0).random(200_000)}
    for name in ("fsync", "posix_fadvise", "preadv"):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    checkpoint.write(tmp_path / f"m{suffix}", tensors)
    read = [where for name, where in calls if name == "preadv" and where.endswith(".tmp")]
    synced = {where for name, where in calls if name == "fsync"}
    assert {where for name, where in calls if name == "posix_fadvise"} <= synced
    for where in read:
        first = calls.index(("preadv", where))
        assert calls.index(("fsync", where)) < calls.index(("posix_fadvise", where)) < first
    assert read or suffix in (".weights.h5", ".orbax")  # these are read by libraries


def test_what_was_dropped_is_read_again_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranges are dropped before the first is read, so that none is read from the cache."""
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *args: asked.append(args))
    with open(tmp_path / "large", "w+b") as file:
        file.truncate(40 << 20)
        settling.settle(file.fileno())
    half = len(asked) // 2
    assert {advice for *_, advice in asked[:half]} == {os.POSIX_FADV_DONTNEED}
    assert {advice for *_, advice in asked[half:]} == {os.POSIX_FADV_WILLNEED}
    assert [where for *where, _ in asked[:half]] == [where for *where, _ in asked[half:]]
    assert [at >> 20 for at, *_ in asked[:half]] == [0, 16, 32, 39]


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt", ".orbax", ".bin.index.json"])
def test_a_disk_that_lies_is_named_with_the_target(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def lies(fd: int, buffers: Any, offset: int) -> int:
        count = real(fd, buffers, offset)
        if count > 100:
            memoryview(buffers[0]).cast("B")[count // 2] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", lies)
    with pytest.raises(checkpoint.WriteFailed, match="does not read back") as caught:
        checkpoint.write(tmp_path / f"m{suffix}", {"w": np.arange(5000.0)})
    text = str(caught.value)
    assert str(tmp_path / "m") in text
    assert ".tmp" not in text
    assert "write it again" not in text
    assert not list(tmp_path.iterdir())
    left = [fd.resolve().parent for fd in Path("/proc/self/fd").glob("*")]
    # tensorstore closes files in threads of its own.
    assert suffix == ".orbax" or tmp_path not in left


@pytest.mark.slow
def test_an_index_larger_than_readers_allow_is_refused_before_the_first_shard(
    tmp_path: Path,
) -> None:
    one = np.zeros((), np.uint8)
    path = tmp_path / "m.safetensors.index.json"
    tensors = {f"{i:05}" + "x" * 1000: one for i in range(66_000)}
    with pytest.raises(checkpoint.UnsupportedFormat, match="the index would have"):
        checkpoint.write(path, tensors, shard_size=300_000, digest=None)
    assert not list(tmp_path.iterdir())


def test_more_tensors_than_keras_files_are_read_with_are_refused(tmp_path: Path) -> None:
    """Groups count as well: these are 80,000, which are checked in less time than as many tensors."""
    deep = "/g" * 40
    tensors = {f"d{i}{deep}/vars/0": np.zeros((), np.uint8) for i in range(1_900)}
    with pytest.raises(checkpoint.UnsupportedFormat, match="1900 tensors are more than a"):
        checkpoint.write(tmp_path / "m.weights.h5", tensors)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "n" * 1024])
@pytest.mark.parametrize("form", ["d{}/vars/0", "d/vars/{}", "a/b/c/d{}/vars/0"])
def test_keras_files_take_no_more_steps_than_the_writer_counts(
    form: str, name: str, tmp_path: Path
) -> None:
    """Otherwise a file is written whole, and refused when it is read back."""
    from jaxmha.checkpoint.formats import keras_h5

    tensors = {form.format(i): np.zeros((), np.uint8) for i in range(40)}
    groups = {key.rpartition("/vars")[0]: name for key in tensors} if name else {}
    above = {key[:n] for key in tensors for n in range(len(key)) if key[n] == "/"} | {""}
    counted = keras_h5._STEPS * (len(tensors) + len(above)) + len(name) * len(groups)
    path = tmp_path / "m.weights.h5"
    checkpoint.write(path, tensors, names=groups)
    with checkpoint.open(path, limits=checkpoint.Limits(steps=counted)) as file:
        assert len(file) == 40


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt", ".orbax", ".weights.h5"])
@pytest.mark.everyday(damaged=[0, 3])  # each is read by another thread
@pytest.mark.parametrize("damaged", range(5))
def test_two_threads_read_back_every_tensor(
    damaged: int, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They find one wrong digest and count all bytes; here every file is large enough for two."""
    monkeypatch.setattr(writer, "_LARGE", 0)
    names, counts = [f"{i}/vars/0" for i in range(5)], list[tuple[int, int]]()
    tensors = {name: np.full((300, 11), i) for i, name in enumerate(names)}

    def progress(done: int, total: int) -> None:
        counts.append((done, total))

    checkpoint.write(tmp_path / f"good{suffix}", tensors, progress=progress)
    assert counts[-1][0] == counts[-1][1] == 2 * sum(x.nbytes for x in tensors.values())
    assert counts == sorted(counts)
    real = reader.Checkpoint.recompute

    def wrong(self: reader.Checkpoint, name: str, *others: Any) -> str:
        return real(self, name, *others) + "0" * (name == names[damaged])

    monkeypatch.setattr(reader.Checkpoint, "recompute", wrong)
    with pytest.raises(checkpoint.WriteFailed, match="does not read back"):
        checkpoint.write(tmp_path / f"bad{suffix}", tensors)
    assert [path.name for path in tmp_path.iterdir()] == [f"good{suffix}"]


@pytest.mark.parametrize("path", ["", "https://example.org/model.npz", "s3://a/b"])
def test_paths_that_are_none_are_refused(path: str) -> None:
    with pytest.raises(checkpoint.UnreadableFile, match=r"is empty|hf://ORGANISATION/MODEL"):
        checkpoint.open(path)
