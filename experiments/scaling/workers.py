"""Several processes of this machine that are one run of JAX, over loopback."""

import json
import os
import socket
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def parsed(
    parser: ArgumentParser, arguments: list[str] | None = None, default: int = 2
) -> Namespace:
    """The command line, with how many processes, and which of them this one is."""
    parser.add_argument(
        "--processes", type=int, default=default, help=f"2, 4 or 8 (default {default})"
    )
    parser.add_argument("--worker", type=int, help="used by the command itself")
    parser.add_argument("--port", type=int, help="used by the command itself")
    found = parser.parse_args(arguments)
    alone = found.worker is not None and found.processes == 1
    if not alone and found.processes not in (2, 4, 8):
        parser.error(f"--processes must be 2, 4 or 8, got {found.processes}")
    return found


def launched(module: str, count: int, arguments: Sequence[Any]) -> list[subprocess.Popen[str]]:
    """`python -m module` so many times, each as one worker with one device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, "--processes", str(count), "--port", str(port)]
    command += map(str, arguments)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return [
        subprocess.Popen(
            [*command, "--worker", str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def started(module: str, count: int, arguments: Sequence[Any]) -> list[dict[str, Any]] | None:
    """The last result that every process printed; None if one failed, whose errors are printed."""
    workers = launched(module, count, arguments)
    try:
        said = [worker.communicate(timeout=1800) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for index, (worker, (_, errors)) in enumerate(zip(workers, said, strict=True)):
        if worker.returncode:
            print(f"process {index} failed:\n{errors[-2000:]}", file=sys.stderr)
            return None
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@contextmanager
def joined(options: Namespace) -> Iterator[None]:
    """One worker among the others."""
    import jax

    if options.processes == 1:
        yield
        return
    jax.distributed.initialize(
        f"127.0.0.1:{options.port}", num_processes=options.processes, process_id=options.worker
    )
    try:
        yield
    finally:
        shutdown: Any = jax.distributed.shutdown
        shutdown()


def watch(see: Callable[[Any, Any], None]) -> None:
    """Calls `see(slices, part)` before every read of a part of a checkpoint."""
    from jaxmha.converters.migrate.lazy_slices import Slices

    original = Slices.read

    def watched(slices: Slices, part: Any) -> Any:
        see(slices, part)
        return original(slices, part)

    reader: Any = watched
    Slices.read = reader  # type: ignore[method-assign]
