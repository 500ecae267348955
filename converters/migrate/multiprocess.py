"""One conversion by several processes of this machine, a part of the shards each."""

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
    """The i-th of n parts, from 0.

    Raises:
      ValueError: the text is none.

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
    """Runs `jaxmha convert --part` so many times at once, until all have ended; those that failed,
    with their exit codes.

    Whoever converts the whole afterwards keeps what is there and does the rest, or says what is
    wrong.
    """
    # -P: modules in the working folder, which may be a stranger's, are not imported.
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
    """SIGTERM ends the process as an exception does, so that it takes its workers with it; before
    all have started, when what it gives is called: none is lost between its start and its name.
    """
    asked = threading.Event()

    def check() -> None:
        if asked.is_set():
            sys.exit(128 + signal.SIGTERM)

    def terminated(*_: Any) -> None:
        asked.set()
        if all_started():
            check()

    if threading.current_thread() is not threading.main_thread():
        yield check  # handlers are the main thread's
        return
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield check
    finally:
        signal.signal(signal.SIGTERM, before)
