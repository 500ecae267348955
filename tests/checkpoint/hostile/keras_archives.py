"""Hostile .keras archives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
from tests.checkpoint.hostile.indexes import W
from tests.checkpoint.hostile.keras_weights import keras
from tests.checkpoint.hostile.torch_files import zip_file


def archive(
    path: Path,
    *,
    change: Callable[[h5py.File], None] | None = None,
    members: dict[str, bytes | None] | None = None,
    **settings: Any,
) -> None:
    """A sound archive, its weights or members changed; None leaves a member out."""
    weights = path.with_name(f"{path.name}.tmp.h5")
    with keras(weights) as file:
        if change:
            change(file)
    parts: dict[str, bytes | None] = {"metadata.json": b"{}", "config.json": b"{}"}
    parts |= {"model.weights.h5": weights.read_bytes()} | (members or {})
    weights.unlink()
    path.write_bytes(zip_file([(n, b) for n, b in parts.items() if b is not None], **settings))


@case(".keras")
def sound_keras_archive(path: Path) -> None:
    archive(path)


@case(".keras", ck.IncompleteCheckpoint)
def keras_without_weights(path: Path) -> None:
    archive(path, members={"model.weights.h5": None})


@case(".keras", ck.IncompleteCheckpoint)
def keras_without_config(path: Path) -> None:
    archive(path, members={"config.json": None})


@case(".keras", ck.MalformedFile)
def keras_with_a_program(path: Path) -> None:
    archive(path, members={"layer.py": b"import os"})


@case(".keras", ck.MalformedFile)
def keras_with_two_weights(path: Path) -> None:
    archive(path, members={"other.weights.h5": b"\x89HDF\r\n\x1a\n"})


@case(".keras", ck.PathEscape)
def keras_member_is_a_path(path: Path) -> None:
    archive(path, members={"assets/../../m": b""})


@case(".keras", ck.MalformedFile)
def keras_config_is_no_json(path: Path) -> None:
    archive(path, members={"config.json": b"{'a': 1}"})


@case(".keras", ck.AmbiguousFile)
def keras_config_key_twice(path: Path) -> None:
    archive(path, members={"config.json": b'{"class_name": "Dense", "class_name": "Lambda"}'})


@case(".keras", ck.MalformedFile)
def keras_config_is_deep(path: Path) -> None:
    archive(path, members={"config.json": b'{"a":' * 100_000 + b"1" + b"}" * 100_000})


@case(".keras", ck.UnsupportedFormat)
def keras_weights_are_compressed(path: Path) -> None:
    archive(path, method=8)


@case(".keras", ck.MalformedFile)
def keras_weights_are_no_hdf5(path: Path) -> None:
    archive(path, members={"model.weights.h5": b"weights" * 100})


@case(".keras", ck.IntegrityError)
def keras_weights_checksum(path: Path) -> None:
    archive(path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(W.tobytes(), W[::-1].tobytes()))


@case(".keras", ck.ForbiddenContent)
def keras_weights_link_out(path: Path) -> None:
    def change(file: h5py.File) -> None:
        file["layers/dense/vars/1"] = h5py.ExternalLink("/etc/passwd", "/")

    archive(path, change=change)


@case(".keras", ck.ForbiddenContent)
def keras_weights_soft_link(path: Path) -> None:
    def change(file: h5py.File) -> None:
        file["layers/dense/vars/1"] = h5py.SoftLink("/layers/dense/vars/0")

    archive(path, change=change)


@case(".keras", ck.IncompleteCheckpoint)
def keras_weights_with_a_gap(path: Path) -> None:
    def change(file: h5py.File) -> None:
        file["layers/dense/vars/2"] = np.ones(2)

    archive(path, change=change)
