"""Files and folders that people really have: nothing of them is refused, and none takes long."""

import json
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import checkpoint
from jaxmha.checkpoint.formats import zip
from jaxmha.checkpoint.limits import Budget
from jaxmha.checkpoint.source import Source


def _folder_of_arrays(path: Path, count: int) -> None:
    """A checkpoint that orbax writes without a database: a folder for every array, its chunk and its document."""
    document = {
        "zarr_format": 2, "shape": [3], "chunks": [3], "dtype": "<f4", "compressor": None,
        "filters": None, "fill_value": None, "order": "C",
    }  # fmt: skip
    entry = {"value_metadata": {"value_type": "jax.Array"}}
    tree = {}
    for i in range(count):
        inside = path / f"layers.{i}"
        inside.mkdir(parents=True)
        (inside / ".zarray").write_text(json.dumps(document))
        (inside / "0").write_bytes(np.full(3, i, "<f4").tobytes())
        tree[str(i)] = entry | {"key_metadata": [{"key": k} for k in ("layers", str(i))]}
    (path / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_zarr3": False}))


def test_reading_a_folder_takes_time_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, listed = 60, []
    _folder_of_arrays(tmp_path / "m", count)
    scandir = os.scandir

    def counted(path: Any) -> Any:
        listed.append(path)
        return scandir(path)

    with checkpoint.open(tmp_path / "m") as file:
        monkeypatch.setattr(os, "scandir", counted)
        assert [file[f"layers/{i}"][0] for i in range(count)] == list(range(count))
        assert file.part("layers/7", (slice(1),)).tolist() == [7]
    assert len(listed) <= count + 1


def test_reading_a_database_takes_time_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Any] = []
    arrays = {f"mlp/~/linear_{i}": np.full(40, i, "f4") for i in range(9)}
    checkpoint.write(tmp_path / "m.orbax", arrays)
    with checkpoint.open(tmp_path / "m.orbax") as file:
        monkeypatch.setattr(os, "scandir", listed.append)
        for name, array in arrays.items():
            assert np.array_equal(file[name], array)
    assert not listed


@pytest.mark.parametrize("change", ["data", "manifest", "gone"])
def test_a_change_of_the_database_that_is_read_is_seen(change: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0).standard_normal((2, 200)).astype("f4")
    checkpoint.write(tmp_path / "m.orbax", {"a": random[0], "b": random[1]})
    with checkpoint.open(tmp_path / "m.orbax") as file:
        assert np.array_equal(file["a"], random[0])
        large = [f for f in (tmp_path / "m.orbax" / "d").iterdir() if f.stat().st_size > 400]
        for held in [tmp_path / "m.orbax" / "manifest.ocdbt"] if change == "manifest" else large:
            if change == "gone":
                held.unlink()
            else:
                held.write_bytes(held.read_bytes())
        with pytest.raises(checkpoint.IntegrityError, match="changed while"):
            file["b"]


@pytest.mark.parametrize("change", ["other", "new", "gone"])
def test_a_change_of_the_array_that_is_read_is_seen(change: str, tmp_path: Path) -> None:
    _folder_of_arrays(tmp_path / "m", 3)
    inside = tmp_path / "m" / "layers.1"
    with checkpoint.open(tmp_path / "m") as file:
        if change == "other":
            (inside / "0").write_bytes(np.ones(3, "<f4").tobytes())
        elif change == "new":
            (inside / ".0.part").touch()
        else:
            inside.rename(tmp_path / "elsewhere")
        with pytest.raises(checkpoint.IntegrityError, match="changed while"):
            file["layers/1"]
        assert file["layers/2"].tolist() == [2, 2, 2]


# A fiftieth of the tensors that a file may hold which is refused for nothing else, in a fiftieth of
# the memory: 12,400 of a model of torch, which has that many opcodes, and 50,000 arrays of NumPy.
FIFTIETH = checkpoint.Limits(memory=checkpoint.Limits().memory // 50)


def test_many_small_tensors_of_torch_are_read(tmp_path: Path) -> None:
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(124)))
    torch.save(model.state_dict(), tmp_path / "m.pt")
    with checkpoint.open(tmp_path / "m.pt", limits=FIFTIETH) as file:
        assert len(file) == 248
        assert np.array_equal(file["123.weight"], model[123].weight.detach().numpy())


def test_many_small_arrays_of_numpy_are_read(tmp_path: Path) -> None:
    arrays: Any = {f"layer{i}/w": np.full(2, i, "f4") for i in range(1000)}
    np.savez(tmp_path / "m.npz", **arrays)
    with checkpoint.open(tmp_path / "m.npz", limits=FIFTIETH) as file:
        assert len(file) == 1000
        assert file["layer999/w"].tolist() == [999, 999]


def _tiny(count: int, name: str, **settings: Any) -> bytes:
    """A safetensors file of many tensors of one byte."""
    header = {
        name.format(i): {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i in range(count)
    }
    text = json.dumps(header, **settings).encode()
    return struct.pack("<Q", len(text)) + text + bytes(count)


# As the library writes them, with spaces, with wide letters and with escapes.
@pytest.mark.parametrize("name", ["w{}", "layers.{}.wéight", "层.{}.w", "🙂{}"])
@pytest.mark.parametrize(
    "settings", [{"separators": (",", ":"), "ensure_ascii": False}, {}], ids=["usual", "escaped"]
)
def test_many_tiny_tensors_of_safetensors_are_read(
    name: str, settings: Any, tmp_path: Path
) -> None:
    data = _tiny(1000, name, **settings)
    (tmp_path / "m.safetensors").write_bytes(data)
    with checkpoint.open(tmp_path / "m.safetensors", limits=FIFTIETH) as file:
        assert len(file) == 1000
        assert file[name.format(999)].tolist() == [0]


@pytest.mark.slow
def test_memory_of_many_tiny_tensors_is_what_was_charged(tmp_path: Path) -> None:
    count, tenth = 8000, checkpoint.Limits(memory=checkpoint.Limits().memory // 10)
    data = _tiny(count, "w{}", separators=(",", ":"))
    (tmp_path / "m.safetensors").write_bytes(data)
    tracemalloc.start()
    try:
        with checkpoint.open(tmp_path / "m.safetensors", limits=tenth) as file:
            assert len(file) == count
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < tenth.memory + 2 * len(data)


def test_zip_names_are_charged_as_wide_as_they_are(tmp_path: Path) -> None:
    wide = [f"🙂{'w' * 60_000}{i}" for i in range(2)]
    path = tmp_path / "m.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in wide:
            archive.writestr(name, b"")
    least = 2 * 4 * 60_000  # of the two names alone
    small = checkpoint.Limits(memory=least, name_bytes=1 << 20)
    source = Source(path)
    budget = Budget(path, 0, small)
    with pytest.raises(checkpoint.BudgetExceeded, match="its zip directory"):
        zip.members(source, budget)
    narrow = tmp_path / "narrow.npz"
    with zipfile.ZipFile(narrow, "w") as archive:
        for name in wide:
            archive.writestr(name.replace("🙂", "uuuu"), b"")
    assert len(zip.members(Source(narrow), Budget(narrow, 0, small))) == 2
