"""Having the disk hold what was written, so that reading it back asks the disk.

A system keeps written bytes in memory and reads from there: a disk that stored other bytes would go
unnoticed. So the bytes are made durable, and the system drops its copy before they are read back:
of small files all of it, of larger ones their ends and one MiB of sixteen. Reading all of a large
file from the disk would add a third and more to the time of its conversion.

This finds a disk that fails or lies, and not every single bit that it stores wrong; the digests in
the file find these whenever it is read. Dropping the copy is a request: file systems in memory
refuse it, and every system does for pages that another process has mapped. A disk, or the host of a
virtual machine, has a memory of its own, which no program can look behind.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

from jaxmha.checkpoint import system

_LARGE = 64 << 20
_WHOLE, _SAMPLE, _STEP = 4 << 20, 1 << 20, 16 << 20


def settle(fd: int) -> None:
    """Makes a file durable, then has the system forget what is to be read from the disk."""
    os.fsync(fd)
    size = os.fstat(fd).st_size
    whole = [(0, 0)]  # to the end
    last = max(0, size - _SAMPLE) // _SAMPLE * _SAMPLE
    sample = [*((at, _SAMPLE) for at in range(0, size, _STEP)), (last, 0)]
    for at, count in whole if size <= _WHOLE else sample:
        system.drop_cached(fd, at, count)


@contextlib.contextmanager
def flushing(fd: int, size: int) -> Iterator[None]:
    """Sends much that is written to the disk all the while; its errors are raised at the end."""
    if size <= _LARGE:
        yield
        return
    system.reserve(fd, size)
    done, errors = threading.Event(), []

    def flush() -> None:
        while not done.wait(0.05):
            try:
                system.flush_data(fd)
            except OSError as e:  # the system tells of an error once
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
