"""Kills writers with SIGKILL, before each of their steps and at random moments of their work.

    python -m tests.checkpoint.kills .safetensors --moments 200

Every writer is a fork of this process. Prints a JSON object of counts; exits with 1 if ever the
target was neither the whole old checkpoint nor the whole new one.
"""

import argparse
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmha.converters import checkpoint
from tests.checkpoint import hostile

STEPS = ("fsync", "replace", "rename", "link", "unlink", "fchmod", "chmod", "mkdir")


def tensors(seed: int) -> dict[str, np.ndarray]:
    made = np.random.default_rng(seed)
    return {f"layers/{i}/vars/0": made.random((70, 101 + seed)) for i in range(6)}


def write(path: Path, seed: int) -> None:
    shards = {"shard_size": 120_000} if path.name.endswith(".index.json") else {}
    checkpoint.write(path, tensors(seed), force=True, **shards)  # type: ignore[arg-type]


def state(path: Path) -> str:
    """ "old", "new", or what is wrong."""
    try:
        with checkpoint.open(path) as file:
            found = {name: file[name] for name in file}
    except checkpoint.CheckpointError as e:
        return f"unreadable: {e}"
    for seed, name in enumerate(("old", "new")):
        expected = tensors(seed)
        if found.keys() == expected.keys() and all(
            np.array_equal(found[n], expected[n]) for n in expected
        ):
            return name
    return "neither the old nor the new tensors"


class _File(io.FileIO):
    """A file that tells before it writes."""

    before: Callable[[], None]

    def write(self, data: Any) -> int:
        self.before()
        return super().write(data) or 0

    def truncate(self, size: int | None = None) -> int:
        self.before()
        return super().truncate(size)


def forked(act: Callable[[], None]) -> int:
    """The process id of a child that acts and ends."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        act()
        code = 0
    except checkpoint.CheckpointError as e:
        print(e, file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dies_at(path: Path, step: int) -> Callable[[], None]:
    """A writer that kills itself before its n-th step."""
    count = 0

    def before() -> None:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def act() -> None:
        for name in STEPS:

            def wrapped(*args: Any, real: Any = getattr(os, name), **settings: Any) -> Any:
                before()
                return real(*args, **settings)

            setattr(os, name, wrapped)
        _File.before = staticmethod(before)
        os.fdopen = lambda fd, mode: io.BufferedRandom(_File(fd, "r+b"))  # type: ignore
        write(path, 1)

    return act


def check(path: Path, counts: Counter[str]) -> bool:
    """Looks at what a killed writer left, in a process of its own; then restores the old."""
    reader, writer = os.pipe()

    def look() -> None:
        os.write(writer, state(path).encode())

    child = forked(look)
    os.close(writer)
    with os.fdopen(reader) as answer:
        seen = answer.read()
    ended(child)
    counts[seen] += 1
    counts["temporaries"] += len(list(path.parent.glob(".*.tmp")))
    if seen == "new":
        assert ended(forked(lambda: write(path, 0))) == 0
    return seen in ("old", "new")


def run(suffix: str, moments: int, every: int = 1) -> dict[str, int]:
    """Kills before every (every n-th) step, then at random moments; what was found."""
    counts: Counter[str] = Counter()
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"m{suffix}"
        assert ended(forked(lambda: write(path, 0))) == 0
        step, code = 1, -signal.SIGKILL
        while code == -signal.SIGKILL:
            code = ended(forked(dies_at(path, step)))
            counts["before a step"] += code == -signal.SIGKILL
            assert check(path, counts), counts
            step += every
        assert code == 0, code
        start = time.perf_counter()
        assert ended(forked(lambda: write(path, 1))) == 0
        seconds = time.perf_counter() - start
        assert ended(forked(lambda: write(path, 0))) == 0
        while counts["at a moment"] < moments:  # others had ended before
            child = forked(lambda: write(path, 1))
            time.sleep(chance.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            counts["at a moment"] += ended(child) == -signal.SIGKILL
            assert check(path, counts), counts
        # The next writer removes what is left of all killed ones.
        assert ended(forked(lambda: write(path, 1))) == 0
        left = set(Path(folder).iterdir()) - {path, *hostile.files(path)}
        assert not left, left
    return dict(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("suffix")
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(run(options.suffix, options.moments, options.every), indent=1))


if __name__ == "__main__":
    main()
