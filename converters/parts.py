"""One conversion by several processes of this machine, a part of the shards each."""

import re
import subprocess
import sys
from collections.abc import Mapping
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
    workers = [
        subprocess.Popen(
            [*command, "--resume", "--json", "--part", f"{i}/{count}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for i in range(1, count + 1)
    ]
    try:
        codes = {i: worker.wait() for i, worker in enumerate(workers, 1)}
        return {i: code for i, code in codes.items() if code}
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
