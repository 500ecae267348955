"""Every single-bit flip in what is written here is refused, or changes nothing that is read."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxmha.converters import checkpoint
from tests.checkpoint import hostile

# By suffix, every how many bits a flip is tried in every run.
SUFFIXES = {
    ".safetensors": 211,
    ".pt": 997,
    ".weights.h5": 2503,
    ".npz": 307,
    ".safetensors.index.json": 499,
    ".bin.index.json": 997,
    ".orbax": 1499,
}
Found = dict[str, tuple[str, tuple[int, ...], bytes]]


def sample(size: int, suffix: str) -> dict[str, np.ndarray]:
    """Tensors of several dtypes and ranks, of about `size` bytes."""
    random = np.random.default_rng(0)
    half = np.float16 if suffix == ".npz" else ml_dtypes.bfloat16
    return {
        "layers/dense/vars/0": random.standard_normal((size // 32, 7)).astype(np.float32),
        "layers/dense/vars/1": random.standard_normal(11).astype(half),
        "layers/norm/vars/0": random.integers(0, 2, (3, 5)).astype(bool),
        "step": np.array(17),
    }


def found(path: Path) -> Found | None:
    """All that a reader says about a checkpoint; None where it refuses."""
    try:
        with checkpoint.open(path) as file:
            arrays = {name: file[name] for name in file}
            declared = {name: (str(i.dtype), i.shape) for name, i in file.info.items()}
    except checkpoint.CheckpointError:
        return None
    read = {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()}
    assert {name: entry[:2] for name, entry in read.items()} == declared
    return read


def flipped(path: Path, steps: "slice[int, None, int]") -> int:
    """Flips the bits of a slice of each file of a checkpoint; how many flips were harmless."""
    sound, harmless = found(path), 0
    assert sound is not None
    for file in hostile.files(path):
        whole = file.read_bytes()
        with file.open("r+b", buffering=0) as out:
            for bit in range(len(whole) * 8)[steps]:
                at, mask = bit // 8, 1 << bit % 8
                os.pwrite(out.fileno(), bytes([whole[at] ^ mask]), at)
                read = found(path)
                assert read is None or read == sound, (file.name, at, mask)
                harmless += read is not None
                os.pwrite(out.fileno(), whole[at : at + 1], at)
    assert found(path) == sound
    return harmless


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_some_bit_flips(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{suffix}"
    checkpoint.write(path, sample(400, suffix))
    flipped(path, slice(3, None, SUFFIXES[suffix]))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_bit_flip_of_4_kib(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{suffix}"
    checkpoint.write(path, sample(4000, suffix))
    assert sum(file.stat().st_size for file in hostile.files(path)) >= 4096
    flipped(path, slice(0, None, 1))


@pytest.mark.parametrize("suffix", [".safetensors", ".weights.h5"])
def test_without_digests_flips_go_unseen(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{suffix}"
    checkpoint.write(path, sample(400, suffix), digest=None)
    data = path.read_bytes().index(sample(400, suffix)["layers/dense/vars/0"].tobytes())
    with pytest.raises(AssertionError, match="m"):
        flipped(path, slice(8 * data, None, 53))
