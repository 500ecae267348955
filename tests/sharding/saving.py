"""One of several processes that save together; killed while they do, if so told."""

import json
import os
import signal
import threading
import time
from argparse import ArgumentParser
from pathlib import Path

from experiments.scaling import workers


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--value", type=float)
    parser.add_argument("--killed", type=int, help="when so many files of the folder are there")
    options = workers.parsed(parser)
    with workers.joined(options):
        import jax
        import numpy as np

        from jaxmha.converters.sharded.distributed import load_sharded, save_sharded

        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        spec = jax.sharding.PartitionSpec("data")  # type: ignore[no-untyped-call]
        place = jax.NamedSharding(mesh, spec)
        whole = np.arange(2**21, dtype=np.float32).reshape(-1, 64) + options.value
        array = jax.make_array_from_callback(whole.shape, place, whole.__getitem__)
        if options.killed is not None and options.worker == 1:
            threading.Thread(target=dies, args=(options.path, options.killed), daemon=True).start()
        save_sharded(options.path, {"block/weight": array, "block/bias": array[:, 0]})
        found = load_sharded(options.path, mesh, {"block/weight": spec})
        same = all(
            np.array_equal(shard.data, whole[shard.index])
            for shard in found["block/weight"].addressable_shards
        )
        print(json.dumps({"same": same}))


def dies(path: Path, files: int) -> None:
    while True:
        folders = [p for p in path.parent.glob(f"{path.name}*") if p.is_dir()]
        if sum(1 for folder in folders for _ in folder.rglob("*")) >= files:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)


if __name__ == "__main__":
    main()
