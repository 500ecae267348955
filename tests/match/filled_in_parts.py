"""Fills a sharded model of 312 MiB in one or two processes, and prints the memory beyond the model."""

import importlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

D, OUT, VOCABULARY, LAYERS = 1024, 2048, 16384, 31  # 64 MiB and 31 x 8 MiB
MIB = 1 << 20


def write(path: Path) -> None:
    from jaxmha import checkpoint

    shapes = {"embed.weight": (VOCABULARY, D)}
    shapes |= {f"layers.{i}.fc.weight": (OUT, D) for i in range(LAYERS)}
    dtype = np.dtype(np.float32)
    info = {name: checkpoint.TensorInfo(shape, dtype) for name, shape in shapes.items()}
    made = checkpoint.Lazy(info, lambda n: np.full(shapes[n], len(n), np.float32))
    checkpoint.write(path, made)


def main(path: str, process: int, processes: int, port: str) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // processes}"
    jax: Any = importlib.import_module("jax")  # only now: it reads XLA_FLAGS on import
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    from jaxmha.converters import equinox

    spread = jax.NamedSharding(jax.make_mesh((4,), ("x",)), jax.P(None, "x"))

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=spread)

    layers = [{"dense": {"kernel": of(D, OUT)}} for _ in range(LAYERS)]
    tree = {"tokens": {"embedding": of(VOCABULARY, D)}, "blocks": layers}
    with Path("/proc/self/statm").open() as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    made = jax.block_until_ready(equinox.load_into(tree, path))
    own = 0
    for leaf in jax.tree.leaves(made):
        assert leaf.sharding == spread
        own += sum(shard.data.nbytes for shard in leaf.addressable_shards)
    for i in range(LAYERS):
        for shard in made["blocks"][i]["dense"]["kernel"].addressable_shards:
            assert np.all(np.asarray(shard.data[:2]) == len(f"layers.{i}.fc.weight"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"own": own / MIB, "beyond": (peak - before - own) / MIB}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
