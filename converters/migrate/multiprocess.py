"""Runs one conversion in several local processes, each of which writes a part of the shards."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


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
    command = [sys.executable, "-P", "-m", "jaxmha.converters", "convert"]
    command += [str(source), str(destination)]
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
                        stdin=subprocess.DEVNULL,
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
