"""Files and folders that people really have: nothing of them is refused, and none takes long."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha.converters import checkpoint
from jaxmha.converters.checkpoint import folder as folder_module


def _folder_of_arrays(path: Path, count: int) -> None:
    """What orbax writes without a database: a folder for every array, its chunk and its document."""
    document = {
        "zarr_format": 2,
        "shape": [3],
        "chunks": [3],
        "dtype": "<f4",
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "order": "C",
    }
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
        monkeypatch.setattr(folder_module.os, "scandir", counted)
        assert [file[f"layers/{i}"][0] for i in range(count)] == list(range(count))
        assert file.part("layers/7", (slice(1),)).tolist() == [7]
    assert len(listed) <= count + 1


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
