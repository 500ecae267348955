"""Memory and cores of a process and of the machine; no other benchmark module calls POSIX."""

import contextlib
import os
import sys
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# Share of the available memory that a process may take: allocations fail before the machine swaps.
SHARE = 0.8


def peak() -> int:
    """Largest resident size of this process so far, in bytes.

    On Linux it is the kernel's `VmHWM`: the count of getrusage starts at the size of the parent.
    """
    with contextlib.suppress(OSError, ValueError):
        return counted("VmHWM") * 1024
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget() -> None:
    """Resets `peak` to the memory in use now, on a Linux that can; elsewhere without effect."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def limit() -> None:
    """Limits the address space, so that allocations fail before the machine runs out of memory."""
    if resource is None:
        return
    with contextlib.suppress(OSError, ValueError):
        now = counted("VmSize")
        free = counted("MemAvailable", "/proc/meminfo")
        soft = int((now + SHARE * free) * 1024)
        resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


def counted(field: str, path: str = "/proc/self/status") -> int:
    """The number of a field in a file of Linux's /proc, by default of this process, in KiB."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise ValueError(f"{path} has no {field}")


def total() -> int:
    """Bytes of memory of the machine; 0 if the system does not tell."""
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_cores(count: int) -> None:
    """Keeps this process to its first cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
