"""The bytes of a checkpoint that each of several processes reads, and its memory, by format.

Processes communicate over loopback (`jax.distributed`). Each loads its own part of the same tensors
from every format. All save them together through orbax, and load that checkpoint too.
"""

from pathlib import Path
from typing import Any

from experiments.scaling import workers
from jaxmha.bench import memory

SUFFIXES = ("safetensors", "safetensors.index.json", "npz", "pt", "weights.h5", "orbax")
SAVED = "saved"  # by all processes through orbax


def write(folder: Path, size: int) -> None:
    """The same tensors in every format: rows, columns and heads will be spread."""
    import numpy as np

    from jaxmha import checkpoint

    rng = np.random.default_rng(0)
    rows = size // 4 // (4 * 1024)
    tensors = {
        "rows": rng.standard_normal((2 * rows, 1024), np.float32),
        "columns": rng.standard_normal((rows, 1024), np.float32),
        "heads": rng.standard_normal((rows, 8, 128), np.float32),
    }
    for suffix in SUFFIXES:
        settings: Any = {"shard_size": size // 3} if suffix.endswith("json") else {}
        checkpoint.write(folder / f"model.{suffix}", tensors, digest=None, **settings)


def work(_: int, folder: Path) -> dict[str, dict[str, int]]:
    """Bytes of one process by format: of its share, read, and of the growth of its memory."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    from jaxmha.converters.sharded import distributed

    mesh: Any = jax.make_mesh((jax.device_count(),), ("tensor",))
    spec: Any = PartitionSpec
    specs = {
        "rows": spec("tensor"),
        "columns": spec(None, "tensor"),
        "heads": spec(None, "tensor", None),
    }
    looked: list[int] = []

    def see(slices: Any, part: Any) -> None:
        # A mapped tensor is read without system calls; `read_by_calls` counts all others.
        if slices.is_mapped(part):
            looked.append(part.nbytes)

    workers.watch(see)
    ready: Any = jax.block_until_ready
    found = {}
    whole = jax.NamedSharding(mesh, spec())
    small = {"a": jax.make_array_from_callback((8,), whole, lambda _: np.ones(8))}
    distributed.save_sharded(folder / "first", small)  # what libraries load on first use
    distributed.load_sharded(folder / "first", mesh, {})
    for name in (*(f"model.{suffix}" for suffix in SUFFIXES), SAVED):
        looked.clear()
        memory.forget()
        before, called = 1024 * memory.counted("VmRSS"), read_by_calls()
        arrays = distributed.load_sharded(folder / name, mesh, specs)
        ready(arrays)
        found[name] = {
            "share": sum(s.data.nbytes for x in arrays.values() for s in x.addressable_shards),
            "read": sum(looked) + read_by_calls() - called,
            "peak": memory.peak() - before,
        }
        if name == "model.npz":
            distributed.save_sharded(folder / SAVED, arrays)
        del arrays
    return found


def read_by_calls() -> int:
    """Bytes that this process has read by calls to the system."""
    return memory.counted("rchar", "/proc/self/io")
