"""Syncs written files to disk and drops their cached pages, so that reading back reads the disk.

An operating system keeps written bytes in memory and reads from there, so that a disk that stored
other bytes would go unnoticed. Therefore files are synced, and the system drops cached pages before
they are read back: all of a small file; both ends and one MiB in every 16 MiB of a large file.
Reading all of a large file from the disk would make its conversion at least a third longer.

This detects a failing disk, but not every wrong bit; the digests in the file detect those whenever
it is read. Dropping pages is a request: file systems in memory ignore it, and every system ignores
it for pages that another process has mapped. A disk, or the host of a virtual machine, has its own
cache, which no program can bypass.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

from jaxmha.checkpoint import system

_LARGE = 64 << 20
_WHOLE, _SAMPLE, _STEP = 4 << 20, 1 << 20, 16 << 20


def settle(fd: int) -> None:
    """Syncs a file to disk, then drops the cached pages of the ranges to read from the disk."""
    os.fsync(fd)
    size = os.fstat(fd).st_size
    whole = [(0, 0)]  # offset and size; size 0: to the end
    last = max(0, size - _SAMPLE) // _SAMPLE * _SAMPLE
    sample = [*((at, _SAMPLE) for at in range(0, size, _STEP)), (last, 0)]
    system.reread(fd, whole if size <= _WHOLE else sample)


@contextlib.contextmanager
def flushing(fd: int, size: int) -> Iterator[None]:
    """Flushes a large file to disk while the body of `with` writes it; raises errors at the end."""
    if size <= _LARGE:
        yield
        return
    system.reserve(fd, size)
    done, errors = threading.Event(), []

    def flush() -> None:
        while not done.wait(0.05):
            try:
                system.flush_data(fd)
            except OSError as e:  # the system reports it once, so keep it
                errors.append(e)
                return

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]
