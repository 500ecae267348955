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


def of_shapes(jax: Any, placed: Any) -> Any:
    """A tree of `ShapeDtypeStruct`."""

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=placed)

    layers = [{"dense": {"kernel": of(D, OUT)}} for _ in range(LAYERS)]
    return {"tokens": {"embedding": of(VOCABULARY, D)}, "blocks": layers}


def of_nnx(jax: Any, placed: Any) -> Any:
    """An abstract nnx model, made as Flax's guide to sharding makes it."""
    from flax import nnx

    axes = nnx.with_partitioning(nnx.initializers.ones_init(), tuple(placed.spec))

    class Block(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.dense = nnx.Linear(D, OUT, use_bias=False, kernel_init=axes, rngs=rngs)

    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.tokens = nnx.Embed(VOCABULARY, D, embedding_init=axes, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    with jax.set_mesh(placed.mesh):
        graph, state = nnx.get_abstract_model(lambda: Model(nnx.Rngs(0)), placed.mesh)
    return nnx.merge(graph, state)


def main(kind: str, path: str, process: int, processes: int, port: str) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // processes}"
    jax: Any = importlib.import_module("jax")  # only now: it reads XLA_FLAGS on import
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    from flax import nnx

    from jaxmha.converters import equinox, flax

    placed = jax.NamedSharding(jax.make_mesh((4,), ("x",)), jax.P(None, "x"))
    target = {"tree": of_shapes, "nnx": of_nnx}[kind](jax, placed)
    with Path("/proc/self/statm").open() as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    if kind == "tree":
        made = equinox.load_into(target, path)
    else:
        made = nnx.to_pure_dict(nnx.state(flax.load_into(target, path), nnx.Param))
    jax.block_until_ready(made)
    own = 0
    for leaf in jax.tree.leaves(made):
        assert leaf.sharding.is_equivalent_to(placed, leaf.ndim)
        own += sum(shard.data.nbytes for shard in leaf.addressable_shards)
    for i in range(LAYERS):
        for shard in made["blocks"][i]["dense"]["kernel"].addressable_shards:
            assert np.all(np.asarray(shard.data[:2]) == len(f"layers.{i}.fc.weight"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"own": own / MIB, "beyond": (peak - before - own) / MIB}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
