"""Several processes of this machine that are one run of JAX, over loopback."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest import mock

ALONE = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_ENABLE_PREEMPTION_SERVICE": "false",  # which keeps a process from being terminated
}


def together(function: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """Results of `function(index, *arguments)` in each of so many processes with one device.

    Raises:
      RuntimeError: a process died.
    """
    with (
        socket.socket() as port,
        mock.patch.dict(os.environ, ALONE),
        # Libraries print, and the output of the command is its own.
        ProcessPoolExecutor(count, get_context("spawn"), os.dup2, initargs=(2, 1)) as pool,
    ):
        # The port stays taken: the coordinator, which may bind it too, is the only one that listens.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port.getsockname()[1]}"
        given = [(address, count, index, function, *arguments) for index in range(count)]
        return [future.result() for future in [pool.submit(_joined, *one) for one in given]]


def _joined(address: str, count: int, index: int, function: Any, *arguments: Any) -> Any:
    import jax

    jax.distributed.initialize(address, num_processes=count, process_id=index)
    try:
        return function(index, *arguments)
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
