"""Every single-bit flip in what is written here is refused, or changes nothing that is read."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxmha import checkpoint
from tests.checkpoint.flips import flipped, sample, write

# By suffix, every how many bits a flip is tried in every run.
SUFFIXES = {
    ".safetensors": 211, ".pt": 997, ".weights.h5": 2503, ".npz": 307,
    ".safetensors.index.json": 499, ".bin.index.json": 997, ".orbax": 1499,
}  # fmt: skip


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_some_bit_flips(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{suffix}"
    write(path, 400)
    flipped(path, slice(3, None, SUFFIXES[suffix]))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_bit_flip_of_4_kib(suffix: str) -> None:
    """In a process of its own, whose calls no type checker slows down."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.flips", suffix], stdout=subprocess.PIPE, check=True
    )
    assert b"flips" in done.stdout


@pytest.mark.parametrize("suffix", [".safetensors", ".weights.h5"])
def test_without_digests_flips_go_unseen(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{suffix}"
    checkpoint.write(path, sample(400, suffix), digest=None)
    data = path.read_bytes().index(sample(400, suffix)["layers/dense/vars/0"].tobytes())
    with pytest.raises(AssertionError, match="m"):
        flipped(path, slice(8 * data, None, 53))
