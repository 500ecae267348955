"""Reads every hostile file under a watch and prints the worst memory and time.

    python -m tests.checkpoint.hostile_run [PREFIX]

The watch is 64 MiB and twice the files, 5 s of CPU, and no file outside opened.
"""

import os
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

from jaxmha import checkpoint
from tests.checkpoint import hostile

SECONDS, MEMORY = 5.0, 64 << 20
ROOT = str(Path(__file__).parents[2])
# Modules that are imported late, and what the watch itself reads.
LIBRARIES = (sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix), ROOT, "/proc/")
inside = ""  # the folder of the file that is being read
opened: list[str] = []


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    """Notes every file that Python opens outside of the folder, links resolved."""
    if event == "open" and inside and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if os.path.isabs(arguments[0]) and not path.startswith((inside, *LIBRARIES)):
            opened.append(path)


def _resident() -> int:
    """The most memory of this process since the last call, what libraries take included."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def outcome(path: Path) -> str:
    """The class of the error, or "read"."""
    try:
        with checkpoint.open(path) as file:
            for name in file:
                _ = file[name]
    except checkpoint.CheckpointError as error:
        return type(error).__name__
    return "read"


def main(prefix: str = "") -> int:
    """0 where every file was refused as it must be, within the watch."""
    global inside
    defects, worst_memory, worst_seconds, count = 0, 0, 0.0, 0
    sys.addaudithook(_hook)
    for name, case in (hostile.SOUND | hostile.CASES).items():
        if not name.startswith(prefix):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"m{case.suffix}"
            case.build(path)
            size = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
            opened.clear()
            inside = os.path.realpath(folder)
            start, resident = time.process_time(), _resident()
            found = outcome(path)
            seconds = time.process_time() - start
            native = _resident() - resident - 2 * size
            tracemalloc.start()
            outcome(path)
            memory = max(native, tracemalloc.get_traced_memory()[1] - 2 * size)
            tracemalloc.stop()
            inside = ""
        expected = "read" if name in hostile.SOUND else case.error.__name__
        bad = found != expected or memory > MEMORY or seconds > SECONDS or bool(opened)
        if bad:
            print(
                f"{name}: {found} (expected {expected}), {memory:,} bytes, {seconds:.1f} s, {opened}"
            )
        count, defects = count + 1, defects + bad
        worst_memory, worst_seconds = max(worst_memory, memory), max(worst_seconds, seconds)
    print(
        f"{count} files: {defects} defects; at most {worst_memory / 2**20:.1f} MiB beyond twice the "
        f"file, {worst_seconds:.2f} s"
    )
    return int(defects > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
