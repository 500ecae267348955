"""Hostile .keras archives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import Bad, Code, Gone, No, Out, Two, case, raw_cases
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


def of(members: dict[str, bytes | None]) -> Callable[[Path], None]:
    return lambda path: archive(path, members=members)


def having(key: str, value: object) -> Callable[[Path], None]:
    """With another entry in the group of the layer."""

    def change(file: h5py.File) -> None:
        file[f"layers/dense/vars/{key}"] = value

    return lambda path: archive(path, change=change)


@case(".keras")
def sound_keras_archive(path: Path) -> None:
    archive(path)


raw_cases(
    "keras_", ".keras",
    ("without_weights", Gone, of({"model.weights.h5": None})),
    ("without_config", Gone, of({"config.json": None})),
    ("with_a_program", Bad, of({"layer.py": b"import os"})),
    ("with_two_weights", Bad, of({"other.weights.h5": b"\x89HDF\r\n\x1a\n"})),
    ("member_is_a_path", Out, of({"assets/../../m": b""})),
    ("config_is_no_json", Bad, of({"config.json": b"{'a': 1}"})),
    ("config_key_twice", Two,
     of({"config.json": b'{"class_name": "Dense", "class_name": "Lambda"}'})),
    ("config_is_deep", Bad, of({"config.json": b'{"a":' * 100_000 + b"1" + b"}" * 100_000})),
    ("weights_are_compressed", No, lambda path: archive(path, method=8)),
    ("weights_are_no_hdf5", Bad, of({"model.weights.h5": b"weights" * 100})),
    ("weights_link_out", Code, having("1", h5py.ExternalLink("/etc/passwd", "/"))),
    ("weights_soft_link", Code, having("1", h5py.SoftLink("/layers/dense/vars/0"))),
    ("weights_with_a_gap", Gone, having("2", np.ones(2))),
)  # fmt: skip


@case(".keras", ck.IntegrityError)
def keras_weights_checksum(path: Path) -> None:
    archive(path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(W.tobytes(), W[::-1].tobytes()))
