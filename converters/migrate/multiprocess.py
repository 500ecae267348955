"""Runs one conversion in several local processes, each of which writes a part of the shards."""

import _thread
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# The program of a worker: `jaxmha`, which ends with the process that started it.
_WORKER = (
    "from jaxmha.converters.migrate import multiprocess; multiprocess.end_with_parent(); "
    "from jaxmha.converters.__main__ import main; main()"
)
_GRACE = 5.0  # seconds in which a worker may remove its temporary files


def end_with_parent() -> None:
    """Ends this process once the process that started it has ended, even if that was killed.

    Standard input must be a pipe to which only the starting process can write, and never does: the
    system closes it when that process ends. The main thread is then interrupted as by SIGTERM.
    """

    def watch() -> None:
        # No buffered read: the interpreter could not shut down while a thread holds its lock.
        while os.read(0, 1):
            pass
        _thread.interrupt_main(signal.SIGTERM)
        time.sleep(_GRACE)  # the main thread may be in a long call that no signal interrupts
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def parsed(text: str) -> tuple[int, int]:
    """Parses `I/N`, the I-th of N parts, to a zero-based index and N.

    Raises:
      ValueError: the text has another form.

    >>> parsed("2/4")
    (1, 4)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--part: {text!r} is no part: give I/N, such as 1/4 to 4/4")
    return int(found[1]) - 1, int(found[2])


def convert(
    count: int, source: Path, destination: Path, options: Mapping[str, Any]
) -> dict[int, int]:
    """Runs `count` processes of `jaxmha convert --part` and waits for all of them.

    Returns index (from 1) -> exit code of each process that failed. The caller then resumes the
    conversion without --part, which keeps finished shards, and writes the others or raises.
    """
    # -P: do not import modules from the working directory, which may belong to someone else.
    command = [sys.executable, "-P", "-c", _WORKER, "convert", str(source), str(destination)]
    for name, value in options.items():
        if value is True:
            command.append(name)
        elif value not in (None, False):
            command += [name, str(value)]
    workers: list[subprocess.Popen[bytes]] = []
    with _ended_by_terminate(lambda: len(workers) == count) as check:
        try:
            for i in range(1, count + 1):
                workers.append(
                    subprocess.Popen(
                        [*command, "--resume", "--json", "--part", f"{i}/{count}"],
                        stdin=subprocess.PIPE,  # see `end_with_parent`
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
            check()
            codes = {i: worker.wait() for i, worker in enumerate(workers, 1)}
            return {i: code for i, code in codes.items() if code}
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
                if worker.stdin is not None:
                    worker.stdin.close()


@contextlib.contextmanager
def _ended_by_terminate(all_started: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """Makes SIGTERM raise SystemExit, so that the process ends its workers when it exits.

    Until `all_started` returns True, only the yielded function raises: an exception while a worker
    is being started would leave it running.
    """
    asked = threading.Event()

    def check() -> None:
        if asked.is_set():
            sys.exit(128 + signal.SIGTERM)

    def terminated(*_: object) -> None:
        asked.set()
        if all_started():
            check()

    if threading.current_thread() is not threading.main_thread():
        yield check  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield check
    finally:
        signal.signal(signal.SIGTERM, before)
