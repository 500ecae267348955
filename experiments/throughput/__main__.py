"""Migration of a large checkpoint next to `cp`, `sync` and one read of the copy, in turns.

The checkpoint has attention blocks of torch.nn.MultiheadAttention; they are written in the layout
of Flax, whose kernels are transposed. Digests are checked on reading, kept, and checked once more
on what was written; files are synced.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from experiments import frame
from jaxmha import checkpoint
from jaxmha.bench import memory
from jaxmha.converters.migrate import pipeline

E, HEADS = 2048, 16
BLOCK = (3 * E * E + E * E + 4 * E) * 4  # bytes
SETTLED = 8.0  # seconds
Shapes = dict[str, tuple[int, ...]]


def torch_shapes(blocks: int) -> Shapes:
    """Names and shapes of the source."""
    block: Shapes = {
        "in_proj_weight": (3 * E, E),
        "in_proj_bias": (3 * E,),
        "out_proj.weight": (E, E),
        "out_proj.bias": (E,),
    }
    return {f"layers.{i}.{name}": x for i in range(blocks) for name, x in block.items()}


def make(path: Path, blocks: int) -> None:
    """Writes the source; every tensor is different."""
    shapes = torch_shapes(blocks)
    noise = np.random.default_rng(0).standard_normal(3 * E * E, np.float32)

    def load(name: str) -> np.ndarray:
        shape = shapes[name]
        return (
            noise[: int(np.prod(shape))] + np.float32(len(name) + zlib.crc32(name.encode()) % 97)
        ).reshape(shape)

    info = {n: checkpoint.TensorInfo(s, np.dtype(np.float32)) for n, s in shapes.items()}
    checkpoint.write(path, checkpoint.Lazy(info, load))


def removed(target: Path) -> None:
    """Deletes a file, and waits until the system has freed its disk blocks and memory.

    Disk blocks are freed at the next sync. A virtual machine returns freed pages to its host after
    some seconds, and later allocations wait for new ones. Without the pause, a run that is shorter
    than these seconds would reuse the freed pages at no cost.
    """
    target.unlink(missing_ok=True)
    os.sync()
    time.sleep(SETTLED)


def copied(source: Path, target: Path) -> tuple[float, float]:
    """`cp`, `sync` of the copy, one read of it."""
    removed(target)
    start = time.perf_counter()
    commands: list[list[str | Path]] = [["cp", source, target], ["sync", target], ["cat", target]]
    for command in commands:
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start, 0.0


def migrated(source: Path, target: Path) -> tuple[float, float]:
    """`migrate.convert` in a process of its own, whose start and imports are not counted."""
    return frame.alone(convert, source, target)


def convert(source: Path, target: Path) -> tuple[float, float]:
    """The seconds, and the most MiB held above those before."""
    memory.forget()
    before = memory.counted("VmRSS")
    removed(target)
    start = time.perf_counter()
    pipeline.convert(source, target, to="flax", num_heads=HEADS)
    return time.perf_counter() - start, (memory.peak() / 1024 - before) / 1024


def measure(chosen: Namespace) -> dict[str, Any]:
    """Copies and migrations in turns."""
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        source, target = Path(scratch) / "source.safetensors", Path(scratch) / "target.safetensors"
        make(source, max(1, chosen.size // BLOCK))
        size = source.stat().st_size
        ways = {"copy": copied, "migrate": migrated}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        peak = 0.0
        for turn in range(chosen.rounds):
            for way in random.Random(turn).sample(list(ways), len(ways)):
                took, most = ways[way](source, target)
                peak = max(peak, most)
                seconds[way].append(took)
                rate = f"{way:8} {took:7.2f} s {size / took / 1e6:7.0f} MB/s"
                print(rate, file=sys.stderr, flush=True)
    ratios = [c / m for c, m in zip(seconds["copy"], seconds["migrate"], strict=True)]
    return {
        "bytes": size,
        "seconds": seconds,
        "throughput_of_copy": round(statistics.median(ratios), 3),
        "peak_mib": round(peak),
        "largest_tensor_mib": 3 * E * E * 4 >> 20,
        "libraries": {name: version(name) for name in ("ml_dtypes", "xxhash")},
    }


EXPERIMENT = frame.of(
    measure,
    "examples:\n  python -m experiments.throughput --size 2147483648 --rounds 5 --write",
    options={
        "--size": frame.number(2 << 30, "bytes, 2 GiB", least=BLOCK),
        "--rounds": frame.number(5, least=1),
        "--folder": {"type": Path, "help": "where; default: the system's folder"},
    },
    seed=0,
    result="results/throughput.json",
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
