"""Flips bits of checkpoints: each flip is refused, or changes nothing that is read.

    python -m tests.checkpoint.flips .safetensors

flips every bit of a checkpoint of 4 kB, one after the other.
"""

import os
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxmha import checkpoint
from tests.checkpoint import hostile

HEADS = "jaxmha.num_heads"
Found = tuple[str | None, dict[str, tuple[str, tuple[int, ...], bytes]]]


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


def write(path: Path, size: int) -> None:
    """A sample, with metadata where the format has a place for them."""
    suffix = path.name.removeprefix("m")
    metadata = None if suffix == ".weights.h5" else {HEADS: "12"}
    checkpoint.write(path, sample(size, suffix), metadata=metadata)


def found(path: Path) -> Found | None:
    """All that a reader says about a checkpoint; None where it refuses."""
    try:
        with checkpoint.open(path) as file:
            arrays = {name: file[name] for name in file}
            declared = {name: (str(i.dtype), i.shape) for name, i in file.info.items()}
            heads = file.metadata.get(HEADS)
    except checkpoint.CheckpointError:
        return None
    read = {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()}
    assert {name: entry[:2] for name, entry in read.items()} == declared
    return heads, read


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


def main(suffix: str) -> None:
    """Every bit of 4 kB; in memory if the system has a place there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        path = Path(folder) / f"m{suffix}"
        write(path, 4000)
        size = sum(file.stat().st_size for file in hostile.files(path))
        assert size >= 4096
        print(f"{suffix}: {size * 8} flips, {flipped(path, slice(0, None, 1))} of them harmless")


if __name__ == "__main__":
    main(sys.argv[1])
