"""A checkpoint that finds no room, or another writer, leaves what was there."""

import errno
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint import settling
from tests.checkpoint.test_checkpoint_writing import SUFFIXES, TENSORS


@pytest.mark.parametrize("name", ["m.safetensors.index.json", "m.bin.index.json", "m.orbax"])
def test_no_room_for_what_has_several_files(name: str, tmp_path: Path) -> None:
    checkpoint.write(tmp_path / name, {"old": np.ones(3)})
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(checkpoint.WriteFailed, match="free space"):
            checkpoint.write(tmp_path / name, TENSORS, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_room_taken_before_changes_nothing(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{place}/vars/0" for place in ("small", "layers/large")]
    tensors = dict(zip(names, (np.arange(7.0), np.full((300, 400), 0.5)), strict=True))
    for folder, size in (("plain", settling._LARGE), ("large", 0)):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(settling, "_LARGE", size)
        checkpoint.write(tmp_path / folder / f"m{suffix}", tensors, dtype="float32")
    plain, large = ((tmp_path / name / f"m{suffix}").read_bytes() for name in ("plain", "large"))
    assert plain == large


def test_no_room_for_much_is_known_before_anything_is_written(tmp_path: Path) -> None:
    tensors, done = {"a": np.zeros(20 << 20, np.float32)}, []
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (79 << 20, old[1]))
    try:
        with pytest.raises(checkpoint.WriteFailed, match="free space"):
            checkpoint.write(
                tmp_path / "m.safetensors", tensors, progress=lambda *counts: done.append(counts)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not done
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".orbax", ".safetensors.index.json"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_full_and_read_only(
    code: int, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that refuses at any step: one clear error, and what was there stays."""
    path = tmp_path / f"m{suffix}"
    checkpoint.write(path, {"old/vars/0": np.ones(3)})
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    for step in ("open", "fsync", "chmod" if suffix == ".orbax" else "fchmod"):
        with monkeypatch.context() as patch:
            real = os.open

            def opened(name: Any, flags: int, *args: Any, real: Any = real, **settings: Any) -> Any:
                if flags & os.O_CREAT:
                    refuse()
                return real(name, flags, *args, **settings)

            patch.setattr(os, step, opened if step == "open" else refuse)
            if suffix == ".orbax" and step == "open":
                patch.setattr(os, "mkdir", refuse)
            with pytest.raises(checkpoint.WriteFailed, match=os.strerror(code)):
                checkpoint.write(path, TENSORS, force=True)
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("suffix", [".orbax", ".safetensors.index.json"])
def test_no_room_for_several_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{suffix}"
    checkpoint.write(path, {"w": np.ones(3)})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = {"w": np.random.default_rng(0).random(9000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, old[1]))
    try:
        with pytest.raises(checkpoint.WriteFailed):
            checkpoint.write(path, noise, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    with checkpoint.open(path) as file:
        assert file["w"].tolist() == [1, 1, 1]
    left = {p.name for p in tmp_path.iterdir() if p.name.startswith(".")}
    assert not left
