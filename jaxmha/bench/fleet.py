"""Worker processes, kept alive between requests; one that died is started again at the next."""

import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Self

from jaxmha.bench import peers

PATIENCE = 600.0
# Matches the line of a crash that names the cause; the last line is a stack frame.
CAUSE = re.compile(r"^F\d{4}|terminate called|bad_alloc|[Oo]ut of memory|[Cc]annot allocate")


class Worker:
    """A process that handles one request at a time."""

    def __init__(self, peer: str, threads: int, platform: str | None = "cpu") -> None:
        self.peer, self.threads, self.platform = peer, threads, platform
        self.process: subprocess.Popen[str] | None = None
        self.messages = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Returns the reply: `{"failed": reason}` also if the process dies or is too slow."""
        process = self._alive()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._dead()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(PATIENCE):
                self.stop()
                return {"failed": f"no reply within {PATIENCE:.0f} s"}
        line = process.stdout.readline()
        return json.loads(line) if line else self._dead()

    def stop(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _alive(self) -> subprocess.Popen[str]:
        if self.process is None:
            command = [sys.executable, "-m", "jaxmha.bench.worker"]
            self.process = subprocess.Popen(
                [*command, self.peer, str(self.threads)],
                env=environment(self.peer, self.threads, self.platform),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.messages,
                text=True,
            )
        return self.process

    def _dead(self) -> dict[str, str]:
        assert self.process is not None
        code = self.process.wait()
        self.stop()
        self.messages.seek(0)
        lines = self.messages.read().strip().splitlines() or ["no message"]
        line = next(filter(CAUSE.search, lines), lines[-1])
        self.messages.seek(0)  # process and file share the position
        self.messages.truncate()
        return {"failed": f"the process ended with code {code}: {line[:160]}"}


class Fleet:
    """Workers by name, started at their first request, and ended at the end of the `with` block.

    `platform` "cpu" keeps everything on the CPU; None leaves the choice to the libraries.
    """

    def __init__(self, threads: int, platform: str | None = "cpu") -> None:
        self.threads, self.platform = threads, platform
        self.workers: dict[str, Worker] = {}

    def __getitem__(self, peer: str) -> Worker:
        if peer not in self.workers:
            self.workers[peer] = Worker(peer, self.threads, self.platform)
        return self.workers[peer]

    def fresh(self, peer: str, do: str, **request: Any) -> dict[str, Any]:
        """Returns the reply of a new process, which then ends: memory peaks need a fresh one."""
        worker = Worker(peer, self.threads, self.platform)
        try:
            return worker.ask(do, **request)
        finally:
            worker.stop()
            worker.messages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self.workers.values():
            worker.stop()
            worker.messages.close()


def environment(peer: str, threads: int, platform: str | None = "cpu") -> dict[str, str]:
    """The environment of this process, with a fixed number of threads for libraries, and without a
    visible GPU if `platform` is "cpu".

    Otherwise JAX does not preallocate memory, since several processes share the device.
    """
    names = ("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    known = peer.partition(":")[0] in peers.PEERS
    on_cpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return {
        **os.environ,
        **dict.fromkeys(names, str(threads)),
        **(on_cpu if platform == "cpu" else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "KERAS_BACKEND": peers.peer(peer).keras_backend if known else "jax",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
