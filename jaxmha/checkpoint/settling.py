"""Makes written files durable and drops their cached copy, so that reading back reads the disk.

An operating system keeps written bytes in memory and reads from there, so that a disk that stored
other bytes would go unnoticed. So the bytes are made durable, and the system drops its copy before
they are read back: all of a small file, of a larger one the ends and one MiB of sixteen. Reading all
of a large file from the disk would add a third and more to the time of its conversion.

This finds a disk that fails, but not every single bit that it stores wrong; the digests in the file
find these whenever it is read. Dropping the copy is a request: file systems in memory ignore it, and
every system does for pages that another process has mapped. A disk, or the host of a virtual machine,
has a cache of its own, which no program can bypass.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

from jaxmha.checkpoint import system

_LARGE = 64 << 20
_WHOLE, _SAMPLE, _STEP = 4 << 20, 1 << 20, 16 << 20


def settle(fd: int) -> None:
    """Makes a file durable, then drops the cached copy of the ranges to read from the disk."""
    os.fsync(fd)
    size = os.fstat(fd).st_size
    whole = [(0, 0)]  # to the end
    last = max(0, size - _SAMPLE) // _SAMPLE * _SAMPLE
    sample = [*((at, _SAMPLE) for at in range(0, size, _STEP)), (last, 0)]
    for at, count in whole if size <= _WHOLE else sample:
        system.drop_cached(fd, at, count)


@contextlib.contextmanager
def flushing(fd: int, size: int) -> Iterator[None]:
    """Flushes a large file to the disk while it is written; raises errors of flushing at the end."""
    if size <= _LARGE:
        yield
        return
    system.reserve(fd, size)
    done, errors = threading.Event(), []

    def flush() -> None:
        while not done.wait(0.05):
            try:
                system.flush_data(fd)
            except OSError as e:  # the system reports an error only once
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
