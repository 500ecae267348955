"""Every hostile file is refused with the right error, quickly, and without reading too much."""

import contextlib
import time
import tracemalloc
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from jaxmha import checkpoint
from tests import pace
from tests.checkpoint import hostile
from tests.rewrite import rewrite

SECONDS = 1.0
SECONDS_PER_BYTE = 1e-6  # the opcode of a pickle is one byte


def _read_all(path: Path) -> None:
    with checkpoint.open(path) as file:
        for name in file:
            _ = file[name]


def _refused(path: Path) -> tuple[checkpoint.CheckpointError, float]:
    """The error, and seconds of this process: other work on the machine does not count."""
    start = time.process_time()
    with pytest.raises(checkpoint.CheckpointError) as caught:
        _read_all(path)
    return caught.value, time.process_time() - start


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("name", hostile.SOUND)
def test_sound_file_is_accepted(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{hostile.SOUND[name].suffix}"
    hostile.SOUND[name].build(path)
    with checkpoint.open(path) as file:
        (key,) = file
        assert file[key].tolist() == [[0, 1, 2], [3, 4, 5]]


# Cases that take long, for each of which there is a quick one.
LARGE = (
    "pickle_shared_dict_of_many_numbers",
    "st_tensors_of_no_byte_by_the_hundred_thousand",
    "h5_empty_blocks_of_many_names",
    "folder_of_100_000_files",
    "zip_directory_larger_than_its_file_may_build",
    "pickle_many_*",
    "gguf_many_*",
    "*_overhanging_*",
    "torch_sparse_views_of_[ct]*",
    "pickle_keys_*of_one_hash",
    "npz_inflates_to_more_than_the_watch",
    "h5_inflates_in_many_chunks",
    "pickle_long_shape_of_many_tensors",
    # Every text is parsed as one kind of document, and two texts as each of the others.
    "json_texts_in_header",
    "json_keys_in_header",
    "json_pairs_in_header",
    "json_[!nw]*_in_[itz]*",
    "json_numbers_in_[itz]*",
)


SLOW = [name for name in hostile.CASES if any(fnmatchcase(name, glob) for glob in LARGE)]
QUICK = sorted(set(hostile.CASES) - set(SLOW))
KINDS = {kind: list(names) for kind, names in groupby(QUICK, lambda name: name.split("_")[0])}


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files_are_refused(kind: str, tmp_path: Path) -> None:
    """Many in one test: pytest takes as long for a test as most of them do."""
    for name in KINDS[kind]:
        (tmp_path / name).mkdir()
        try:
            _assert_refused(name, tmp_path / name)
        except BaseException as failure:
            failure.add_note(f"case: {name}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_large_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    _assert_refused(name, tmp_path)


def _assert_refused(name: str, folder: Path) -> None:
    case = hostile.CASES[name]
    path = folder / f"m{case.suffix}"
    case.build(path)
    before = sorted(folder.rglob("*"))
    size = sum(file.stat().st_size for file in _files(path))
    limit = SECONDS + SECONDS_PER_BYTE * size
    tracemalloc.start()
    try:
        caught, seconds = _refused(path)
        allocated = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if seconds >= limit:  # tracing takes time as well
        seconds = _refused(path)[1]
    assert type(caught) is case.error, str(caught)
    assert str(path) in str(caught) or caught.path in hostile.files(path)[1:]
    assert caught.remedy
    assert "\n" not in str(caught)
    assert pace.within(seconds, limit)
    assert allocated < (64 << 20) + 2 * size
    assert sorted(folder.rglob("*")) == before
    assert not Path("/tmp/jaxmha-was-run").exists()


def test_files_of_a_folder_are_counted_while_they_are_listed(tmp_path: Path) -> None:
    hostile.SOUND["sound_orbax_of_files"].build(tmp_path / "m.orbax")
    for i in range(30):
        (tmp_path / "m.orbax" / f"{i}").mkdir()
    with pytest.raises(checkpoint.BudgetExceeded, match="the number of files is 21"):
        checkpoint.open(tmp_path / "m.orbax", limits=checkpoint.Limits(files=20))


def test_files_next_to_a_checkpoint_are_counted_while_they_are_listed(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "a.npz", {"w": np.ones(3)})
    for i in range(30):
        (tmp_path / f"{i}.txt").touch()
    with pytest.raises(checkpoint.BudgetExceeded, match="the number of files is 21"):
        checkpoint.open(tmp_path, limits=checkpoint.Limits(files=20))
    assert list(checkpoint.open(tmp_path)) == ["w"]


def test_cases_are_many_enough() -> None:
    assert len(QUICK) >= 800
    assert all(any(fnmatchcase(name, glob) for name in hostile.CASES) for glob in LARGE)
    assert {case.error for case in hostile.CASES.values()} >= {
        checkpoint.AmbiguousFile,
        checkpoint.BudgetExceeded,
        checkpoint.ForbiddenContent,
        checkpoint.IncompleteCheckpoint,
        checkpoint.IntegrityError,
        checkpoint.MalformedFile,
        checkpoint.PathEscape,
        checkpoint.UnreadableFile,
        checkpoint.UnsupportedDtype,
        checkpoint.UnsupportedFormat,
    }


@pytest.mark.slow_variants("sound_sharded")
@pytest.mark.parametrize("name", hostile.SOUND)
def test_every_truncation_is_refused(name: str, tmp_path: Path) -> None:
    """Of any file. A folder of orbax has files that nobody needs: there, or nothing changes."""
    case = hostile.SOUND[name]
    path = tmp_path / f"m{case.suffix}"
    case.build(path)
    for file in hostile.files(path):
        whole = file.read_bytes()
        step = max(1, len(whole) // (6 if path.is_dir() else 200))
        for length in range(0, len(whole), step):
            rewrite(file, whole[:length])
            if path.is_dir():
                with (
                    contextlib.suppress(checkpoint.CheckpointError),
                    checkpoint.open(path) as found,
                ):
                    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5]], (file, length)
            else:
                with pytest.raises(checkpoint.CheckpointError):
                    _read_all(path)
        file.write_bytes(whole)
