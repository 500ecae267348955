"""Kills writers with SIGKILL, before each of their steps and at random moments of their work.

    python -m tests.checkpoint.kills .safetensors --moments 200

Every writer is a fork of this process. Prints a JSON object of counts; exits with 1 if ever the
target was neither the whole old checkpoint (or absent) nor the whole new one, or a file of others
that lay there was lost.
"""

import argparse
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmha import checkpoint
from jaxmha.checkpoint import atomic, journal, temporaries
from tests.checkpoint import hostile

STEPS = ("fsync", "replace", "rename", "link", "unlink", "fchmod", "chmod", "mkdir")


def tensors(seed: int) -> dict[str, np.ndarray]:
    made = np.random.default_rng(seed)
    return {f"layers/{i}/vars/0": made.random((70, 101 + seed)) for i in range(6)}


def text(seed: int) -> bytes:
    """A plan: what commands write that is no checkpoint."""
    return f"# {seed}\n".encode() * 30_000


def write(path: Path, seed: int) -> None:
    if path.suffix == ".toml":
        atomic.replace_by(path, text(seed), force=True)
        return
    shards = {"shard_size": 120_000} if path.name.endswith(".index.json") else {}
    checkpoint.write(path, tensors(seed), force=True, **shards)  # type: ignore[arg-type]


def state(path: Path) -> str:
    """ "old", "new", or what is wrong."""
    if path.suffix == ".toml":
        whole = {text(seed): name for seed, name in enumerate(("old", "new"))}
        return whole.get(path.read_bytes(), "neither the old nor the new text")
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


def strangers(path: Path) -> set[Path]:
    """Puts files of others next to a target: lists, locks, links and temporaries, all to stay."""
    folder, mine = path.parent, path.parent / "mine"
    mine.mkdir()
    for name in ("thesis.txt", "model.safetensors"):
        (mine / name).write_text(name)
        (folder / name).write_text(name)
    alike = [path.with_name(f".{path.name}.{digit * 16}.tmp") for digit in "01234567"]
    listed = {"a": "thesis.txt", "b": "model.safetensors"}
    alike[0].write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    alike[1].write_bytes(journal.content(path, [folder / name for name in listed.values()]))
    alike[2].write_bytes(b"")
    alike[3].symlink_to(mine / "thesis.txt")
    os.mkfifo(alike[4])
    os.link(mine / "model.safetensors", alike[5])
    alike[6].mkdir()
    (alike[6] / "_METADATA").write_text("{}")
    proven = [temporaries.fresh(path) for _ in range(4)]
    proven[0].symlink_to(mine / "thesis.txt")
    os.mkfifo(proven[1])
    os.link(mine / "thesis.txt", proven[2])
    proven[3].write_bytes(journal.content(path, [folder / name for name in listed.values()]))
    if not path.name.endswith(".index.json"):  # elsewhere it is a temporary like any other
        proven.pop().unlink()
    (folder / f"{path.name}.lock").write_text("")
    alike[7].with_suffix(".txt").write_text("")
    return {one for one in folder.rglob("*") if one != path}


def held(files: set[Path]) -> dict[Path, tuple[int, bytes]]:
    """The inode of every file that is there, and its content or where it leads."""
    found = {}
    for file in files:
        if file.is_symlink():
            found[file] = file.lstat().st_ino, os.readlink(file).encode()
        elif file.exists():
            found[file] = file.stat().st_ino, file.read_bytes() if file.is_file() else b""
    return found


def check(path: Path, counts: Counter[str], overwrites: bool, others: dict[Path, Any]) -> bool:
    """Looks at what a killed writer left, in a process of its own; then restores what was there."""
    reader, writer = os.pipe()

    def look() -> None:
        exists = os.path.lexists(path)
        os.write(writer, (state(path) if exists else "absent").encode())

    child = forked(look)
    os.close(writer)
    with os.fdopen(reader) as found:
        seen = found.read()
    ended(child)
    counts[seen] += 1
    counts["temporaries"] += len({*path.parent.glob(".*.tmp")} - others.keys())
    assert held(set(others)) == others, "something of others is lost"
    if seen == "new" and overwrites:
        assert ended(forked(lambda: write(path, 0))) == 0
    elif seen == "new":
        gone(path)
    return seen in (("old", "new") if overwrites else ("absent", "new"))


def gone(path: Path) -> None:
    """Removes a target and its shards."""
    for file in hostile.files(path) if path.is_file() else []:
        file.unlink(missing_ok=True)
    if path.is_dir():
        shutil.rmtree(path)


def run(
    suffix: str, moments: int, every: int = 1, overwrites: bool = True, strange: bool = True
) -> dict[str, int]:
    """Kills before every (every n-th) step, then at random moments; the counts."""
    counts: Counter[str] = Counter()
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"m{suffix}"
        others = held(strangers(path)) if strange else {}
        if overwrites:
            assert ended(forked(lambda: write(path, 0))) == 0
        step, code = 1, -signal.SIGKILL
        while code == -signal.SIGKILL:
            code = ended(forked(dies_at(path, step)))
            counts["before a step"] += code == -signal.SIGKILL
            assert check(path, counts, overwrites, others), counts
            step += every
        assert code == 0, code
        start = time.perf_counter()
        assert ended(forked(lambda: write(path, 1))) == 0
        seconds = time.perf_counter() - start
        if overwrites:
            assert ended(forked(lambda: write(path, 0))) == 0
        else:
            gone(path)
        while counts["at a moment"] < moments:  # others had ended before
            child = forked(lambda: write(path, 1))
            time.sleep(chance.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            counts["at a moment"] += ended(child) == -signal.SIGKILL
            assert check(path, counts, overwrites, others), counts
        # The next writer removes what is left of all killed ones.
        assert ended(forked(lambda: write(path, 1))) == 0
        left = set(Path(folder).iterdir()) - {path, *hostile.files(path)} - others.keys()
        assert not left, left
        assert held(set(others)) == others
    return dict(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("suffix")
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--new", action="store_true", help="nothing is there to overwrite")
    parser.add_argument("--alone", action="store_true", help="no files of others are there")
    options = parser.parse_args()
    found = run(options.suffix, options.moments, options.every, not options.new, not options.alone)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
