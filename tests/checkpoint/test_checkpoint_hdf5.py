"""The reader of HDF5 against h5py: what that library writes is read bit for bit, by us alone."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint.formats.hdf5.checksum import fletcher32, lookup3
from tests.checkpoint import hostile
from tests.checkpoint.hostile import hdf5

LIBVERS = ("earliest", ("earliest", "v108"), ("v108", "v108"), ("v110", "v112"), "latest")
KINDS = (
    *("?", "u1", "i1", "<u2", ">u2", "<i2", ">i2", "<f2", ">f2", "<u4", ">i4", "<f4", ">f4"),
    *("<u8", ">i8", "<f8", ">f8", "<c8", ">c8", "<c16", ">c16", "V2"),
)
SIZES = (1, 2, 3, 5, 7, 11, 13)
ROUNDS = int(os.environ.get("JAXMHA_HDF5_ROUNDS", "4"))


def _settings(random: np.random.Generator, shape: tuple[int, ...]) -> dict[str, Any]:
    """A storage: in one piece, in the header, or in chunks with filters."""
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    storage = random.integers(5) if shape and 0 not in shape else 0
    if storage == 1:
        early.set_layout(h5py.h5d.COMPACT)
    if storage < 2:
        return {"dcpl": early}
    settings: dict[str, Any] = {
        "chunks": tuple(int(random.integers(1, n + 1)) for n in shape),
        "maxshape": tuple((None, n, n + 6)[random.integers(3)] for n in shape),
    }
    if storage == 2:
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        return settings | {"dcpl": early}
    if storage == 3:
        return settings
    return settings | {
        "compression": (None, "gzip", "lzf")[random.integers(3)],
        "shuffle": bool(random.integers(2)),
        "fletcher32": bool(random.integers(2)),
    }


def _write(path: Path, random: np.random.Generator) -> None:
    """Datasets of every kind, in few groups or in many, with attributes."""
    libver = LIBVERS[random.integers(len(LIBVERS))]
    with h5py.File(path, "w", libver=libver, track_order=bool(random.integers(2))) as file:
        for layer in range(int(random.integers(1, 25))):
            group = file.create_group(f"layer_{layer}/vars", track_order=bool(random.integers(2)))
            group.attrs["name"] = f"layer {layer}"
            for i in range(int(random.integers(4)) * 5):
                group.attrs[f"other_{i}"] = np.arange(random.integers(1, 60))
            for i in range((1, 1, 12)[random.integers(3)]):
                kind = np.dtype(KINDS[random.integers(len(KINDS))])
                shape = tuple(int(n) for n in random.choice(SIZES, random.integers(5)))
                shape = shape if random.integers(20) else (*shape, 0)
                raw = random.integers(0, 256, int(np.prod(shape)) * kind.itemsize, np.uint8)
                raw = raw // 100 if random.integers(2) else raw
                array = (raw & 1 if kind == bool else raw).view(kind).reshape(shape)
                data = group.create_dataset(str(i), shape, kind, **_settings(random, shape))
                data[() if not shape else ...] = array[()]
                if kind == "V2":
                    data.attrs["dtype"] = "bfloat16"


def _names(group: Any, path: str = "") -> list[str]:
    """The paths of datasets in the order of h5py."""
    found: list[str] = []
    for name, item in group.items():
        found += _names(item, f"{path}{name}/") if hasattr(item, "keys") else [path + name]
    return found


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_every_file_of_h5py_is_read_alike(seed: int, tmp_path: Path) -> None:
    random, path = np.random.default_rng(seed), tmp_path / "m.weights.h5"
    _write(path, random)
    with (
        h5py.File(path) as theirs,
        checkpoint.open(path) as ours,
        checkpoint.open(path, mmap=True) as mapped,
    ):
        assert list(ours) == _names(theirs)
        for name in ours:
            expected = np.asarray(theirs[name][()])
            expected = expected.astype(expected.dtype.newbyteorder("="))
            box = tuple(slice(*sorted(random.integers(0, n + 1, 2))) for n in expected.shape)
            for found in (ours[name], mapped[name]):
                kind = "bfloat16" if expected.dtype == "V2" else str(expected.dtype)
                assert (str(found.dtype), found.shape) == (kind, expected.shape), name
                assert found.tobytes() == expected.tobytes(), name
            assert ours.part(name, box).tobytes() == expected[box].tobytes(), (name, box)
        assert all(ours.names[layer] == layer.replace("_", " ") for layer in ours.names)
        assert len(ours.names) == len(theirs)


@pytest.mark.slow_variants("earliest-shape[124]*")  # these files have one kind of index
@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((3000,), {"chunks": (1,)}),  # pages of an array
        ((3000,), {"chunks": (1,), "compression": "gzip"}),
        ((5000,), {"chunks": (1,), "maxshape": (None,)}),
        ((90, 9, 10), {"chunks": (7, 2, 3), "maxshape": (100, None, 17)}),
        ((60, 70), {"chunks": (2, 3), "maxshape": (None, None), "fletcher32": True}),
    ],
)
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_indexes_of_many_chunks(
    libver: str, shape: tuple[int, ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    path, data = tmp_path / "m.weights.h5", np.arange(np.prod(shape), dtype="i4").reshape(shape)
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("w", data=data, **settings)
    with checkpoint.open(path) as ours:
        assert ours["w"].tobytes() == data.tobytes()


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_many_links(libver: str, tmp_path: Path) -> None:
    path, names = tmp_path / "m.weights.h5", [f"layer_{i}" for i in range(300)]
    with h5py.File(path, "w", libver=libver, fs_strategy="page") as file:
        for name in names:
            file[name] = np.float32(len(name))
    with checkpoint.open(path) as ours:
        assert list(ours) == sorted(names)
        assert ours["layer_299"] == 9


def test_one_dataset_of_two_names(tmp_path: Path) -> None:
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        file["a"] = np.arange(3)
        file["b"] = file["a"]
    with checkpoint.open(path) as ours:
        assert ours["a"].tolist() == ours["b"].tolist() == [0, 1, 2]


def test_structure_has_a_budget(tmp_path: Path) -> None:
    path = tmp_path / "m.weights.h5"
    hdf5.header_of_nothing(path, 60_000)
    with checkpoint.open(path) as ours:
        assert not list(ours)
    with pytest.raises(checkpoint.BudgetExceeded, match="steps"):
        checkpoint.open(path, limits=checkpoint.Limits(steps=50_000))


def test_checksums() -> None:
    assert lookup3(b"") == 0xDEADBEEF
    assert lookup3(b"Four score and seven years ago") == 0x17770551
    # Of 16 bits twice, as of the page on Fletcher's checksum; the higher byte of a word is first.
    assert fletcher32(np.frombuffer(b"badcfe", np.uint8)) == 0x56502D2A
    assert fletcher32(np.full(6, 255, np.uint8)) == 0xFFFFFFFF


_AUDITED = """
import os, sys
from jaxmha.converters import checkpoint
opened = []
def hook(event, args):
    if event == "open" and not isinstance(args[0], int):
        opened.append(os.fsdecode(args[0]))
    if event in ("ctypes.dlopen", "subprocess.Popen", "socket.connect"):
        opened.append(str(args))
def read(path):
    try:
        with checkpoint.open(path) as file:
            for name in file:
                file[name], file.part(name, ())
    except checkpoint.CheckpointError:
        pass
read(sys.argv[1])
sys.addaudithook(hook)
for path in sys.argv[1:]:
    read(path)
assert {*map(os.path.realpath, opened)} <= {*map(os.path.realpath, sys.argv[1:])}, opened
assert "h5py" not in sys.modules
"""


def test_only_the_file_itself_is_opened(tmp_path: Path) -> None:
    """Without the HDF5 library in the process, whose opens no hook of Python would see."""
    paths, large = [], re.compile("inflates|many|chain|empty_blocks")
    for name, case in (hostile.SOUND | hostile.CASES).items():
        if case.suffix in (".weights.h5", ".keras") and not large.search(name):
            paths.append(tmp_path / f"{name}{case.suffix}")
            case.build(paths[-1])
    assert len(paths) > 120
    done = subprocess.run(
        [sys.executable, "-c", _AUDITED, *map(str, paths)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
